"""Decide how much of each draft survives: choices, distributions and noise, nothing else.

Matching is exact for any tree, however the tree was made. The rules that look at probabilities have
two conditions. The drafts must really have been drawn from these probabilities. And the decision
whether a sampled draft is verified, and by which rule, must not depend on the draft's own token or
on anything drawn after it. (A deterministic draft follows from the text before it, so it may be
left out for any reason that depends on that text only.)

Traversal verification (Weng et al., NeurIPS 2025, arXiv 2505.12398) is block verification (Sun et
al. 2025, arXiv 2403.10444) of trees; of a chain it is block verification itself. Every row has a
weight w, the probability that its subtree is accepted, and a rest, the part of the target's p that
its children have not used yet. The root's weight is 1, and every rest begins as p. Children are
tested in the order of their rows. A child x that was drawn from q has the weight
min(1, w * rest(x) / q(x)). If the child's subtree is refused, its parent continues with

    left = max(w * rest - q, 0),   rest = left / sum(left),   w = sum(left) / (sum(left) + 1 - w)

and the next child is tested. After the last child the path ends at the parent with probability w,
with a token of the rest; otherwise the parent's subtree is refused too. A deterministic child
counts as drawn from a distribution with one token.

Whatever is drawn below a row, its subtree is accepted with exactly the row's weight. So a tree may
grow by any rule that decides whether a row exists before the row's own token is drawn, with noise
of its own. The rule may look at everything that was drawn earlier, in other branches too. Each
child's q may depend on the siblings before it: drawing without replacement excludes them.

Dimension key: B requests, N most drafts of any request, N1 = N + 1 rows with the root, R flat
rows, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from outdraft.kernels.data.drafts import (
    DraftBatch,
    Rule,
    Verdict,
    ancestors_BN1N,
    depths_BN1,
    place_R,
    row_index_BN1,
    row_start_B,
)
from outdraft.kernels.data.noise import NoiseKeys, Purpose
from outdraft.kernels.data.sampling import SamplingBatch
from outdraft.kernels.torch import noise
from outdraft.kernels.torch.sampling import choose

# (log weights [B, V], number of accepted drafts [B], is a sampled draft refused there [B])
# -> ids [B] drawn from these weights
Draw = Callable[[Tensor, Tensor, Tensor], Tensor]


def requests_of_rows(drafts: DraftBatch, num_rows: int) -> Tensor:
    """int64 [R]: the request of each flat row; rows past the last request count as its own."""
    ends_B = drafts.num_rows_B.cumsum(0)
    rows_R = torch.arange(num_rows, device=drafts.device)
    return torch.searchsorted(ends_B, rows_R, right=True).clamp_(max=drafts.num_requests - 1)


def verify(
    processed_RV: Tensor,
    drafts: DraftBatch,
    sampling: SamplingBatch,
    num_tokens_B: Tensor,
    rule: Rule,
    source: noise.Noise = noise,
) -> Verdict:
    """Decide how far the drafts of each request survive, and the token after them; new tensors.

    Requests that draw (`SamplingBatch.draws_B`) are judged by a rule where they have sampled
    drafts; all others are matched with choices of Purpose.SAMPLE.

    Args:
        processed_RV: processed logits of the target, flat rows; those past the last request are
            ignored.
        num_tokens_B: int64, committed tokens.
        source: another one makes the same noise faster.
    """
    step = VerificationStep(processed_RV, drafts, sampling, num_tokens_B, source)
    if rule == Rule.MATCH or not (drafts.any_sampled and sampling.any_draws):
        return step.matched()
    is_tokens = rule == Rule.TOKEN and not drafts.sampled_trees
    judge = reject_tokens if is_tokens else traverse
    return step.beside_matched(judge(processed_RV, drafts, step.coins(), step.draw))


@dataclass(frozen=True, slots=True)
class VerificationStep:
    """The processed flat rows of a step, and the keys of its noise.

    Each kind of draw has its own stream. The target's own choices use SAMPLE; so does the bonus
    token, and a fully accepted draft continues as plain decoding does. Coins use ACCEPT, and
    recovered tokens use RECOVER.
    """

    processed_RV: Tensor
    drafts: DraftBatch
    sampling: SamplingBatch
    num_tokens_B: Tensor
    source: noise.Noise = noise

    def coins(self) -> Tensor:
        """float32 [B, N]: one per draft."""
        place_N = torch.arange(self.drafts.width, device=self.drafts.device)
        position_BN = self.num_tokens_B[:, None] + place_N
        keys = NoiseKeys.of(
            self.sampling.seeds_B[:, None].expand_as(position_BN).flatten(),
            position_BN.flatten(),
            Purpose.ACCEPT,
            self.num_tokens_B[:, None].expand_as(position_BN).flatten(),
        )
        return self.source.uniform_scalar(keys).view_as(position_BN)

    def draw(self, log_weights_BV: Tensor, depth_B: Tensor, is_refused_B: Tensor) -> Tensor:
        """A token of each request at a depth."""
        purpose_B = torch.where(is_refused_B, int(Purpose.RECOVER), int(Purpose.SAMPLE))
        seeds_B, positions_B = self.sampling.seeds_B, self.num_tokens_B + depth_B
        keys = NoiseKeys(seeds_B, positions_B, purpose_B, torch.zeros_like(positions_B))
        return noise.sample_gumbel(log_weights_BV, keys, self.source.gumbel)

    def matched(self) -> Verdict:
        """The path of the target's own choices."""
        if self.sampling.all_greedy:
            return match(self.processed_RV.argmax(1), self.drafts)
        request_R = requests_of_rows(self.drafts, len(self.processed_RV))
        depth_R = depths_BN1(self.drafts)[request_R, place_R(self.drafts, request_R)]
        keys = NoiseKeys.of(
            self.sampling.seeds_B[request_R], self.num_tokens_B[request_R] + depth_R, Purpose.SAMPLE
        )
        is_greedy_R = self.sampling.is_greedy_B[request_R]
        chosen_R = choose(self.processed_RV, keys, is_greedy_R, self.source.gumbel)
        return match(chosen_R, self.drafts)

    def beside_matched(self, judged: Verdict) -> Verdict:
        """The verdict of a rule on requests that draw and have sampled drafts; of the others the
        matched one."""
        drafts, sampling = self.drafts, self.sampling
        if drafts.all_sampled and sampling.all_draw:
            return judged
        assert drafts.is_sampled_BN is not None
        is_sampled_B = (drafts.is_sampled_BN & drafts.is_draft_BN).any(1)
        return self.merged(is_sampled_B & sampling.draws_B, judged)

    def merged(self, takes_judged_B: Tensor, judged: Verdict) -> Verdict:
        """The judged verdict on some requests, the matched one on the others."""
        matched, takes_B1 = self.matched(), takes_judged_B[:, None]
        return Verdict(
            torch.where(takes_B1, judged.token_ids_BN1, matched.token_ids_BN1),
            torch.where(takes_judged_B, judged.num_emitted_B, matched.num_emitted_B),
            torch.where(takes_B1, judged.rows_BN, matched.rows_BN),
        )


