# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# ruff: noqa: ANN001, ANN201, ANN202
# numba infers the types of these functions and specialises on them.
"""The compiled half of the cpu backend: numba functions that read the blocks in place.

Everything arrives as addresses and numbers in one `Batch`, because unpacking a dozen arrays costs
more than a short attention. bfloat16 is read as int16, whose bits are the upper half of a float32.

A tile is the query rows of one request that one kv head serves together; every (row, query head)
pair of it is a lane. Keys and values are brought to float32 some dozens at a time and meet all
lanes at once, so both products are small matrix products with lanes along the SIMD registers.
The softmax runs online over these pieces, in base 2: log2(e) is part of the scale. The three
inner loops are in cpu_simd.py.

Dimension key: B requests, T rows, H heads, G kv heads, C head size, P blocks, S slots per block.
"""

from typing import NamedTuple

import numpy as np
from numba import carray, njit

from outdraft.attention.cpu_simd import (
    COPY_WIDTH,
    PRODUCT_ROWS,
    add_products_8,
    add_products_16,
    copy_f32,
    pointer,
    weigh_8,
    weigh_16,
    widen_bf16,
)

# No "nnan" and "ninf": a NaN of the model must stay one. "reassoc" lets sums become SIMD.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
_PIECE = 64  # keys of one piece
_MAX_LANES = 64  # lanes of one tile
_HIDDEN = -1e30  # start value of a score that is not to be seen; finite, so that x - x is 0


class Batch(NamedTuple):
    """One call of `attend`: addresses of the tensors of attention/base.py, then its numbers."""

    q: int  # [T, H, C], rows q_stride elements apart
    out: int  # [T, H, C] contiguous, of q's dtype
    k: int  # [P, S, G, C] contiguous
    v: int
    query_start: int
    context_lens: int
    num_causal: int
    ancestors: int
    positions: int
    block_table: int  # [B, P], rows table_stride elements apart
    num_requests: int
    num_rows: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    q_stride: int
    table_stride: int
    window: int
    scale: float
    is_bf16_query: bool
    is_bf16_cache: bool


class _Tile(NamedTuple):
    """Rows [first_row, end_row) of one request: what they see. Flat row = start + row."""

    request: int
    start: int
    first_row: int
    end_row: int
    context_len: int
    num_causal: int
    first_key: int  # keys outside [first_key, end_key) are seen by no row
    end_key: int
    first_common: int  # keys in [first_common, end_common) are seen by every row
    end_common: int


class _Scratch(NamedTuple):
    """Float32 working memory of one thread; L lanes of the tile at hand."""

    q_CL: np.ndarray
    out_CL: np.ndarray
    k_KC: np.ndarray
    v_KC: np.ndarray
    scores_KL: np.ndarray
    top_L: np.ndarray  # the highest score so far
    total_L: np.ndarray  # the sum of the weights so far
    shrink_L: np.ndarray  # what a rising top does to all that was summed before


@njit
def _floats(address, offset, size):
    return carray(pointer(address + 4 * offset), (size,), np.float32)


@njit
def _halves(address, offset, size):
    return carray(pointer(address + 2 * offset), (size,), np.int16)


@njit
def _ints(address, offset, size):
    return carray(pointer(address + 4 * offset), (size,), np.int32)


@njit
def _longs(address, offset, size):
    return carray(pointer(address + 8 * offset), (size,), np.int64)


@njit
def _from_bf16(bits):
    return np.int32(np.int32(bits) << 16).view(np.float32)


@njit
def _to_bf16(value):
    """Round to nearest, ties to even, as PyTorch does."""
    bits = np.int64(np.float32(value).view(np.int32))
    rounded = np.int16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    return rounded if value == value else np.int16(0x7FC0)


