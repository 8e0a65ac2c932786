"""A step of a target by the compiled library, see csrc/step.cpp.

Steps of small models take less time than some calls of torch, so torch is called only where a
tensor is needed.

Dimension key: R rows whose logits or states are wanted, T rows, K tapped layers, D hidden.
"""

import ctypes
from array import array
from ctypes import POINTER, c_bool, c_int64, c_void_p

import torch
from torch import Tensor

from outdraft.kernels.data.drafts import DraftBatch, Verdict
from outdraft.kernels.native.arrays import Addresses, BatchColumns, address_of, index_array
from outdraft.kernels.native.library import Library
from outdraft.kernels.native.rows import CRowCounts, RowArrays, int64_tensor
from outdraft.kernels.native.sampling import cut_columns, penalty_columns
from outdraft.kernels.native.verification import choice_columns
from outdraft.kernels.step_ops import (
    Chooser,
    KnownChoice,
    StatePlaces,
    StatesOf,
    StepRead,
    StepTask,
)

_NOTHING, _LIKELIEST, _BY_RULE = range(3)


class _CChoiceRules(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("temperature", "least", "top_k", "top_p")),
        *((name, c_void_p) for name in ("repetition", "presence", "frequency")),
        *((name, c_void_p) for name in ("is_greedy", "draws", "seeds", "probs", "is_sampled")),
        *((name, c_int64) for name in ("rule", "sampled_trees")),
    )


_NO_RULES = _CChoiceRules()


class _CStepTask(ctypes.Structure):
    _fields_ = (
        ("counts", CRowCounts),
        *((name, c_void_p) for name in ("numbers", "block_table", "texts")),
        ("row_len", c_int64),
        *((name, c_void_p) for name in ("draft_ids", "draft_parents", "num_drafts")),
        *((name, c_int64) for name in ("are_shaped", "chooses")),
        ("rules", _CChoiceRules),
        ("states_of", c_int64),
        ("taps", c_void_p),
        *((name, c_int64) for name in ("num_taps", "window")),
        *((name, c_void_p) for name in ("placed", "tapped", "states")),
        *((name, c_void_p) for name in ("emitted", "accepted", "num_emitted", "are_finite")),
        *((name, c_void_p) for name in ("state_places", "last_rows", "last_places")),
    )


class NativeStep:
    """Steps of decoders that are whole."""

    def __init__(self, library: Library) -> None:
        self._step = library.function(
            "decoder_step", [c_void_p, POINTER(_CStepTask)], c_int64, releases_gil=True
        )
        self._cuts, self._choices = BatchColumns(cut_columns), BatchColumns(choice_columns)
        self._penalties = BatchColumns(penalty_columns)

    def read(self, decoder: int, task: StepTask, size: int, dtype: torch.dtype) -> StepRead:
        """Compute `DecoderPass.step`.

        Args:
            decoder: address of the `Decoder`.
            size, dtype: D of its states, and their type.
        """
        arrays = RowArrays(task.spans, task.facts, task.block_size, task.width)
        counts, at, taps = arrays.counts, Addresses(), task.taps
        states_RD = tapped_TKD = None
        if task.states_of is not StatesOf.NO_ROW:
            is_all = task.states_of is StatesOf.ALL_ROWS
            num_wanted = counts.num_rows if is_all else counts.num_logits
            states_RD = torch.empty((num_wanted, size), dtype=dtype)
            tapped_TKD = torch.empty((counts.num_rows, len(taps), size), dtype=dtype)
        drafts, columns = task.drafts, (None, None, None)
        if drafts is not None:
            parts = drafts.token_ids_BN, drafts.parents_BN, drafts.num_drafts_B
            columns = tuple([at(part, torch.int64) for part in parts])
        chooses, rules, choice = _NOTHING, _NO_RULES, None
        if task.chooser is not None:
            choice, chooses = _NativeChoice(counts), _LIKELIEST
            if not task.chooser.sampling.is_plain_greedy:
                assert drafts is not None
                chooses, rules = _BY_RULE, self._rules(task.chooser, drafts, at)
        kept: StatePlaces | None = None
        if choice is not None and task.window:
            lengths = counts.num_rows, counts.num_works, counts.num_works
            kept = StatePlaces(*[torch.empty(length, dtype=torch.int64) for length in lengths])
        native = _CStepTask(
            counts,
            arrays.numbers,
            arrays.blocks,
            address_of(task.token_ids_SL, torch.int64),
            task.token_ids_SL.shape[1],
            *columns,
            task.are_shaped,
            chooses,
            rules,
            task.states_of,
            ctypes.addressof(index_array(tuple(taps))) if taps else None,
            len(taps),
            task.window,
            arrays.placed,
            None if tapped_TKD is None else tapped_TKD.data_ptr(),
            None if states_RD is None else states_RD.data_ptr(),
            *((None,) * 4 if choice is None else choice.addresses()),
            *(() if kept is None else [part.data_ptr() for part in kept]),
        )
        is_valid = self._step(decoder, ctypes.byref(native))
        assert is_valid, "a token or a position is out of its table"
        return StepRead(arrays.rows, states_RD, tapped_TKD, choice, kept)

    def _rules(self, chooser: Chooser, drafts: DraftBatch, at: Addresses) -> _CChoiceRules:
        probs_BNV, sampling = drafts.probs_BNV, chooser.sampling
        return _CChoiceRules(
            *self._cuts.of(sampling),
            *(self._penalties.of(sampling) if sampling.needs_penalties else (None,) * 3),
            *self._choices.of(sampling),
            None if probs_BNV is None else at(probs_BNV, torch.float32),
            at(drafts.is_sampled_BN, torch.bool),
            chooser.rule,
            drafts.sampled_trees,
        )


class _NativeChoice:
    """A choice in numbers of the host, written by the library."""

    def __init__(self, counts: CRowCounts) -> None:
        self._num_requests, self._width = counts.num_sampling, counts.width
        self._lengths = [
            self._num_requests * (self._width + 1),
            self._num_requests * self._width,
            self._num_requests,
        ]
        self._numbers = array("q", bytes(8 * sum(self._lengths)))
        self._are_finite = (c_bool * counts.num_logits)()

    def addresses(self) -> tuple[int, ...]:
        """The addresses of emitted, accepted, num_emitted and are_finite."""
        emitted, num_bytes = self._numbers.buffer_info()[0], self._numbers.itemsize
        accepted = emitted + self._lengths[0] * num_bytes
        num_emitted = accepted + self._lengths[1] * num_bytes
        return emitted, accepted, num_emitted, ctypes.addressof(self._are_finite)

    @property
    def verdict(self) -> Verdict:
        emitted, accepted, num_emitted_B = int64_tensor(self._numbers).split(self._lengths)
        shape = self._num_requests, self._width
        return Verdict(emitted.view(shape[0], shape[1] + 1), num_emitted_B, accepted.view(shape))

    @property
    def is_finite_R(self) -> Tensor:
        return torch.tensor(list(self._are_finite), dtype=torch.bool)

    @property
    def on_host(self) -> KnownChoice:
        numbers, width = self._numbers.tolist(), self._width
        ends = self._lengths[0], self._lengths[0] + self._lengths[1]
        return KnownChoice(
            list(self._are_finite),
            [numbers[start : start + width + 1] for start in range(0, ends[0], width + 1)],
            [numbers[ends[0] + b * width :][:width] for b in range(self._num_requests)],
        )