def match(choices_R: Tensor, drafts: DraftBatch) -> Verdict:
    """Walk every draft along the target's own choices.

    The path is the one that plain decoding would have produced, however the drafts were made and
    cut.

    Args:
        choices_R: int64, the target's pick after each flat row, by argmax or by sampling.
    """
    choices_BN1 = choices_R[row_index_BN1(drafts)]
    parents_BN = torch.where(drafts.is_draft_BN, drafts.parents_BN, 0)
    is_hit_BN = (choices_BN1.gather(1, parents_BN) == drafts.token_ids_BN) & drafts.is_draft_BN
    is_on_path_BN = path_of_firsts(is_hit_BN, drafts)  # siblings may hold the same token
    last_B1 = choices_BN1.gather(1, last_row_B(is_on_path_BN)[:, None])
    return verdict_of_path(drafts, is_on_path_BN, last_B1[:, 0])


def path_of_firsts(is_hit_BN: Tensor, drafts: DraftBatch) -> Tensor:
    """bool [B, N]: the draft and all its ancestors are hit, and none of their earlier siblings.

    Padding must not be hit.
    """
    parents_BN = torch.where(drafts.is_draft_BN, drafts.parents_BN, 0)
    same_parent_BNN = parents_BN[:, :, None] == parents_BN[:, None, :]
    is_later_BN = (same_parent_BNN & is_hit_BN[:, None, :]).tril(-1).any(2)
    is_first_BN = is_hit_BN & ~is_later_BN
    return (is_first_BN[:, None, :] | ~ancestors_BN1N(drafts)[:, 1:]).all(2)


