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
from outdraft.kernels.triton.noise import GUMBEL, MASK, gumbel, gumbel_of_word, philox
from outdraft.kernels.triton.vocabulary import best, best_of_splits, better, softmax_of_row

_TILE = 256  # blocks of four ids


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
        LOW=drawn_level.LOW,
        **GUMBEL,
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
        BASE=OWN_BASE,
        SLOPE=OWN_SLOPE,
        DECAY=DECAY,
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


@triton.jit
def _key(logit_W, word_W, token_W, size, LN2, SQRT2, SERIES, LOW):
    """Logit and noise; without mass something lower, the more so the higher the id."""
    noisy_W = logit_W + gumbel_of_word(word_W, LN2, SQRT2, SERIES)
    low_W = LOW * (token_W + 1).to(tl.float32)
    key_W = tl.where(logit_W > float("-inf"), noisy_W, low_W)
    return tl.where(token_W < size, key_W, float("-inf"))


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
    ROUNDS: tl.constexpr,
    LN2: tl.constexpr,
    SQRT2: tl.constexpr,
    SERIES: tl.constexpr,
    LOW: tl.constexpr,
):
    """The largest sum of logit and noise of each split, and its softmax. Grid: [B, Q]."""
    request, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block_W = (split * TILE + tl.arange(0, TILE)).to(tl.int64)
    zeros_W = tl.zeros_like(block_W)
    word0_W, word1_W, word2_W, word3_W = philox(
        block_W,
        zeros_W + (tl.load(positions + request) & MASK),
        zeros_W + ((tl.load(num_tokens + request) + first_anchor) & MASK),
        zeros_W + purpose,
        tl.load(seeds + request),
        ROUNDS,
    )
    source, id_W = logits + request * size, block_W * 4
    least = float("-inf")
    logit0_W = tl.load(source + id_W, mask=id_W < size, other=least)
    logit1_W = tl.load(source + id_W + 1, mask=id_W + 1 < size, other=least)
    logit2_W = tl.load(source + id_W + 2, mask=id_W + 2 < size, other=least)
    logit3_W = tl.load(source + id_W + 3, mask=id_W + 3 < size, other=least)
    value, token = best(_key(logit0_W, word0_W, id_W, size, LN2, SQRT2, SERIES, LOW), id_W)
    value1, token1 = best(
        _key(logit1_W, word1_W, id_W + 1, size, LN2, SQRT2, SERIES, LOW), id_W + 1
    )
    value, token = better(value, token, value1, token1)
    value2, token2 = best(
        _key(logit2_W, word2_W, id_W + 2, size, LN2, SQRT2, SERIES, LOW), id_W + 2
    )
    value, token = better(value, token, value2, token2)
    value3, token3 = best(
        _key(logit3_W, word3_W, id_W + 3, size, LN2, SQRT2, SERIES, LOW), id_W + 3
    )
    value, token = better(value, token, value3, token3)
    top_W = tl.maximum(tl.maximum(logit0_W, logit1_W), tl.maximum(logit2_W, logit3_W))
    top = tl.max(top_W)
    base = tl.where(top > least, top, 0.0)
    total_W = tl.exp(logit0_W - base) + tl.exp(logit1_W - base)
    total_W += tl.exp(logit2_W - base) + tl.exp(logit3_W - base)
    place = request * tl.num_programs(1) + split
    tl.store(best_values + place, value)
    tl.store(best_ids + place, token)
    tl.store(tops + place, top)
    tl.store(totals + place, tl.sum(total_W))


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
    BASE: tl.constexpr,
    SLOPE: tl.constexpr,
    DECAY: tl.constexpr,
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
        worth = tl.exp(DECAY * tl.log(BASE + SLOPE * tl.sqrt(own)))
        weight = tl.load(weights + request) * worth
        tl.store(to_ids + request, token)
        tl.store(to_is_drawn + request, is_drawn)
        tl.store(to_weights + request, tl.where(is_drawn, weight, 0.0))
