"""Verdicts by the compiled library.

Dimension key: B requests, N most drafts of any request, R flat rows, V vocabulary.
"""

from ctypes import c_bool, c_int64, c_void_p

import torch
from torch import Tensor

from outdraft.kernels.data.drafts import DraftBatch, Rule, Verdict
from outdraft.kernels.data.sampling import SamplingBatch
from outdraft.kernels.native.arrays import Addresses, BatchColumns, Column
from outdraft.kernels.native.library import Library


def choice_columns(sampling: SamplingBatch) -> tuple[Column, ...]:
    """The columns that `verify` of csrc/verification.h takes."""
    return (
        (sampling.is_greedy_B, torch.bool),
        (sampling.draws_B, torch.bool),
        (sampling.seeds_B, torch.int64),
    )


class NativeVerification:
    """The operations of csrc/verification.cpp: float32 logits on the CPU."""

    def __init__(self, library: Library) -> None:
        arrays = [c_void_p]
        rule, results = [c_int64, c_bool], arrays * 3
        self._verify = library.function(
            "verify", [*[c_int64] * 3, *arrays * 10, *rule, *results], releases_gil=True
        )
        self._columns = BatchColumns(choice_columns)
        self._match = library.function("match_choices", [c_int64, c_int64, *arrays * 4, *results])
        self._requests = library.function(
            "requests_of_rows", [c_int64, c_void_p, c_int64, c_void_p]
        )

    def verify(
        self,
        processed_RV: Tensor,
        drafts: DraftBatch,
        sampling: SamplingBatch,
        num_tokens_B: Tensor,
        rule: Rule,
    ) -> Verdict:
        verdict, at = _blank(drafts), Addresses()
        probs_BNV = drafts.probs_BNV
        self._verify(
            *drafts.token_ids_BN.shape,
            processed_RV.shape[1],
            at(processed_RV, torch.float32),
            *_tree_addresses(drafts, at),
            None if probs_BNV is None else at(probs_BNV, torch.float32),
            at(drafts.is_sampled_BN, torch.bool),
            *self._columns.of(sampling),
            at(num_tokens_B, torch.int64),
            int(rule),
            drafts.sampled_trees,
            *_verdict_addresses(verdict),
        )
        return verdict

    def match(self, choices_R: Tensor, drafts: DraftBatch) -> Verdict:
        verdict, at = _blank(drafts), Addresses()
        self._match(
            *drafts.token_ids_BN.shape,
            at(choices_R, torch.int64),
            *_tree_addresses(drafts, at),
            *_verdict_addresses(verdict),
        )
        return verdict

    def requests_of_rows(self, drafts: DraftBatch, num_rows: int) -> Tensor:
        request_R = torch.empty(num_rows, dtype=torch.int64)
        at = Addresses()
        num_drafts_B = at(drafts.num_drafts_B, torch.int64)
        self._requests(drafts.num_requests, num_drafts_B, num_rows, request_R.data_ptr())
        return request_R


def _blank(drafts: DraftBatch) -> Verdict:
    num_requests, width = drafts.token_ids_BN.shape
    return Verdict(
        torch.empty(num_requests, width + 1, dtype=torch.int64),
        torch.empty(num_requests, dtype=torch.int64),
        torch.empty(num_requests, width, dtype=torch.int64),
    )


def _tree_addresses(drafts: DraftBatch, at: Addresses) -> list[int]:
    columns = (drafts.token_ids_BN, drafts.parents_BN, drafts.num_drafts_B)
    return [at(column, torch.int64) for column in columns]


def _verdict_addresses(verdict: Verdict) -> tuple[int, int, int]:
    return (
        verdict.token_ids_BN1.data_ptr(),
        verdict.rows_BN.data_ptr(),
        verdict.num_emitted_B.data_ptr(),
    )
