"""Noise, tokens and log-probabilities from rows of logits, by the compiled library.

Dimension key: R rows, A rows of logits of which R are scored, V vocabulary, W words of a mask of
one bit per token.
"""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_int64, c_void_p

import torch
from torch import Tensor

from outdraft.kernels.data.logits import Scores
from outdraft.kernels.data.noise import NoiseKeys
from outdraft.kernels.data.sampling import Paths, SamplingBatch
from outdraft.kernels.native.arrays import Addresses, BatchColumns, Column
from outdraft.kernels.native.library import Library, Team


def cut_columns(sampling: SamplingBatch) -> tuple[Column, ...]:
    """The columns of `CutColumns` in csrc/sampling.h."""
    return (
        (sampling.temperature_B, torch.float32),
        (sampling.log_min_p_B, torch.float32),
        (sampling.top_k_B, torch.int64),
        (sampling.top_p_B, torch.float32),
    )


def penalty_columns(sampling: SamplingBatch) -> tuple[Column, ...]:
    """The columns of `PenaltyColumns` in csrc/penalties.h."""
    penalties_B = sampling.repetition_B, sampling.presence_B, sampling.frequency_B
    return tuple([(penalty_B, torch.float32) for penalty_B in penalties_B])


class NativeSampling:
    """The operations of csrc/noise.cpp, penalties.cpp, sampling.cpp: float32 logits on the CPU."""

    def __init__(self, library: Library) -> None:
        def function(name: str, num_sizes: int, num_arrays: int) -> Callable[..., None]:
            arguments = [*[c_int64] * num_sizes, *[c_void_p] * num_arrays]
            return library.function(name, arguments, releases_gil=True)

        self._gumbel = function("fill_gumbel", 2, 5)
        self._mask = function("mask_forbidden", 3, 3)
        self._process = function("process_rows", 2, 7)
        self._finite = function("finite_rows", 2, 2)
        self._penalize = function("penalize_rows", 4, 10)
        self._columns = BatchColumns(cut_columns)
        self._penalties = BatchColumns(penalty_columns)

    def gumbel(self, keys: NoiseKeys, vocab_size: int) -> Tensor:
        noise_RV = torch.empty(len(keys.seeds_R), vocab_size)
        at = Addresses()
        columns = (keys.seeds_R, keys.positions_R, keys.anchors_R, keys.purposes_R)
        addresses = [at(column_R, torch.int64) for column_R in columns]
        self._gumbel(*noise_RV.shape, *addresses, noise_RV.data_ptr())
        return noise_RV

    def mask_forbidden(self, logits_RV: Tensor, grammar_RW: Tensor) -> Tensor:
        masked_RV = torch.empty_like(logits_RV, memory_format=torch.contiguous_format)
        at = Addresses()
        self._mask(
            *logits_RV.shape,
            grammar_RW.shape[1],
            at(logits_RV, torch.float32),
            at(grammar_RW, torch.int32),
            masked_RV.data_ptr(),
        )
        return masked_RV

    def finite_rows(self, logits_RV: Tensor) -> Tensor:
        are_finite_R = torch.empty(logits_RV.shape[0], dtype=torch.bool)
        at = Addresses()
        logits = at(logits_RV, torch.float32)
        self._finite(*logits_RV.shape, logits, are_finite_R.data_ptr())
        return are_finite_R

    def penalize(
        self, logits_RV: Tensor, request_R: Tensor, paths: Paths, sampling: SamplingBatch
    ) -> Tensor:
        assert paths.history_BL is not None
        penalized_RV = torch.empty_like(logits_RV, memory_format=torch.contiguous_format)
        at, path_RK = Addresses(), paths.path_ids_RK
        texts = paths.history_BL, paths.prompt_lens_B, paths.num_tokens_B
        self._penalize(
            *logits_RV.shape,
            paths.history_BL.shape[1],
            0 if path_RK is None else path_RK.shape[1],
            at(logits_RV, torch.float32),
            at(request_R, torch.int64),
            *[at(part, torch.int64) for part in texts],
            None if path_RK is None else at(path_RK, torch.int64),
            *self._penalties.of(sampling),
            penalized_RV.data_ptr(),
        )
        return penalized_RV

    def scale_and_cut(
        self, logits_RV: Tensor, request_R: Tensor, sampling: SamplingBatch
    ) -> Tensor:
        processed_RV = torch.empty_like(logits_RV, memory_format=torch.contiguous_format)
        at = Addresses()
        self._process(
            *logits_RV.shape,
            at(logits_RV, torch.float32),
            at(request_R, torch.int64),
            *self._columns.of(sampling),
            processed_RV.data_ptr(),
        )
        return processed_RV


class _CScoreTask(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "rows", "chosen")),
        *((name, c_int64) for name in ("size", "num_top")),
        *((name, c_void_p) for name in ("logprobs", "ranks", "top_ids", "top_logprobs")),
    )


class NativeScores:
    """The operation of csrc/scores.cpp: float32 logits on the CPU; sums are float64."""

    def __init__(self, team: Team) -> None:
        arguments = [c_void_p, c_int64, POINTER(_CScoreTask)]
        self._score = team.library.function("score_tokens", arguments, releases_gil=True)
        self._team = team

    def __call__(
        self, logits_AV: Tensor, chosen_R: Tensor, num_top: int, rows_R: Tensor | None = None
    ) -> Scores:
        at, (num_rows, size) = Addresses(), (len(chosen_R), logits_AV.shape[1])
        num_top = min(num_top, size)
        if rows_R is None:
            rows_R = torch.arange(num_rows)
        scores = Scores(
            torch.empty(num_rows),
            torch.empty(num_rows, dtype=torch.int64),
            torch.empty(num_rows, num_top, dtype=torch.int64),
            torch.empty(num_rows, num_top),
        )
        task = _CScoreTask(
            at(logits_AV, torch.float32),
            at(rows_R, torch.int64),
            at(chosen_R, torch.int64),
            size,
            num_top,
            *[part.data_ptr() for part in scores],
        )
        self._score(self._team.address, num_rows, ctypes.byref(task))
        return scores
