"""Growing trees by the compiled library.

Dimension key: B requests that draft, K drafts, V vocabulary.
"""

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_double, c_int64, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outdraft.kernels import draft_ops
from outdraft.kernels.draft_ops import (
    DraftStart,
    DrawnLevel,
    Growth,
    LevelTask,
    ModelDrafts,
    side_shares,
)
from outdraft.kernels.native.arrays import Addresses
from outdraft.kernels.native.library import Library


class NativeDrafting:
    """The operations of csrc/drawn_level.cpp."""

    def __init__(self, library: Library) -> None:
        self._place_level = library.function(
            "place_level",
            [*[c_int64] * 3, *[c_void_p] * 4, c_int64, c_int64, *[c_void_p] * 3],
        )

        self._draw_level = library.function(
            "draw_level",
            [*[c_int64] * 5, ctypes.POINTER(_Worth), *[c_void_p] * 12],
            releases_gil=True,
        )

    def draw_level(self, logits_BEV: Tensor, weight_BE: Tensor, task: LevelTask) -> DrawnLevel:
        """As `ops.DrawLevel`, of float32 logits."""
        num_requests, num_nodes, size = logits_BEV.shape
        shape_BF = (num_requests, task.num_rows)
        _check_level(num_nodes, task.num_rows, size)
        level = DrawnLevel(
            torch.zeros(shape_BF, dtype=torch.int64),
            torch.zeros(shape_BF, dtype=torch.int64),
            torch.zeros(shape_BF, dtype=torch.bool),
            torch.empty(*shape_BF, size),
            torch.zeros(shape_BF),
        )
        worth = _worth(min(task.num_rows, size) - 1)
        columns = (task.num_kept_B, task.positions_B, task.num_tokens_B, task.seeds_B, task.draws_B)
        given = [one.contiguous() for one in (logits_BEV, weight_BE, *columns)]
        self._draw_level(
            num_requests,
            num_nodes,
            size,
            task.num_rows,
            task.first_above,
            ctypes.byref(worth),
            *(one.data_ptr() for one in given),
            level.token_ids_BF.data_ptr(),
            level.origins_BF.data_ptr(),
            level.is_drawn_BF.data_ptr(),
            level.probs_BFV.data_ptr(),
            level.weight_BF.data_ptr(),
        )
        return level

    def place_level(
        self, ancestors_BF: Tensor, first_row: int, num_drafts_B: Tensor, start: DraftStart
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_requests, width = ancestors_BF.shape
        ancestors_BF = ancestors_BF.contiguous()
        contexts_B, num_drafts_B = start.contexts_B.contiguous(), num_drafts_B.contiguous()
        placed_3T = torch.empty(3, num_requests * width, dtype=torch.int64)
        ancestors_T, positions_T, slots_T = placed_3T.unbind()
        self._place_level(
            num_requests,
            width,
            first_row,
            ancestors_BF.data_ptr(),
            contexts_B.data_ptr(),
            num_drafts_B.data_ptr(),
            start.block_table_BP.data_ptr(),
            start.block_table_BP.shape[1],
            start.block_size,
            ancestors_T.data_ptr(),
            positions_T.data_ptr(),
            slots_T.data_ptr(),
        )
        return ancestors_T, positions_T, slots_T


class _Worth(ctypes.Structure):
    _fields_ = (
        *((name, c_double) for name in ("rank0_base", "rank0_slope", "own_base", "own_slope")),
        ("side_weight", c_double),
        ("num_shares", c_int64),
        ("side_shares", c_void_p),
    )


class _Task(ctypes.Structure):
    """As `DraftTask` of csrc/decoder_draft.cpp."""

    _fields_ = (
        *((name, c_int64) for name in ("num_requests", "num_levels", "num_rows", "size")),
        *((name, c_int64) for name in ("table_width", "block_size")),
        ("levels", c_void_p),
        ("worth", _Worth),
        *((name, c_void_p) for name in ("num_tokens", "positions", "contexts", "num_drafts")),
        *((name, c_void_p) for name in ("seeds", "kinds", "is_greedy")),
        *((name, c_void_p) for name in ("temperature", "least", "top_k", "top_p")),
        *((name, c_void_p) for name in ("allowed", "bias", "block_table")),
        *((name, c_void_p) for name in ("token_ids", "parents", "is_drawn", "probs")),
    )


_RANKED, _DRAWN, _RANKED_WITH_NOISE = range(3)
_SIDE_SHARES = np.array(side_shares(64), dtype=np.float32)  # a level has no more rows


def _worth(num_shares: int) -> _Worth:
    return _Worth(
        draft_ops.RANK0_BASE,
        draft_ops.RANK0_SLOPE,
        draft_ops.OWN_BASE,
        draft_ops.OWN_SLOPE,
        draft_ops.SIDE_WEIGHT,
        num_shares,
        _SIDE_SHARES.ctypes.data,
    )


def draft_function(library: Library) -> Callable[..., Any]:
    """The function that `draft` calls."""
    arguments = [c_void_p, ctypes.POINTER(_Task), c_void_p]
    return library.function("decoder_draft", arguments, c_int64, releases_gil=True)


def draft(
    function: Callable[..., Any], decoder: int, start: DraftStart, growth: Growth
) -> ModelDrafts:
    """As `ops.DecoderPass.draft`.

    Args:
        decoder: address of the `Decoder`.

    Raises:
        ValueError: the vocabulary cannot fill a level.
    """
    sampling, shape, levels_L = growth.sampling, growth.shape, _levels(growth.shape.levels)
    size, num_requests = sampling.vocab_size, len(growth.num_tokens_B)
    for num_nodes, num_rows in zip((1, *shape.levels), shape.levels, strict=False):
        _check_level(num_nodes, num_rows, size)
    draws = growth.samples and sampling.any_draws
    at = Addresses()
    ids_2BK = torch.empty(2, num_requests, shape.num_rows, dtype=torch.int64)
    is_drawn_BK = torch.empty(num_requests, shape.num_rows, dtype=torch.bool)
    probs_BKV = torch.empty(num_requests, shape.num_rows, size) if draws else None
    task = _Task(
        num_requests=num_requests,
        num_levels=shape.depth,
        num_rows=shape.num_rows,
        size=size,
        table_width=start.block_table_BP.shape[1],
        block_size=start.block_size,
        levels=levels_L.ctypes.data,
        worth=_worth(0),  # each level sets the number of shares
        num_tokens=at(growth.num_tokens_B, torch.int64),
        positions=at(growth.positions_B, torch.int64),
        contexts=at(start.contexts_B, torch.int64),
        num_drafts=at(growth.num_drafts_B, torch.int64),
        seeds=at(sampling.seeds_B, torch.int64),
        kinds=at(_kinds(growth), torch.int64),
        is_greedy=at(sampling.is_greedy_B, torch.bool),
        temperature=at(sampling.temperature_B, torch.float32),
        least=at(sampling.min_p_B.log(), torch.float32),
        top_k=at(sampling.top_k_B, torch.int64),
        top_p=at(sampling.top_p_B, torch.float32),
        allowed=None if sampling.allowed is None else at(_allowed_BV(growth), torch.bool),
        bias=None if sampling.bias is None else at(_bias_BV(growth), torch.float32),
        block_table=at(start.block_table_BP, torch.int32),
        token_ids=ids_2BK[0].data_ptr(),
        parents=ids_2BK[1].data_ptr(),
        is_drawn=is_drawn_BK.data_ptr(),
        probs=None if probs_BKV is None else probs_BKV.data_ptr(),
    )
    is_valid = function(decoder, ctypes.byref(task), at(start.states_BD, start.states_BD.dtype))
    assert is_valid, "a token or a position is out of its table"
    return ModelDrafts(
        ids_2BK[0],
        ids_2BK[1],
        growth.num_drafts_B,
        probs_BKV,
        is_drawn_BK if draws else None,
        is_chain=shape.is_chain,
        all_sampled=draws and sampling.all_draw,
    )


@functools.lru_cache(maxsize=256)
def _levels(levels: tuple[int, ...]) -> np.ndarray:
    return np.array(levels, dtype=np.int64)


def _check_level(num_nodes: int, num_rows: int, size: int) -> None:
    most = num_nodes * min(num_rows, size)
    if most < num_rows:
        raise ValueError(f"{most} tokens cannot fill {num_rows} rows of a level")


def _kinds(growth: Growth) -> Tensor:
    """int64 [B]."""
    sampling = growth.sampling
    if not growth.samples or sampling.all_greedy:
        return torch.zeros_like(sampling.seeds_B)
    return sampling.draws_B * _DRAWN + sampling.shares_noise_B * _RANKED_WITH_NOISE


def _allowed_BV(growth: Growth) -> Tensor:
    """bool."""
    sets, size = growth.sampling.allowed, growth.sampling.vocab_size
    assert sets is not None
    is_in_set_BV = torch.zeros(len(sets.ids_BE), size, dtype=torch.bool)
    return is_in_set_BV.scatter_(1, sets.ids_BE, True) | ~sets.is_set_B[:, None]


def _bias_BV(growth: Growth) -> Tensor:
    values, size = growth.sampling.bias, growth.sampling.vocab_size
    assert values is not None
    return torch.zeros(len(values.ids_BE), size).scatter_add_(1, values.ids_BE, values.values_BE)