@njit
def _copy_row(target, source, offset, size, is_bf16):
    """target[:size] = source[offset : offset + size] as float32; both are addresses."""
    whole = size // COPY_WIDTH
    if is_bf16:
        widen_bf16(target, source + 2 * offset, whole)
        halves, floats = _halves(source, offset, size), _floats(target, 0, size)
        for c in range(whole * COPY_WIDTH, size):
            floats[c] = _from_bf16(halves[c])
    else:
        copy_f32(target, source + 4 * offset, whole)
        rest, floats = _floats(source, offset, size), _floats(target, 0, size)
        for c in range(whole * COPY_WIDTH, size):
            floats[c] = rest[c]


@njit
def _round_up(count, multiple):
    return (count + multiple - 1) // multiple * multiple


@njit(nogil=True, cache=True)
def write_rows(new, row_stride, is_bf16_new, cached, is_bf16_cached, slots, num_rows, row_size):
    """cached[slots[t]] = new[t] for slots that are not negative; new, cached, slots: addresses."""
    slots_T = _longs(slots, 0, num_rows)
    row = np.empty(row_size, np.float32)
    for t in range(num_rows):
        if slots_T[t] < 0:
            continue
        _copy_row(row.ctypes.data, new, t * row_stride, row_size, is_bf16_new)
        if is_bf16_cached:
            target_bf16 = _halves(cached, slots_T[t] * row_size, row_size)
            for i in range(row_size):
                target_bf16[i] = _to_bf16(row[i])
        else:
            target_f32 = _floats(cached, slots_T[t] * row_size, row_size)
            for i in range(row_size):
                target_f32[i] = row[i]


