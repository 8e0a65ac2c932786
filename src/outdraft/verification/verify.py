"""Decide how much of each draft survives: pure functions of choices, distributions and noise.

They use no proposer, no random generator and no clock. `match_draft` is exact for any tree, however
the tree was made. The rules that look at probabilities have two conditions. The drafts must really
have been drawn from these probabilities. And the decision whether a sampled draft is verified, and
by which rule, must not depend on the draft's own token or on anything drawn after it. (A
deterministic draft follows from the text before it, so it may be left out for any reason that
depends on that text only.) Under these conditions `rejection_sample` and `block_verify` are exact
for chains of sampled and deterministic rows, and `verify_tree.verify_tree` is exact for trees.
`verify_typical` is never exact.

Dimension key: B requests, N most drafts of any request, N1 = N + 1 rows with the root, R flat
rows, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from outdraft.verification.draft_batch import DraftBatch, ancestors_BN1N, row_index_BN1

# (log weights [B, V], number of accepted drafts [B], is a sampled draft refused there [B])
# -> ids [B] drawn from these weights
Draw = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What each request keeps. Everything stays on the device.

    Attributes:
        token_ids_BN1: int64; the emitted ids in order, padded with -1: the accepted drafts, then
            one more token (the recovered token after a rejection, the bonus token after none).
        num_emitted_B: int64, at least 1.
        rows_BN: int64; accepted draft rows in order, counted from 0 (the root is not among them),
            padded with -1. A chain's are 0, 1, 2, ...
    """

    token_ids_BN1: Tensor
    num_emitted_B: Tensor
    rows_BN: Tensor


