# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201, ANN202
# Triton infers the types of kernels and specialises on them. A launch takes more than their
# parameters.
"""Levels of drafts on a GPU: one launch or two where the readable operations are dozens. These
draw levels of more than one row.

Dimension key: B requests, E nodes of the level above, F rows of a level, Q splits of a vocabulary,
V vocabulary, W blocks of four neighbouring ids.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from outdraft.kernels.data.noise import Purpose
from outdraft.kernels.draft_ops import (
    DECAY,
    OWN_BASE,
    OWN_SLOPE,
    PARENT_SHIFT,
    DraftStart,
    DrawnLevel,
    LevelTask,
)
from outdraft.kernels.torch import drawn_level
from outdraft.kernels.triton.noise import MASK, gumbel, gumbel_of_word, philox
from outdraft.kernels.triton.vocabulary import (
    NO_ID,
    best,
    best_of_splits,
    better,
    softmax_of_row,
    softmax_of_split,
)

_TILE = 256  # blocks of four ids
_LOW, _DECAY = tl.constexpr(drawn_level.LOW), tl.constexpr(DECAY)
_BASE, _SLOPE = tl.constexpr(OWN_BASE), tl.constexpr(OWN_SLOPE)


def place_level(
    ancestors_BF: Tensor, first_row: int, num_drafts_B: Tensor, start: DraftStart
) -> tuple[Tensor, Tensor, Tensor]:
    num_requests, num_rows = ancestors_BF.shape
    given = ancestors_BF, num_drafts_B, start.contexts_B
    size, device = num_requests * num_rows, ancestors_BF.device
    own, positions, slots = torch.empty(3, size, dtype=torch.int64, device=device).unbind()
    if size:
        place_rows_of_level[(num_requests,)](
            *(one.contiguous() for one in given),
            start.block_table_BP,
            *(own, positions, slots),
            first_row,
            start.block_table_BP.stride(0),
            NUM_ROWS=num_rows,
            BLOCK_SIZE=start.block_size,
            WIDTH=triton.next_power_of_2(num_rows),
        )
    return own, positions, slots


def draw_level(logits_BEV: Tensor, weight_BE: Tensor, task: LevelTask) -> DrawnLevel:
    num_requests, num_nodes, size = logits_BEV.shape
    is_chain = num_nodes == task.num_rows == 1
    if not is_chain or logits_BEV.dtype != torch.float32 or num_requests == 0:
        return drawn_level.draw_level(logits_BEV, weight_BE, task, gumbel)
    logits_BV = logits_BEV[:, 0].contiguous()
    num_splits, device = triton.cdiv(size, 4 * _TILE), logits_BV.device
    values, tops, totals = (torch.empty(num_requests, num_splits, device=device) for _ in range(3))
    parts = values, torch.empty_like(values, dtype=torch.int64), tops, totals
    draw_parts[(num_requests, num_splits)](
        logits_BV,
        task.seeds_B.contiguous(),
        task.positions_B.contiguous(),
        task.num_tokens_B.contiguous(),
        *parts,
        size,
        task.first_above << PARENT_SHIFT,
        int(Purpose.DRAFT),
        TILE=_TILE,
        enable_fp_fusion=False,
    )
    level = DrawnLevel(
        token_ids_BF=torch.empty(num_requests, 1, dtype=torch.int64, device=device),
        origins_BF=torch.zeros(num_requests, 1, dtype=torch.int64, device=device),
        is_drawn_BF=torch.empty(num_requests, 1, dtype=torch.bool, device=device),
        probs_BFV=torch.empty(num_requests, 1, size, device=device),
        weight_BF=torch.empty(num_requests, 1, device=device),
    )
    draw_whole[(num_requests, num_splits)](
        logits_BV,
        weight_BE.contiguous(),
        task.num_kept_B.contiguous(),
        *parts,
        level.probs_BFV,
        level.token_ids_BF,
        level.is_drawn_BF,
        level.weight_BF,
        size,
        NUM_SPLITS=num_splits,
        SPLITS=triton.next_power_of_2(num_splits),
        TILE=4 * _TILE,
    )
    return level


@triton.jit
def _num_bits(bits):
    """In int64 numbers, none of them negative: sums of 2, 4, 8 bits side by side, then of bytes."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((bits * 0x0101010101010101) >> 56) & 0x7F