def verdict_of_path(drafts: DraftBatch, is_on_path_BN: Tensor, last_B: Tensor) -> Verdict:
    """The drafts on one path from the root, then one more token."""
    width = drafts.width
    num_accepted_B1 = is_on_path_BN.sum(1, keepdim=True)
    # A parent precedes its children, so the rows of a path in order are a path in order.
    place_N = torch.arange(width, device=drafts.device)
    rows_BN = torch.where(is_on_path_BN, place_N, width).sort(1).values
    ids_BN1 = pad(drafts.token_ids_BN, (0, 1), value=-1).gather(
        1, pad(rows_BN, (0, 1), value=width)
    )
    return Verdict(
        token_ids_BN1=ids_BN1.scatter(1, num_accepted_B1, last_B[:, None]),
        num_emitted_B=num_accepted_B1[:, 0] + 1,
        rows_BN=torch.where(rows_BN < width, rows_BN, -1),
    )


def last_row_B(is_on_path_BN: Tensor) -> Tensor:
    """int64 [B]: the row, 0 = root, where each path ends."""
    rows_N = torch.arange(1, is_on_path_BN.shape[1] + 1, device=is_on_path_BN.device)
    return pad(is_on_path_BN * rows_N, (1, 0)).amax(1)


def traverse(logits_RV: Tensor, drafts: DraftBatch, coins_BN: Tensor, draw: Draw) -> Verdict:
    """Traversal verification: accept a path of each padded tree, N at least 1.

    Weights do not depend on coins, so those of all rows are computed first. Then the rows are
    tested, children before their parent: the path ends at the first coin below its row's weight.

    Args:
        logits_RV: processed logits of the target, flat rows.
        drafts: trees; the probabilities of a sampled draft are those that it was drawn from, given
            its siblings of smaller rows.
        coins_BN: uniform noise in (0, 1), one per draft, independent of everything else.
        draw: draws the last token, with noise independent of everything else.
    """
    weight_BN, rest_RV = _all_refused(logits_RV, drafts)
    stops_BN = (coins_BN < weight_BN) & drafts.is_draft_BN
    stops_below_BN = (ancestors_BN1N(drafts)[:, 1:] & stops_BN[:, :, None]).any(1)
    is_on_path_BN = path_of_firsts(stops_below_BN, drafts)

    last_B = last_row_B(is_on_path_BN)
    at_B = row_start_B(drafts) + last_B
    rest_BV = rest_RV[at_B]
    has_rest_B1 = rest_BV.amax(1, keepdim=True) > 0  # nothing is left where p == q up to rounding
    log_weights_BV = torch.where(has_rest_B1, rest_BV.log(), logits_RV[at_B])
    is_refused_B = ((drafts.parents_BN == last_B[:, None]) & drafts.is_draft_BN).any(1)
    token_B = draw(log_weights_BV, is_on_path_BN.sum(1), is_refused_B)
    return verdict_of_path(drafts, is_on_path_BN, token_B)