def cut_behind(verdict: Verdict, is_end_BN: Tensor) -> Verdict:
    """Emit nothing behind the first accepted draft of `is_end_BN`: it becomes the last token.

    This is exact if only the tokens up to a draft decide whether it is an end. Then the result is a
    beginning of what was emitted, and that beginning alone says where it stops.
    """
    place_N1 = torch.arange(verdict.token_ids_BN1.shape[1], device=is_end_BN.device)
    is_accepted_BN = verdict.rows_BN >= 0
    goes_on_BN = ~(is_accepted_BN & is_end_BN.gather(1, verdict.rows_BN.clamp(min=0)))
    num_before_B = goes_on_BN.long().cumprod(1).sum(1)  # that of all places, if there is no end
    num_emitted_B = torch.minimum(verdict.num_emitted_B, num_before_B + 1)
    last_B1 = num_emitted_B[:, None] - 1
    return Verdict(
        token_ids_BN1=verdict.token_ids_BN1.masked_fill(place_N1 > last_B1, -1),
        num_emitted_B=num_emitted_B,
        rows_BN=verdict.rows_BN.masked_fill(place_N1[:-1] >= last_B1, -1),
    )


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How far the chains were accepted.

    Attributes:
        num_accepted_B: int64.
        weight_B: the weight of the target in the residual after the last accepted draft: 1 for
            token-level rejection, the joint ratio for block verification.
    """

    num_accepted_B: Tensor
    weight_B: Tensor


@dataclass(frozen=True, slots=True)
class TypicalAcceptance:
    """Typical acceptance of Medusa (Cai et al. 2024, arXiv 2401.10774, section 2.3.1). LOSSY.

    A draft x is kept where p(x) > min(posterior_threshold, posterior_alpha * exp(-H(p))). H is the
    entropy of the target's distribution p. So a draft is kept if the target finds it plausible,
    even where the target would mostly have chosen another token. THE OUTPUT IS NOT DISTRIBUTED AS
    THE TARGET'S: it is shifted towards the proposer, and no test of exactness holds for it. It is
    for users who ask for speed at the price of the model's own distribution.

    Raises:
        ValueError: a value is out of its range.
    """

    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3

    def __post_init__(self) -> None:
        for name in ("posterior_threshold", "posterior_alpha"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, got {getattr(self, name)}")

    def least_log_prob(self, log_p_RV: Tensor) -> Tensor:
        """[R]: the log-probability that a draft behind each row must exceed."""
        # Masked tokens: 0 * -inf would be NaN.
        entropy_R = -(log_p_RV.exp() * log_p_RV.clamp(min=-1e30)).sum(1)
        return (math.log(self.posterior_alpha) - entropy_R).clamp(
            max=math.log(self.posterior_threshold)
        )


def match_draft(choices_BN1: Tensor, drafts: DraftBatch) -> Verdict:
    """Walk every draft along the target's own choices.

    `choices_BN1` is what the target picked after each row, by argmax or by sampling. The path is
    what plain decoding would have produced, however the drafts were made and cut.
    """
    if drafts.is_chain:
        hit_BN = (choices_BN1[:, :-1] == drafts.token_ids_BN) & drafts.is_draft_BN
        num_accepted_B = hit_BN.long().cumprod(1).sum(1)
        last_B1 = choices_BN1.gather(1, num_accepted_B[:, None])
        return chain_verdict(drafts, num_accepted_B, last_B1[:, 0])
    is_on_path_BN = _matched_rows(choices_BN1, drafts)
    last_B1 = choices_BN1.gather(1, last_row_B(is_on_path_BN)[:, None])
    return tree_verdict(drafts, is_on_path_BN, last_B1[:, 0])


def _matched_rows(choices_BN1: Tensor, drafts: DraftBatch) -> Tensor:
    """bool [B, N]: the draft and all its ancestors are what the target chose at their parents."""
    parents_BN = torch.where(drafts.is_draft_BN, drafts.parents_BN, 0)
    is_hit_BN = (choices_BN1.gather(1, parents_BN) == drafts.token_ids_BN) & drafts.is_draft_BN
    return path_of_firsts(is_hit_BN, drafts)  # siblings may hold the same token


def path_of_firsts(is_hit_BN: Tensor, drafts: DraftBatch) -> Tensor:
    """bool [B, N]: the draft and all its ancestors are hit, and none of their earlier siblings.

    Padding must not be hit.
    """
    parents_BN = torch.where(drafts.is_draft_BN, drafts.parents_BN, 0)
    same_parent_BNN = parents_BN[:, :, None] == parents_BN[:, None, :]
    is_later_BN = (same_parent_BNN & is_hit_BN[:, None, :]).tril(-1).any(2)
    is_first_BN = is_hit_BN & ~is_later_BN
    return (is_first_BN[:, None, :] | ~ancestors_BN1N(drafts)[:, 1:]).all(2)


def chain_verdict(drafts: DraftBatch, num_accepted_B: Tensor, last_B: Tensor) -> Verdict:
    """The first drafts of each chain, then one more token."""
    place_N1 = torch.arange(drafts.width + 1, device=drafts.device)
    accepted_B1 = num_accepted_B[:, None]
    token_ids_BN1 = torch.where(place_N1 < accepted_B1, pad(drafts.token_ids_BN, (0, 1)), -1)
    place_N = place_N1[:-1]
    return Verdict(
        token_ids_BN1=token_ids_BN1.scatter(1, accepted_B1, last_B[:, None]),
        num_emitted_B=num_accepted_B + 1,
        rows_BN=torch.where(place_N < accepted_B1, place_N, -1),
    )


def tree_verdict(drafts: DraftBatch, is_on_path_BN: Tensor, last_B: Tensor) -> Verdict:
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


def accept_tokens(target_BN1V: Tensor, drafts: DraftBatch, coins_BN: Tensor) -> Acceptance:
    """Accept draft x while coin < p(x) / q(x); Leviathan et al. 2023, algorithm 1."""
    p_BN, q_BN = _drafted(target_BN1V, drafts)
    is_accepted_BN = (coins_BN * q_BN < p_BN) & drafts.is_draft_BN
    num_accepted_B = is_accepted_BN.long().cumprod(1).sum(1)
    return Acceptance(num_accepted_B, torch.ones_like(num_accepted_B, dtype=target_BN1V.dtype))


def accept_block(target_BN1V: Tensor, drafts: DraftBatch, coins_BN: Tensor) -> Acceptance:
    """Accept up to the last draft whose coin is below its h; Sun et al. 2025, algorithm 2.

    All coins count: a failed one does not end the scan.
    """
    assert drafts.probs_BNV is not None
    p_BN, q_BN = _drafted(target_BN1V, drafts)
    tiny = torch.finfo(torch.float64).tiny
    ratio_BN = p_BN.double().log() - q_BN.double().clamp(min=tiny).log()
    ratio_BN = torch.where(drafts.is_draft_BN, ratio_BN, 0.0)
    # min(1, last * ratio) at every place; in logarithms a walk that is cut off at 0.
    walk_BN = ratio_BN.cumsum(1)
    log_weight_BN = walk_BN - walk_BN.cummax(1).values.clamp(min=0.0)
    weight_BN = log_weight_BN.exp().to(target_BN1V.dtype)

    weight_BM = weight_BN[:, :-1]
    left_BMV = weight_BM[:, :, None] * target_BN1V[:, 1:-1] - drafts.probs_BNV[:, 1:]
    # Where q is one-hot, every token but the draft is left.
    left_BM = torch.where(
        drafts.is_sampled_BN[:, 1:],
        left_BMV.clamp_(min=0).sum(2),
        weight_BM * (1 - p_BN[:, 1:]),
    )
    whole_BM = left_BM + 1 - weight_BM
    inner_BM = torch.where(whole_BM > 0, left_BM / whole_BM.clamp(min=tiny), 0.0)
    place_N = torch.arange(drafts.width, device=drafts.device)
    is_last_BN = place_N == drafts.num_drafts_B[:, None] - 1
    threshold_BN = torch.where(is_last_BN, weight_BN, pad(inner_BM, (0, 1)))
    is_accepted_BN = (coins_BN < threshold_BN) & drafts.is_draft_BN

    num_accepted_B = torch.where(is_accepted_BN, place_N + 1, 0).amax(1)
    weight_BN1 = pad(weight_BN, (1, 0), value=1.0)
    return Acceptance(num_accepted_B, weight_BN1.gather(1, num_accepted_B[:, None])[:, 0])


def last_weights(target_BN1V: Tensor, drafts: DraftBatch, acceptance: Acceptance) -> Tensor:
    """[B, V] weights, not normalised, of the token after the accepted ones.

    The residual max(weight * p - q, 0) after a rejection; p itself after none, and where the
    residual is empty (p == q up to rounding).
    """
    requests_B = torch.arange(drafts.num_requests, device=drafts.device)
    at_B = acceptance.num_accepted_B
    p_BV = target_BN1V[requests_B, at_B]
    q_BV = drawn_from(drafts, at_B.clamp(max=drafts.width - 1))
    residual_BV = residual(p_BV, q_BV, acceptance.weight_B)
    is_bonus_B1 = (at_B == drafts.num_drafts_B)[:, None]
    is_empty_B1 = residual_BV.amax(1, keepdim=True) <= 0
    return torch.where(is_bonus_B1 | is_empty_B1, p_BV, residual_BV)


def residual(p_BV: Tensor, q_BV: Tensor, weight_B: Tensor) -> Tensor:
    """[B, V]: max(weight * p - q, 0): what drafts drawn from q do not cover of the target.

    Nothing where q is NaN, which a broken drafter may give.
    """
    return (weight_B[:, None] * p_BV - q_BV).nan_to_num_(nan=0.0).clamp_(min=0)


def rejection_sample(
    target_BN1V: Tensor, drafts: DraftBatch, coins_BN: Tensor, draw: Draw
) -> Verdict:
    """Token-level rejection sampling of padded chains, N at least 1.

    Args:
        target_BN1V: processed target probabilities of each row; padding is ignored.
        drafts: chains with their probabilities.
        coins_BN: uniform noise in (0, 1), independent of everything else.
        draw: draws the token after the accepted ones, with noise independent of everything else.
    """
    return _finish(target_BN1V, drafts, accept_tokens(target_BN1V, drafts, coins_BN), draw)


def block_verify(target_BN1V: Tensor, drafts: DraftBatch, coins_BN: Tensor, draw: Draw) -> Verdict:
    """Block verification of padded chains, N at least 1; arguments as for `rejection_sample`.

    Accepts at least as many drafts in expectation, from the same distribution.
    """
    return _finish(target_BN1V, drafts, accept_block(target_BN1V, drafts, coins_BN), draw)


def _finish(target_BN1V: Tensor, drafts: DraftBatch, acceptance: Acceptance, draw: Draw) -> Verdict:
    weights_BV = last_weights(target_BN1V, drafts, acceptance)
    is_refused_B = acceptance.num_accepted_B < drafts.num_drafts_B
    last_B = draw(weights_BV.log(), acceptance.num_accepted_B, is_refused_B)
    return chain_verdict(drafts, acceptance.num_accepted_B, last_B)


def _drafted(target_BN1V: Tensor, drafts: DraftBatch) -> tuple[Tensor, Tensor]:
    """[B, N] each: target's and proposer's probability of every drafted token."""
    assert drafts.probs_BNV is not None
    ids_BN1 = drafts.token_ids_BN.clamp(min=0)[:, :, None]
    p_BN = target_BN1V[:, :-1].gather(2, ids_BN1)[:, :, 0]
    q_BN = drafts.probs_BNV.gather(2, ids_BN1)[:, :, 0]
    return p_BN, torch.where(drafts.is_sampled_BN, q_BN, 1.0)


def drawn_from(drafts: DraftBatch, row_B: Tensor) -> Tensor:
    """[B, V]: the proposer's distribution of one draft of each request, one-hot if it has none."""
    assert drafts.probs_BNV is not None
    requests_B = torch.arange(drafts.num_requests, device=drafts.device)
    q_BV = drafts.probs_BNV[requests_B, row_B]
    ids_B1 = drafts.token_ids_BN[requests_B, row_B].clamp(min=0)[:, None]
    one_hot_BV = torch.zeros_like(q_BV).scatter(1, ids_B1, 1.0)
    return torch.where(drafts.is_sampled_BN[requests_B, row_B][:, None], q_BV, one_hot_BV)


