# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201, ANN202
# Triton infers the types of these functions and specialises on them.
"""Kernels of drafts: places of a level's rows, one drawn token after each text, chains that match
the target's choices, and new tokens of texts.

Dimension key: F rows of a level, N most drafts of a request, Q splits of a vocabulary, W blocks of
four neighbouring ids.
"""

import triton
import triton.language as tl

from outdraft.kernels.triton.noise_kernels import MASK, gumbel_of_word, philox
from outdraft.kernels.triton.vocabulary_kernels import (
    best,
    best_of_splits,
    better,
    first_row_of,
    softmax_of_row,
    write_verdict,
)


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


@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["choices", "token_ids", "num_drafts"],
)
def match_chains(
    choices,  # int64 [R]
    token_ids,  # int64 [B, N]
    num_drafts,
    to_token_ids,  # int64 [B, N + 1]
    to_num_emitted,  # int64 [B]
    to_rows,  # int64 [B, N]
    width,  # N
    WIDTH: tl.constexpr,  # at least N + 1
):
    """Compute `match` of chains. Grid: [B]."""
    request = tl.program_id(0).to(tl.int64)
    root = first_row_of(num_drafts, tl.program_id(0))
    number = tl.load(num_drafts + request)
    place_N = tl.arange(0, WIDTH)
    choice_N = tl.load(choices + root + place_N, mask=place_N <= number, other=-1)
    draft_N = tl.load(token_ids + request * width + place_N, mask=place_N < number, other=-1)
    is_hit_N = (place_N < number) & (choice_N == draft_N)
    accepted = tl.cast(tl.min(tl.where(is_hit_N, WIDTH, place_N)), tl.int64)
    write_verdict(
        draft_N, choice_N, accepted, place_N, request, to_token_ids, to_num_emitted, to_rows, width
    )


@triton.jit(
    do_not_specialize=["row_len", "width"],
    do_not_specialize_on_alignment=["rows", "starts", "token_ids"],
)
def append_ids(
    texts,  # int64 [S, row_len]
    rows,
    starts,
    token_ids,  # int64 [B, N]
    row_len,
    width,  # N
    WIDTH: tl.constexpr,  # at least N
):
    """Compute `append_token_ids`. Grid: [B]."""
    request = tl.program_id(0).to(tl.int64)
    place_N = tl.arange(0, WIDTH)
    id_N = tl.load(token_ids + request * width + place_N, mask=place_N < width, other=-1)
    target = texts + tl.load(rows + request) * row_len + tl.load(starts + request)
    tl.store(target + place_N, id_N, mask=id_N >= 0)
