"""Verification of a batch: greedy and sampled requests, deterministic and sampled drafts mixed.

Picks the rule of `verify` per request and feeds it with processed logits and with noise keyed by
text position. What each rule draws comes from its own stream: a target's own choice from SAMPLE
(the bonus token too, so plain decoding and a fully accepted draft go on alike), coins from ACCEPT,
recovered tokens from RECOVER.

Dimension key: B requests, N most drafts of any request, N1 = N + 1 rows with the root, R flat
rows, V vocabulary.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from outdraft.sampling import noise
from outdraft.sampling.batch import SamplingBatch
from outdraft.sampling.noise import Purpose
from outdraft.sampling.processors import Paths, process_logits
from outdraft.sampling.row_kernels import is_compiled_for
from outdraft.sampling.sampler import choose
from outdraft.spec.draft_batch import (
    DraftBatch,
    depths_BN1,
    path_ids_BN1K,
    place_R,
    request_R,
    row_index_BN1,
)
from outdraft.spec.verify import Verdict, block_verify, match_draft, rejection_sample
from outdraft.spec.verify_cpu import Rule, match_draft_cpu, request_R_cpu, verify_cpu

VerifyMethod = Literal["block", "token", "drafter_invariant"]
_RULES = {"block": Rule.BLOCK, "token": Rule.TOKEN, "drafter_invariant": Rule.MATCH}


class Verifier:
    """Verifies the drafts of a step. Stateless: the same arguments give the same verdict.

    Greedy requests and deterministic drafts are matched with the target's own choices. Sampled
    chains are verified by `method`: "block" (accepts more) and "token" are rejection sampling,
    exact in distribution; "drafter_invariant" matches everything, for proposers that
    draw with SAMPLE noise on purpose, so that ids do not depend on any draft.
    """

    def __init__(self, method: VerifyMethod) -> None:
        self.method: VerifyMethod = method

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
        if is_compiled_for(processed_RV):
            rule = _RULES[self.method] if drafts.any_sampled else Rule.MATCH
            return verify_cpu(processed_RV, drafts, sampling, committed.num_tokens_B, rule)
        rejects = (
            drafts.any_sampled and not sampling.all_greedy and self.method != "drafter_invariant"
        )
        if not rejects:
            return self._match(processed_RV, request, drafts, sampling, committed)
        rejected = self._reject(processed_RV, drafts, sampling, committed)
        if drafts.all_sampled and not sampling.any_greedy:
            return rejected
        matched = self._match(processed_RV, request, drafts, sampling, committed)
        return _merge(drafts.is_sampled_B & ~sampling.is_greedy_B, rejected, matched)

    def _match(
        self,
        processed_RV: Tensor,
        request: Tensor,
        drafts: DraftBatch,
        sampling: SamplingBatch,
        committed: Paths,
    ) -> Verdict:
        depth_R = depths_BN1(drafts)[request, place_R(drafts, request)]
        choices_R = choose(
            processed_RV,
            sampling.seeds_B[request],
            committed.num_tokens_B[request] + depth_R,
            sampling.is_greedy_B[request],
            Purpose.SAMPLE,
            all_greedy=sampling.all_greedy,
        )
        return match_choices(choices_R, drafts)

    def _reject(
        self,
        processed_RV: Tensor,
        drafts: DraftBatch,
        sampling: SamplingBatch,
        committed: Paths,
    ) -> Verdict:
        seeds_B, num_tokens_B = sampling.seeds_B, committed.num_tokens_B
        place_N = torch.arange(drafts.width, device=drafts.device)
        position_BN = num_tokens_B[:, None] + place_N
        coins_BN = noise.uniform_scalar(
            seeds_B[:, None].expand_as(position_BN),
            position_BN,
            Purpose.ACCEPT,
            num_tokens_B[:, None].expand_as(position_BN),
        )

        def draw(log_weights_BV: Tensor, num_accepted_B: Tensor) -> Tensor:
            is_bonus_B = num_accepted_B == drafts.num_drafts_B
            purpose_B = torch.where(is_bonus_B, int(Purpose.SAMPLE), int(Purpose.RECOVER))
            positions_B = num_tokens_B + num_accepted_B
            return noise.sample_gumbel(log_weights_BV, seeds_B, positions_B, purpose_B)

        target_BN1V = processed_RV.softmax(1)[row_index_BN1(drafts)]
        rule = block_verify if self.method == "block" else rejection_sample
        return rule(target_BN1V, drafts, coins_BN, draw)


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