@triton.jit(
    do_not_specialize=["first_row", "stride"],
    do_not_specialize_on_alignment=["ancestors", "num_drafts", "contexts", "table"],
)
def place_rows_of_level(
    ancestors,  # int64 [B, F]
    num_drafts,
    contexts,
    table,  # int32
    to_ancestors,
    to_positions,
    to_slots,
    first_row,
    stride,  # of the table
    NUM_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # at least NUM_ROWS
):
    """Compute `place_level`. Grid: [B]."""
    request = tl.program_id(0).to(tl.int64)
    row_F = tl.arange(0, WIDTH)
    is_row_F = row_F < NUM_ROWS
    num_drafts_1, context = tl.load(num_drafts + request), tl.load(contexts + request)
    place_F = first_row + row_F
    has_slot_F = is_row_F & (place_F < num_drafts_1)
    index_F = tl.where(has_slot_F, context + place_F, 0)
    block_F = tl.load(table + request * stride + index_F // BLOCK_SIZE, mask=has_slot_F, other=0)
    slot_F = block_F.to(tl.int64) * BLOCK_SIZE + index_F % BLOCK_SIZE
    target = request * NUM_ROWS + row_F
    one = tl.full((), 1, tl.int64)
    own_F = tl.load(ancestors + target, mask=is_row_F, other=0) & ((one << num_drafts_1) - 1)
    tl.store(to_ancestors + target, own_F, mask=is_row_F)
    tl.store(to_positions + target, context - 1 + _num_bits(own_F), mask=is_row_F)
    tl.store(to_slots + target, tl.where(has_slot_F, slot_F, -1), mask=is_row_F)


@triton.jit(
    do_not_specialize=["size", "first_anchor", "purpose"],
    do_not_specialize_on_alignment=["seeds", "positions", "num_tokens"],
)
def draw_parts(
    logits,  # float32 [B, size]
    seeds,
    positions,
    num_tokens,
    best_values,  # float32 [B, Q]
    best_ids,  # int64
    tops,  # float32
    totals,
    size,
    first_anchor,
    purpose,
    TILE: tl.constexpr,  # blocks of a split
):
    """The largest sum of logit and noise of each split, and its softmax. Grid: [B, Q].

    A token without mass has something lower for a sum, the more so the higher its id.
    """
    request, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block_W = (split * TILE + tl.arange(0, TILE)).to(tl.int64)
    position, length = tl.load(positions + request), tl.load(num_tokens + request)
    anchor = (length + first_anchor) & MASK
    words = philox(block_W, position & MASK, anchor, purpose, tl.load(seeds + request))
    least = float("-inf")
    value, token = least, tl.full((), NO_ID, tl.int64)
    for part in tl.static_range(4):
        id_W = block_W * 4 + part
        logit_W = tl.load(logits + request * size + id_W, mask=id_W < size, other=least)
        low_W = (id_W + 1).to(tl.float32) * _LOW
        key_W = tl.where(logit_W > least, logit_W + gumbel_of_word(words[part]), low_W)
        own_value, own_token = best(tl.where(id_W < size, key_W, least), id_W)
        value, token = better(value, token, own_value, own_token)
    place = request * tl.num_programs(1) + split
    tl.store(best_values + place, value)
    tl.store(best_ids + place, token)
    softmax_of_split(logits, request, split, size, tops, totals, 4 * TILE)


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["weights", "num_kept"])
def draw_whole(
    logits,
    weights,  # float32 [B]
    num_kept,  # int64 [B]
    best_values,
    best_ids,
    tops,
    totals,
    to_probs,  # float32 [B, size]
    to_ids,  # int64 [B]
    to_is_drawn,  # bool [B]
    to_weights,  # float32 [B]
    size,
    NUM_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,  # at least NUM_SPLITS
    TILE: tl.constexpr,  # ids of a split
):
    """The drawn token, and what it was drawn from. Grid: [B, Q]."""
    request, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    least = float("-inf")
    base, total = softmax_of_row(tops, totals, request, NUM_SPLITS, SPLITS)
    total = tl.where(total == 0.0, 1.0, total)  # where no token has mass nothing is drawn
    source, target = logits + request * size, to_probs + request * size
    id_V = split * TILE + tl.arange(0, TILE)
    logit_V = tl.load(source + id_V, mask=id_V < size, other=least)
    tl.store(target + id_V, tl.exp(logit_V - base) / total, mask=id_V < size)
    if split == 0:
        token = best_of_splits(best_values, best_ids, request, NUM_SPLITS, SPLITS)
        logit = tl.load(source + token)
        is_drawn = (logit > least) & (tl.load(num_kept + request) > 0)
        own = tl.exp(logit - base) / total
        worth = tl.exp(tl.log(tl.sqrt(own) * _SLOPE + _BASE) * _DECAY)
        weight = tl.load(weights + request) * worth
        tl.store(to_ids + request, token)
        tl.store(to_is_drawn + request, is_drawn)
        tl.store(to_weights + request, tl.where(is_drawn, weight, 0.0))