def _all_refused(logits_RV: Tensor, drafts: DraftBatch) -> tuple[Tensor, Tensor]:
    """Each draft's weight [B, N] and each row's rest [R, V], if all of its children are refused."""
    requests_B = torch.arange(drafts.num_requests, device=drafts.device)
    start_B, is_draft_BN = row_start_B(drafts), drafts.is_draft_BN
    rest_RV = logits_RV.softmax(1)
    weight_BN1 = torch.zeros_like(pad(is_draft_BN, (1, 0)), dtype=torch.float64)
    weight_BN1[:, 0] = 1
    for draft in range(drafts.width):
        is_draft_B, ids_B = is_draft_BN[:, draft], drafts.token_ids_BN[:, draft].clamp(min=0)
        parent_B = torch.where(is_draft_B, drafts.parents_BN[:, draft], 0)
        at_B = start_B + parent_B
        weight_B, rest_BV = weight_BN1[requests_B, parent_B], rest_RV[at_B]
        q_BV = drawn_from(drafts, torch.full_like(parent_B, draft))
        p_B, q_B = (of_BV[requests_B, ids_B].double() for of_BV in (rest_BV, q_BV))
        own_B = (weight_B * p_B / q_B.clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1)
        weight_BN1[:, draft + 1] = torch.where(is_draft_B, own_B, 0)

        left_BV = residual(rest_BV, q_BV, weight_B.to(rest_BV.dtype))
        left_B = left_BV.sum(1, dtype=torch.float64)
        has_left_B = is_draft_B & (left_B > 0)
        refused_B = torch.where(has_left_B, left_B / (left_B + (1 - weight_B)), 0)
        weight_BN1[requests_B, parent_B] = torch.where(is_draft_B, refused_B, weight_B)
        left_BV = torch.where(has_left_B[:, None], left_BV / left_B[:, None], 0)
        rest_RV[at_B] = torch.where(is_draft_B[:, None], left_BV.to(rest_BV.dtype), rest_BV)
    return weight_BN1[:, 1:], rest_RV


def reject_tokens(logits_RV: Tensor, drafts: DraftBatch, coins_BN: Tensor, draw: Draw) -> Verdict:
    """Token-level rejection of padded chains; arguments as for `traverse`.

    Accepts draft x while coin < p(x) / q(x), then draws from max(p - q, 0); from p itself after the
    last draft, and where nothing is left (p == q up to rounding). Leviathan et al. 2023, arXiv
    2211.17192, algorithm 1.
    """
    assert drafts.probs_BNV is not None
    assert drafts.is_sampled_BN is not None
    p_BN1V = logits_RV.softmax(1)[row_index_BN1(drafts)]
    ids_BN1 = drafts.token_ids_BN.clamp(min=0)[:, :, None]
    p_BN = p_BN1V[:, :-1].gather(2, ids_BN1)[:, :, 0]
    q_BN = drafts.probs_BNV.gather(2, ids_BN1)[:, :, 0]
    q_BN = torch.where(drafts.is_sampled_BN, q_BN, 1.0)
    is_accepted_BN = ((coins_BN * q_BN < p_BN) & drafts.is_draft_BN).long().cumprod(1).bool()

    at_B = is_accepted_BN.sum(1)
    p_BV = p_BN1V[torch.arange(drafts.num_requests, device=drafts.device), at_B]
    q_BV = drawn_from(drafts, at_B.clamp(max=drafts.width - 1))
    left_BV = residual(p_BV, q_BV, torch.ones_like(p_BV[:, 0]))
    is_refused_B = at_B < drafts.num_drafts_B
    takes_left_B = is_refused_B & (left_BV.amax(1) > 0)
    weights_BV = torch.where(takes_left_B[:, None], left_BV, p_BV)
    return verdict_of_path(drafts, is_accepted_BN, draw(weights_BV.log(), at_B, is_refused_B))


def residual(p_BV: Tensor, q_BV: Tensor, weight_B: Tensor) -> Tensor:
    """[B, V]: max(weight * p - q, 0): what drafts drawn from q do not cover of the target.

    Nothing where q is NaN, which a broken drafter may give.
    """
    return (weight_B[:, None] * p_BV - q_BV).nan_to_num_(nan=0.0).clamp_(min=0)


def drawn_from(drafts: DraftBatch, row_B: Tensor) -> Tensor:
    """[B, V]: the proposer's distribution of one draft of each request, one-hot if it has none."""
    assert drafts.probs_BNV is not None
    assert drafts.is_sampled_BN is not None
    requests_B = torch.arange(drafts.num_requests, device=drafts.device)
    q_BV = drafts.probs_BNV[requests_B, row_B]
    ids_B1 = drafts.token_ids_BN[requests_B, row_B].clamp(min=0)[:, None]
    one_hot_BV = torch.zeros_like(q_BV).scatter(1, ids_B1, 1.0)
    return torch.where(drafts.is_sampled_BN[requests_B, row_B][:, None], q_BV, one_hot_BV)
