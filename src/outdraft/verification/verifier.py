"""Verification of a batch: greedy and sampled requests, deterministic and sampled drafts mixed.

For each request the verifier picks a rule of `verify`, and gives it processed logits and noise that
is keyed by text position. Each kind of draw has its own stream of noise. The target's own choices
use SAMPLE; so does the bonus token, and a fully accepted draft continues as plain decoding does.
Coins use ACCEPT, and recovered tokens use RECOVER. Sampled drafts use DRAFT: in a chain the anchor
is the number of committed tokens; in a tree it is that number plus the row of the parent << 24, so
that the rows of one level are independent.

Dimension key: B requests, N most drafts of any request, N1 = N + 1 rows with the root, R flat
rows, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from outdraft.sampling import noise
from outdraft.sampling.batch import SamplingBatch
from outdraft.sampling.noise import Purpose
from outdraft.sampling.processors import Paths, process_logits
from outdraft.sampling.row_kernels import is_compiled_for
from outdraft.sampling.sampler import choose
from outdraft.verification.draft_batch import (
    DraftBatch,
    depths_BN1,
    path_ids_BN1K,
    place_R,
    request_R,
    row_index_BN1,
)
from outdraft.verification.verify import (
    Draw,
    TypicalAcceptance,
    Verdict,
    block_verify,
    match_draft,
    rejection_sample,
    verify_typical,
)
from outdraft.verification.verify_cpu import Rule, match_draft_cpu, request_R_cpu, verify_cpu
from outdraft.verification.verify_tree import verify_tree

VerifyMethod = Literal["block", "token", "drafter_invariant", "lossy_typical"]
_RULES = {"block": Rule.BLOCK, "token": Rule.TOKEN, "drafter_invariant": Rule.MATCH}


class Verifier:
    """Verifies the drafts of a step. Stateless: the same arguments give the same verdict.

    Matched with the target's own choices are greedy requests, deterministic drafts, and requests
    that share their noise (`SamplingBatch.shares_noise_B`), whatever `method` says: their ids
    depend on no draft. The other drafts with sampled rows are verified by `method`: "block"
    (accepts more) and "token" are rejection sampling, exact in distribution; trees are verified as
    "block" says, whatever the method. "drafter_invariant" matches everything.

    "lossy_typical" is NOT exact: it keeps what the target finds plausible, in all requests but
    those that are greedy or share their noise; see `TypicalAcceptance`.
    """

    def __init__(self, method: VerifyMethod, typical: TypicalAcceptance | None = None) -> None:
        """`typical`: the bounds of "lossy_typical"; None: the paper's.

        Raises:
            ValueError: bounds for another method.
        """
        if typical is not None and method != "lossy_typical":
            raise ValueError(f"typical acceptance has no part in verification by {method!r}")
        self.method: VerifyMethod = method
        self._typical = typical or TypicalAcceptance()

    def verify(
        self, logits_RV: Tensor, drafts: DraftBatch, sampling: SamplingBatch, committed: Paths
    ) -> Verdict:
        """What each request keeps, and its next token.

        Sampled drafts must have been drawn with anchors equal to `committed.num_tokens_B`.

        Args:
            logits_RV: raw logits of the target, flat rows as in `draft_batch.row_start_B`; rows
                past the last request are ignored.
            committed: the committed text; its `path_ids_RK` is ignored, paths come from `drafts`.
        """
        if sampling.is_plain_greedy:
            return match_choices(logits_RV.argmax(1), drafts)
        of_rows = request_R_cpu if logits_RV.device.type == "cpu" else request_R
        request = of_rows(drafts, logits_RV.shape[0])
        processed_RV = process_logits(
            logits_RV, request, _with_paths(committed, drafts, request, sampling), sampling
        )
        step = _Step(processed_RV, request, drafts, sampling, committed.num_tokens_B)
        if self.method == "lossy_typical":
            return self._keep_typical(step)
        rule = _RULES[self.method] if drafts.any_sampled else Rule.MATCH
        if is_compiled_for(processed_RV):
            return verify_cpu(processed_RV, drafts, sampling, committed.num_tokens_B, rule)
        if rule == Rule.MATCH or not sampling.any_draws:
            return _match(step)
        if drafts.sampled_trees:
            verified = verify_tree(step.processed_RV, drafts, step.coins(), step.draw)
        else:
            verified = _reject(step, block_verify if rule == Rule.BLOCK else rejection_sample)
        if drafts.all_sampled and sampling.all_draw:
            return verified
        is_sampled_B = (drafts.is_sampled_BN & drafts.is_draft_BN).any(1)
        return _merge(is_sampled_B & sampling.draws_B, verified, _match(step))

    def _keep_typical(self, step: "_Step") -> Verdict:
        if step.drafts.width == 0 or not step.sampling.any_draws:
            return _match(step)
        kept = verify_typical(step.processed_RV, step.drafts, self._typical, step.draw)
        if step.sampling.all_draw:
            return kept
        return _merge(step.sampling.draws_B, kept, _match(step))


@dataclass(frozen=True, slots=True)
class _Step:
    """The processed rows of a step, the request of each row, and the keys of its noise."""

    processed_RV: Tensor
    request_R: Tensor
    drafts: DraftBatch
    sampling: SamplingBatch
    num_tokens_B: Tensor

    def coins(self) -> Tensor:
        """float32 [B, N]: one per draft."""
        position_BN = self.num_tokens_B[:, None] + torch.arange(
            self.drafts.width, device=self.drafts.device
        )
        return noise.uniform_scalar(
            self.sampling.seeds_B[:, None].expand_as(position_BN),
            position_BN,
            Purpose.ACCEPT,
            self.num_tokens_B[:, None].expand_as(position_BN),
        )

    def draw(self, log_weights_BV: Tensor, depth_B: Tensor, is_refused_B: Tensor) -> Tensor:
        """A token of each request at a depth; the best one where the request is greedy."""
        purpose_B = torch.where(is_refused_B, int(Purpose.RECOVER), int(Purpose.SAMPLE))
        drawn_B = noise.sample_gumbel(
            log_weights_BV, self.sampling.seeds_B, self.num_tokens_B + depth_B, purpose_B
        )
        if not self.sampling.any_greedy:
            return drawn_B
        return torch.where(self.sampling.is_greedy_B, log_weights_BV.argmax(1), drawn_B)


def _match(step: _Step) -> Verdict:
    drafts, sampling, request = step.drafts, step.sampling, step.request_R
    depth_R = depths_BN1(drafts)[request, place_R(drafts, request)]
    choices_R = choose(
        step.processed_RV,
        sampling.seeds_B[request],
        step.num_tokens_B[request] + depth_R,
        sampling.is_greedy_B[request],
        Purpose.SAMPLE,
        all_greedy=sampling.all_greedy,
    )
    return match_choices(choices_R, drafts)


def _reject(step: _Step, rule: Callable[[Tensor, DraftBatch, Tensor, Draw], Verdict]) -> Verdict:
    target_BN1V = step.processed_RV.softmax(1)[row_index_BN1(step.drafts)]
    return rule(target_BN1V, step.drafts, step.coins(), step.draw)


def match_choices(choices_R: Tensor, drafts: DraftBatch) -> Verdict:
    """Walk every draft along the target's own choices; int64 [R], flat rows."""
    if choices_R.device.type == "cpu":
        return match_draft_cpu(choices_R, drafts)
    return match_draft(choices_R[row_index_BN1(drafts)], drafts)


def _with_paths(
    committed: Paths, drafts: DraftBatch, request: Tensor, sampling: SamplingBatch
) -> Paths:
    if drafts.width == 0 or not sampling.needs_paths:
        return replace(committed, path_ids_RK=None)
    path_RK = path_ids_BN1K(drafts)[request, place_R(drafts, request)]
    return replace(committed, path_ids_RK=path_RK)


def _merge(takes_first_B: Tensor, first: Verdict, second: Verdict) -> Verdict:
    takes_first_B1 = takes_first_B[:, None]
    return Verdict(
        token_ids_BN1=torch.where(takes_first_B1, first.token_ids_BN1, second.token_ids_BN1),
        num_emitted_B=torch.where(takes_first_B, first.num_emitted_B, second.num_emitted_B),
        rows_BN=torch.where(takes_first_B1, first.rows_BN, second.rows_BN),
    )
