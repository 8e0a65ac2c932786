"""Noise, tokens, verdicts and log-probabilities from rows of logits, by the compiled library.

Dimension key: B requests, N most drafts of any request, R rows, A rows of logits of which R are
scored, V vocabulary, W words of a mask of one bit per token.
"""

from functools import partial

import torch
from torch import Tensor

from outdraft.kernels.data.drafts import DraftBatch, Rule, Verdict
from outdraft.kernels.data.logits import Scores
from outdraft.kernels.data.noise import NoiseKeys
from outdraft.kernels.data.sampling import Paths, SamplingBatch
from outdraft.kernels.native.library import Team


def cut_columns(sampling: SamplingBatch) -> dict[str, Tensor]:
    """The fields of `CutColumns` in csrc/sampling.h."""
    return {
        "temperature": sampling.temperature_B,
        "least": sampling.log_min_p_B,
        "top_k": sampling.top_k_B,
        "top_p": sampling.top_p_B,
    }


def penalty_columns(sampling: SamplingBatch) -> dict[str, Tensor]:
    """The fields of `PenaltyColumns` in csrc/penalties.h."""
    return {
        "repetition": sampling.repetition_B,
        "presence": sampling.presence_B,
        "frequency": sampling.frequency_B,
    }


class NativeSampling:
    """The operations of csrc/noise.cpp, penalties.cpp, sampling.cpp, scores.cpp and
    verification.cpp: float32 logits on the CPU. Sums of scores are float64."""

    def __init__(self, team: Team) -> None:
        library = team.library
        function = partial(library.function, releases_gil=True)
        self._team, self._score = team, function("score_tokens")
        self._gumbel, self._mask = function("fill_gumbel"), function("mask_forbidden")
        self._process, self._finite = function("process_rows"), function("finite_rows")
        self._penalize, self._verify = function("penalize_rows"), function("verify")
        self._match = library.function("match_choices")

    def gumbel(self, keys: NoiseKeys, vocab_size: int) -> Tensor:
        noise_RV = torch.empty(len(keys.seeds_R), vocab_size)
        columns = keys.seeds_R, keys.positions_R, keys.anchors_R, keys.purposes_R
        self._gumbel(*noise_RV.shape, *columns, noise_RV)
        return noise_RV

    def mask_forbidden(self, logits_RV: Tensor, grammar_RW: Tensor) -> Tensor:
        masked_RV = torch.empty_like(logits_RV, memory_format=torch.contiguous_format)
        self._mask(*logits_RV.shape, grammar_RW.shape[1], logits_RV, grammar_RW, masked_RV)
        return masked_RV

    def finite_rows(self, logits_RV: Tensor) -> Tensor:
        are_finite_R = torch.empty(logits_RV.shape[0], dtype=torch.bool)
        self._finite(*logits_RV.shape, logits_RV, are_finite_R)
        return are_finite_R

    def penalize(
        self, logits_RV: Tensor, request_R: Tensor, paths: Paths, sampling: SamplingBatch
    ) -> Tensor:
        assert paths.history_BL is not None
        penalized_RV = torch.empty_like(logits_RV, memory_format=torch.contiguous_format)
        path_RK = paths.path_ids_RK
        self._penalize(
            *logits_RV.shape,
            paths.history_BL.shape[1],
            0 if path_RK is None else path_RK.shape[1],
            *(logits_RV, request_R, paths.history_BL, paths.prompt_lens_B, paths.num_tokens_B),
            path_RK,
            *penalty_columns(sampling).values(),
            penalized_RV,
        )
        return penalized_RV

    def scale_and_cut(
        self, logits_RV: Tensor, request_R: Tensor, sampling: SamplingBatch
    ) -> Tensor:
        processed_RV = torch.empty_like(logits_RV, memory_format=torch.contiguous_format)
        cuts = cut_columns(sampling).values()
        self._process(*logits_RV.shape, logits_RV, request_R, *cuts, processed_RV)
        return processed_RV

    def verify(
        self,
        processed_RV: Tensor,
        drafts: DraftBatch,
        sampling: SamplingBatch,
        num_tokens_B: Tensor,
        rule: Rule,
    ) -> Verdict:
        verdict = blank_verdict(*drafts.token_ids_BN.shape)
        self._verify(
            *drafts.token_ids_BN.shape,
            processed_RV.shape[1],
            *(processed_RV, drafts.token_ids_BN, drafts.parents_BN, drafts.num_drafts_B),
            *(drafts.probs_BNV, drafts.is_sampled_BN, sampling.is_greedy_B, sampling.draws_B),
            *(sampling.seeds_B, num_tokens_B, rule, drafts.sampled_trees),
            *(verdict.token_ids_BN1, verdict.rows_BN, verdict.num_emitted_B),
        )
        return verdict

    def match(self, choices_R: Tensor, drafts: DraftBatch) -> Verdict:
        verdict = blank_verdict(*drafts.token_ids_BN.shape)
        self._match(
            *drafts.token_ids_BN.shape,
            *(choices_R, drafts.token_ids_BN, drafts.parents_BN, drafts.num_drafts_B),
            *(verdict.token_ids_BN1, verdict.rows_BN, verdict.num_emitted_B),
        )
        return verdict

    def score_tokens(
        self, logits_AV: Tensor, chosen_R: Tensor, num_top: int, rows_R: Tensor | None = None
    ) -> Scores:
        num_rows, size = len(chosen_R), logits_AV.shape[1]
        num_top = min(num_top, size)
        scores = Scores(
            torch.empty(num_rows),
            torch.empty(num_rows, dtype=torch.int64),
            torch.empty(num_rows, num_top, dtype=torch.int64),
            torch.empty(num_rows, num_top),
        )
        task = self._team.library.struct(
            "ScoreTask",
            logits=logits_AV,
            rows=torch.arange(num_rows) if rows_R is None else rows_R,
            chosen=chosen_R,
            size=size,
            num_top=num_top,
            logprobs=scores.logprobs_R,
            ranks=scores.ranks_R,
            top_ids=scores.top_ids_RK,
            top_logprobs=scores.top_logprobs_RK,
        )
        self._score(self._team.address, num_rows, task)
        return scores


def blank_verdict(num_requests: int, width: int) -> Verdict:
    """A verdict to be written, about that many requests and places of drafts."""
    return Verdict(
        torch.empty(num_requests, width + 1, dtype=torch.int64),
        torch.empty(num_requests, dtype=torch.int64),
        torch.empty(num_requests, width, dtype=torch.int64),
    )