def verify_typical(
    logits_RV: Tensor, drafts: DraftBatch, typical: TypicalAcceptance, draw: Draw
) -> Verdict:
    """Keep the longest typical path of each tree. NOT exact: see `TypicalAcceptance`.

    If several paths have that length, the likeliest is kept, by the sum of log p, and the first of
    equals. The token after the path is drawn from p.

    Args:
        logits_RV: processed logits of the target, flat rows.
        drafts: any trees, N at least 1; what they were drawn from does not matter.
        draw: draws the last token.
    """
    index_BN1 = row_index_BN1(drafts)
    log_p_RV = logits_RV.log_softmax(1)
    least_R = typical.least_log_prob(log_p_RV)
    # Padding is evaluated too: at the root, whatever its parents are.
    parents_BN = torch.where(drafts.is_draft_BN, drafts.parents_BN, 0)
    parent_BN = index_BN1.gather(1, parents_BN)
    log_p_BN = log_p_RV[parent_BN, drafts.token_ids_BN.clamp(min=0)]
    is_typical_BN = (log_p_BN > least_R[parent_BN]) & drafts.is_draft_BN

    seen_BN1N = ancestors_BN1N(drafts)
    is_reached_BN1 = (is_typical_BN[:, None, :] | ~seen_BN1N).all(2)
    is_reached_BN1 &= pad(drafts.is_draft_BN, (1, 0), value=True)
    length_BN1 = torch.where(is_reached_BN1, seen_BN1N.sum(2), -1)
    is_longest_BN1 = length_BN1 == length_BN1.amax(1, keepdim=True)
    likelihood_BN1 = torch.where(seen_BN1N, log_p_BN[:, None, :], 0.0).sum(2)
    last_row_B = torch.where(is_longest_BN1, likelihood_BN1, -torch.inf).argmax(1)

    requests_B = torch.arange(drafts.num_requests, device=drafts.device)
    is_on_path_BN = seen_BN1N[requests_B, last_row_B]
    last_logits_BV = logits_RV[index_BN1[requests_B, last_row_B]]
    none_refused_B = torch.zeros_like(last_row_B, dtype=torch.bool)
    last_B = draw(last_logits_BV, is_on_path_BN.sum(1), none_refused_B)
    return tree_verdict(drafts, is_on_path_BN, last_B)