@njit(nogil=True, cache=True, fastmath=_FAST)
def attend(batch, share, num_shares):
    """Compute the tiles whose number is share modulo num_shares."""
    starts = _ints(batch.query_start, 0, batch.num_requests + 1)
    heads_per_kv = batch.num_heads // batch.num_kv_heads
    tile_rows = max(1, _MAX_LANES // heads_per_kv)
    lanes = _round_up(tile_rows * heads_per_kv, 16)
    size = _round_up(batch.head_size, 8)
    scratch = _Scratch(
        _aligned(size * lanes),
        _aligned(size * lanes),
        _aligned(_PIECE * size),
        _aligned(_PIECE * size),
        _aligned(_PIECE * lanes),
        _aligned(lanes),
        _aligned(lanes),
        _aligned(lanes),
    )
    scratch.k_KC[:] = 0
    scratch.v_KC[:] = 0
    number = 0
    for b in range(batch.num_requests):
        num_rows = starts[b + 1] - starts[b]
        for first_row in range(0, num_rows, tile_rows):
            tile = _make_tile(batch, b, first_row, min(first_row + tile_rows, num_rows))
            for kv_head in range(batch.num_kv_heads):
                if number % num_shares == share:
                    _attend_tile(batch, tile, kv_head, scratch)
                number += 1


@njit
def _aligned(size):
    """Uninitialised floats from the start of a cache line: no vector lies across two."""
    floats = np.empty(size + 16, np.float32)
    start = -(floats.ctypes.data // 4) % 16
    return floats[start : start + size]


@njit
def _make_tile(batch, request, first_row, end_row):
    start = np.int64(_ints(batch.query_start, request, 1)[0])
    context_len = np.int64(_ints(batch.context_lens, request, 1)[0])
    num_causal = np.int64(_ints(batch.num_causal, request, 1)[0])
    positions = _longs(batch.positions, start, end_row)
    lowest, highest = positions[first_row], positions[first_row]
    for row in range(first_row, end_row):
        lowest, highest = min(lowest, positions[row]), max(highest, positions[row])
    # A drafted key lies behind the root in the text, so the cache index bounds its position.
    first_key = max(0, lowest - batch.window + 1)
    first_common = max(0, highest - batch.window + 1)
    end_common = context_len + min(first_row + 1, num_causal)
    return _Tile(
        request,
        start,
        first_row,
        end_row,
        context_len,
        num_causal,
        first_key,
        context_len + end_row,
        first_common,
        end_common,
    )


@njit(fastmath=_FAST)
def _attend_tile(batch, tile, kv_head, scratch):
    heads_per_kv = batch.num_heads // batch.num_kv_heads
    num_lanes = (tile.end_row - tile.first_row) * heads_per_kv
    lanes = 8 if num_lanes <= 8 else _round_up(num_lanes, 16)
    size = _round_up(batch.head_size, 8)
    _load_queries(batch, tile, kv_head, lanes, scratch.q_CL)
    scratch.out_CL[: size * lanes] = 0
    scratch.top_L[:lanes] = np.float32(_HIDDEN)
    scratch.total_L[:lanes] = 0
    for first_key in range(tile.first_key, tile.end_key, _PIECE):
        end_key = min(first_key + _PIECE, tile.end_key)
        num_keys = _round_up(end_key - first_key, 8)
        _load_keys(batch, tile, kv_head, first_key, end_key, size, scratch)
        _start_scores(batch, tile, first_key, end_key, lanes, scratch.scores_KL)
        q, scores = scratch.q_CL.ctypes.data, scratch.scores_KL.ctypes.data
        _multiply(scores, num_keys, scratch.k_KC.ctypes.data, size, 1, q, size, lanes)
        _weigh(num_keys, size, lanes, scratch)
        out, v = scratch.out_CL.ctypes.data, scratch.v_KC.ctypes.data
        _multiply(out, size, v, 1, size, scores, num_keys, lanes)
    _store(batch, tile, kv_head, lanes, scratch)


@njit
def _multiply(dst, num_rows, a, a_row, a_column, x, count, lanes):
    """dst[i, l] += sum over t of a[i, t] * x[t, l], for i < num_rows, a multiple of 8."""
    for i in range(0, num_rows, PRODUCT_ROWS):
        if lanes == 8:
            add_products_8(dst + 4 * i * 8, 8, a + 4 * i * a_row, a_row, a_column, x, 8, count)
            continue
        for lane in range(0, lanes, 16):
            add_products_16(
                dst + 4 * (i * lanes + lane),
                lanes,
                a + 4 * i * a_row,
                a_row,
                a_column,
                x + 4 * lane,
                lanes,
                count,
            )


@njit(fastmath=_FAST)
def _load_queries(batch, tile, kv_head, lanes, q_CL):
    """Scaled queries of the tile, transposed; unused lanes are zero."""
    heads_per_kv = batch.num_heads // batch.num_kv_heads
    scale = np.float32(batch.scale * 1.4426950408889634)  # log2(e)
    q_CL[: _round_up(batch.head_size, 8) * lanes] = 0
    lane = 0
    for row in range(tile.first_row, tile.end_row):
        for head in range(kv_head * heads_per_kv, (kv_head + 1) * heads_per_kv):
            offset = (tile.start + row) * batch.q_stride + head * batch.head_size
            if batch.is_bf16_query:
                halves = _halves(batch.q, offset, batch.head_size)
                for c in range(batch.head_size):
                    q_CL[c * lanes + lane] = _from_bf16(halves[c]) * scale
            else:
                floats = _floats(batch.q, offset, batch.head_size)
                for c in range(batch.head_size):
                    q_CL[c * lanes + lane] = floats[c] * scale
            lane += 1


@njit
def _load_keys(batch, tile, kv_head, first_key, end_key, size, scratch):
    """Keys and values of [first_key, end_key), and zeros up to a multiple of 8 of them."""
    table = _ints(batch.block_table, tile.request * batch.table_stride, batch.table_stride)
    step = batch.num_kv_heads * batch.head_size
    k, v = scratch.k_KC.ctypes.data, scratch.v_KC.ctypes.data
    key = first_key
    while key < end_key:
        block = key // batch.block_size
        offset = key - block * batch.block_size
        end_of_run = min(end_key, (block + 1) * batch.block_size)
        source = (table[block] * batch.block_size + offset) * step + kv_head * batch.head_size
        for target in range(key - first_key, end_of_run - first_key):
            row = 4 * target * size
            _copy_row(k + row, batch.k, source, batch.head_size, batch.is_bf16_cache)
            _copy_row(v + row, batch.v, source, batch.head_size, batch.is_bf16_cache)
            source += step
        key = end_of_run
    num_keys = end_key - first_key
    scratch.k_KC[num_keys * size : _round_up(num_keys, 8) * size] = 0
    scratch.v_KC[num_keys * size : _round_up(num_keys, 8) * size] = 0


@njit
def _start_scores(batch, tile, first_key, end_key, lanes, scores_KL):
    """0 where a lane sees the key and a very low score elsewhere, for the product to add to."""
    num_keys = end_key - first_key
    scores_KL[: num_keys * lanes] = 0
    scores_KL[num_keys * lanes : _round_up(num_keys, 8) * lanes] = np.float32(_HIDDEN)
    if tile.first_common <= first_key and end_key <= tile.end_common:
        return
    heads_per_kv = batch.num_heads // batch.num_kv_heads
    ancestors = _longs(batch.ancestors, tile.start, tile.end_row)
    positions = _longs(batch.positions, tile.start, tile.end_row)
    first_draft = tile.context_len + tile.num_causal
    for row in range(tile.first_row, tile.end_row):
        last_seen = tile.context_len + min(row, tile.num_causal - 1)
        bits = ancestors[row] if row >= tile.num_causal else 0
        lowest = positions[row] - batch.window + 1
        for key in range(first_key, end_key):
            if key < first_draft:
                is_seen = lowest <= key <= last_seen
            else:
                is_seen = (bits >> (key - first_draft)) & 1 == 1
                is_seen = is_seen and lowest <= positions[key - tile.context_len]
            if not is_seen:
                lane = (key - first_key) * lanes + (row - tile.first_row) * heads_per_kv
                scores_KL[lane : lane + heads_per_kv] = np.float32(_HIDDEN)


@njit(fastmath=_FAST)
def _weigh(num_keys, size, lanes, scratch):
    """Turn scores into weights relative to the new top, and bring older sums down to it."""
    scores, out = scratch.scores_KL.ctypes.data, scratch.out_CL.ctypes.data
    top, total = scratch.top_L.ctypes.data, scratch.total_L.ctypes.data
    shrink = scratch.shrink_L.ctypes.data
    if lanes == 8:
        weigh_8(scores, lanes, num_keys, top, total, shrink)
    else:
        for lane in range(0, 4 * lanes, 4 * 16):
            weigh_16(scores + lane, lanes, num_keys, top + lane, total + lane, shrink + lane)
    factor = _floats(shrink, 0, lanes)
    for c in range(size):
        row = _floats(out, c * lanes, lanes)
        for lane in range(lanes):
            row[lane] *= factor[lane]


@njit(fastmath=_FAST)
def _store(batch, tile, kv_head, lanes, scratch):
    heads_per_kv = batch.num_heads // batch.num_kv_heads
    lane = 0
    for row in range(tile.first_row, tile.end_row):
        for head in range(kv_head * heads_per_kv, (kv_head + 1) * heads_per_kv):
            offset = ((tile.start + row) * batch.num_heads + head) * batch.head_size
            inverse = np.float32(1) / scratch.total_L[lane]
            if batch.is_bf16_query:
                halves = _halves(batch.out, offset, batch.head_size)
                for c in range(batch.head_size):
                    halves[c] = _to_bf16(scratch.out_CL[c * lanes + lane] * inverse)
            else:
                floats = _floats(batch.out, offset, batch.head_size)
                for c in range(batch.head_size):
                    floats[c] = scratch.out_CL[c * lanes + lane] * inverse
            lane += 1
