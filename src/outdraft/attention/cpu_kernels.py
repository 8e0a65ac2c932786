# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# ruff: noqa: ANN001, ANN201, ANN202
# numba infers the types of these functions and specialises on them.
"""The compiled half of the cpu backend: numba functions that read the blocks in place.

Everything arrives as addresses and numbers in one `Batch`, because unpacking a dozen arrays costs
more than a short attention. bfloat16 is read as int16, whose bits are the upper half of a float32.

A tile is the query rows of one request that one kv head serves together; every (row, query head)
pair of it is a lane. Keys and values are read where they lie, unless they have to be widened or
padded, and meet all lanes some dozens at a time. The softmax runs online over these pieces, in
base 2: log2(e) is part of the scale. A lane's sums are taken in the same order whatever lanes are
beside it. The inner loops are in cpu_simd.py.

Dimension key: B requests, T rows, H heads, G kv heads, C head size, P blocks, S slots per block.
"""

from typing import NamedTuple

import numpy as np
from numba import carray, njit

from outdraft.attention.cpu_simd import (
    COPY_WIDTH,
    KEYS,
    LANES,
    WIDTH,
    accumulate_1,
    accumulate_4,
    copy_f32,
    dots,
    pointer,
    weigh,
    widen_bf16,
)

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
    bits: int  # of the drafted tokens that any of its rows sees
    first_key: int  # keys outside [first_key, end_key) are seen by no row
    end_key: int
    first_common: int  # keys in [first_common, end_common) are seen by every row
    end_common: int


class _Scratch(NamedTuple):
    """Working memory of one thread, addresses of float32 numbers unless it says otherwise.

    L lanes of the tile at hand, K keys of a piece, C rounded up to WIDTH.
    """

    q: int  # [L, C]
    out: int  # [L, C]
    k: int  # [K, C]; of keys that cannot be read where they lie
    v: int
    scores: int  # [L, K]
    top: int  # [L]; the highest score so far
    total: int  # [L]; the sum of the weights so far
    shrink: int  # [L]; what a rising top does to all that was summed before
    k_rows: int  # int64 [K] addresses
    v_rows: int
    zeros: int  # [C]


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


@njit(nogil=True, cache=True)
def attend(batch, share, num_shares):
    """Compute the tiles whose number is share modulo num_shares."""
    starts = _ints(batch.query_start, 0, batch.num_requests + 1)
    tile_rows = max(1, _MAX_LANES // (batch.num_heads // batch.num_kv_heads))
    memory = np.zeros(_scratch_bytes(batch, tile_rows), np.uint8)
    scratch = _lay_out(memory.ctypes.data, batch, tile_rows)
    number = 0
    for b in range(batch.num_requests):
        num_rows = starts[b + 1] - starts[b]
        for first_row in range(0, num_rows, tile_rows):
            tile = _make_tile(batch, b, first_row, min(first_row + tile_rows, num_rows))
            for kv_head in range(batch.num_kv_heads):
                if number % num_shares == share:
                    _attend_tile(batch, tile, kv_head, scratch)
                number += 1
    return memory[0]  # it has to live until here


@njit
def _scratch_sizes(batch, tile_rows):
    """Numbers in a matrix of lanes, in a matrix of keys, in one of scores; lanes."""
    lanes = _round_up(tile_rows * (batch.num_heads // batch.num_kv_heads), 16)
    size = _round_up(batch.head_size, WIDTH)
    return lanes * size, _PIECE * size, lanes * _PIECE, lanes


@njit
def _scratch_bytes(batch, tile_rows):
    by_lane, by_key, scores, lanes = _scratch_sizes(batch, tile_rows)
    zeros = by_key // _PIECE
    return 4 * (2 * by_lane + 2 * by_key + scores + 3 * lanes + zeros) + 16 * _PIECE + 64


@njit
def _lay_out(memory, batch, tile_rows):
    """The parts from the start of a cache line on: no vector lies across two."""
    by_lane, by_key, scores, lanes = _scratch_sizes(batch, tile_rows)
    q = memory + -memory % 64
    out = q + 4 * by_lane
    k = out + 4 * by_lane
    v = k + 4 * by_key
    start = v + 4 * by_key
    top = start + 4 * scores
    zeros = top + 12 * lanes
    k_rows = zeros + 4 * (by_key // _PIECE)
    v_rows = k_rows + 8 * _PIECE
    return _Scratch(
        q, out, k, v, start, top, top + 4 * lanes, top + 8 * lanes, k_rows, v_rows, zeros
    )


@njit
def _make_tile(batch, request, first_row, end_row):
    start = np.int64(_ints(batch.query_start, request, 1)[0])
    context_len = np.int64(_ints(batch.context_lens, request, 1)[0])
    num_causal = np.int64(_ints(batch.num_causal, request, 1)[0])
    positions = _longs(batch.positions, start, end_row)
    ancestors = _longs(batch.ancestors, start, end_row)
    lowest, highest, bits = positions[first_row], positions[first_row], np.int64(0)
    for row in range(first_row, end_row):
        lowest, highest = min(lowest, positions[row]), max(highest, positions[row])
        if row >= num_causal:
            bits |= ancestors[row]
    first_draft = context_len + num_causal
    # Where a drafted key lies in the text is another question for every row.
    first_key = min(max(0, lowest - batch.window + 1), first_draft)
    end_key = context_len + min(end_row, num_causal) + _bit_length(bits)
    first_common = max(0, highest - batch.window + 1)
    end_common = context_len + min(first_row + 1, num_causal)
    return _Tile(
        request,
        start,
        first_row,
        end_row,
        context_len,
        num_causal,
        bits,
        first_key,
        end_key,
        first_common,
        end_common,
    )


@njit
def _attend_tile(batch, tile, kv_head, scratch):
    num_lanes = (tile.end_row - tile.first_row) * (batch.num_heads // batch.num_kv_heads)
    lanes = _round_up(num_lanes, LANES)
    size = _round_up(batch.head_size, WIDTH)
    _load_queries(batch, tile, kv_head, size, scratch.q)
    _floats(scratch.q, num_lanes * size, (lanes - num_lanes) * size)[:] = 0
    _floats(scratch.out, 0, lanes * size)[:] = 0
    _floats(scratch.top, 0, lanes)[:] = np.float32(_HIDDEN)
    _floats(scratch.total, 0, lanes)[:] = 0
    for first_key in range(tile.first_key, tile.end_key, _PIECE):
        end_key = min(first_key + _PIECE, tile.end_key)
        offset = _find_rows(batch, tile, kv_head, first_key, end_key, size, scratch)
        _score(end_key - first_key, size, lanes, offset, scratch)
        if first_key < tile.first_common or tile.end_common < end_key:
            _hide(batch, tile, first_key, end_key, offset, scratch)
        _sum_values(end_key - first_key, size, lanes, offset, scratch)
    _store(batch, tile, kv_head, size, scratch)


@njit
def _load_queries(batch, tile, kv_head, size, q):
    """Scaled queries of the tile."""
    heads_per_kv = batch.num_heads // batch.num_kv_heads
    scale = np.float32(batch.scale * 1.4426950408889634)  # log2(e)
    lane = 0
    for row in range(tile.first_row, tile.end_row):
        for head in range(kv_head * heads_per_kv, (kv_head + 1) * heads_per_kv):
            offset = (tile.start + row) * batch.q_stride + head * batch.head_size
            q_C = _floats(q, lane * size, size)
            if batch.is_bf16_query:
                halves = _halves(batch.q, offset, batch.head_size)
                for c in range(batch.head_size):
                    q_C[c] = _from_bf16(halves[c]) * scale
            else:
                floats = _floats(batch.q, offset, batch.head_size)
                for c in range(batch.head_size):
                    q_C[c] = floats[c] * scale
            q_C[batch.head_size :] = 0
            lane += 1


@njit
def _find_rows(batch, tile, kv_head, first_key, end_key, size, scratch):
    """Addresses of the keys and values of a piece, and how far behind them this head's are."""
    table = _ints(batch.block_table, tile.request * batch.table_stride, batch.table_stride)
    step = batch.num_kv_heads * batch.head_size
    is_in_place = size == batch.head_size and not batch.is_bf16_cache
    k_rows, v_rows = _longs(scratch.k_rows, 0, _PIECE), _longs(scratch.v_rows, 0, _PIECE)
    key = first_key
    while key < end_key:
        block = key // batch.block_size
        end_of_run = min(end_key, (block + 1) * batch.block_size)
        source = (np.int64(table[block]) * batch.block_size + key - block * batch.block_size) * step
        for place in range(key - first_key, end_of_run - first_key):
            if is_in_place:
                k_rows[place] = batch.k + 4 * source
                v_rows[place] = batch.v + 4 * source
            else:
                row, at = 4 * place * size, source + kv_head * batch.head_size
                _copy_row(scratch.k + row, batch.k, at, batch.head_size, batch.is_bf16_cache)
                _copy_row(scratch.v + row, batch.v, at, batch.head_size, batch.is_bf16_cache)
                k_rows[place] = scratch.k + row
                v_rows[place] = scratch.v + row
            source += step
        key = end_of_run
    num_keys = end_key - first_key
    k_rows[num_keys : _round_up(num_keys, KEYS)] = k_rows[num_keys - 1]
    return 4 * kv_head * batch.head_size if is_in_place else 0


@njit
def _score(num_keys, size, lanes, offset, scratch):
    """scores = q . k; the lowest score for what fills the last vector."""
    for key in range(0, num_keys, KEYS):
        for lane in range(0, lanes, LANES):
            dots(
                scratch.q + 4 * lane * size,
                size,
                scratch.k_rows + 8 * key,
                offset,
                size // WIDTH,
                scratch.scores + 4 * (lane * _PIECE + key),
                _PIECE,
            )
    num_filled = _round_up(num_keys, WIDTH) - num_keys
    if num_filled:
        for lane in range(lanes):
            _floats(scratch.scores, lane * _PIECE + num_keys, num_filled)[:] = np.float32(_HIDDEN)


@njit
def _bit_length(bits):
    length = 0
    while bits >> length != 0:
        length += 1
    return length


@njit
def _nearest(bits, window):
    """The `window` highest of the bits: the rank of an ancestor is its distance in the text."""
    spare = -window
    rest = bits
    while rest != 0:
        rest &= rest - 1
        spare += 1
    for _ in range(spare):
        bits &= bits - 1
    return bits


@njit
def _hide(batch, tile, first_key, end_key, offset, scratch):
    """The lowest score for what a row does not see, and zeros for the values that none sees."""
    heads_per_kv = batch.num_heads // batch.num_kv_heads
    ancestors = _longs(batch.ancestors, tile.start, tile.end_row)
    positions = _longs(batch.positions, tile.start, tile.end_row)
    first_draft = tile.context_len + tile.num_causal
    for row in range(tile.first_row, tile.end_row):
        last_seen = tile.context_len + min(row, tile.num_causal - 1)
        bits = _nearest(ancestors[row], batch.window) if row >= tile.num_causal else 0
        lowest = positions[row] - batch.window + 1
        lane = (row - tile.first_row) * heads_per_kv
        scores_LK = _floats(scratch.scores, lane * _PIECE, heads_per_kv * _PIECE)
        for key in range(first_key, end_key):
            if key < first_draft:
                is_seen = lowest <= key <= last_seen
            else:
                is_seen = (bits >> (key - first_draft)) & 1 == 1
            if not is_seen:
                for head in range(heads_per_kv):
                    scores_LK[head * _PIECE + key - first_key] = np.float32(_HIDDEN)
    v_rows = _longs(scratch.v_rows, 0, _PIECE)
    for key in range(max(first_key, first_draft), end_key):
        if (tile.bits >> (key - first_draft)) & 1 == 0:  # nobody may have written it
            v_rows[key - first_key] = scratch.zeros - offset


@njit
def _sum_values(num_keys, size, lanes, offset, scratch):
    """Turn scores into weights relative to the new top, and take in the values they weigh."""
    num_vectors = (num_keys + WIDTH - 1) // WIDTH
    for lane in range(lanes):
        at = 4 * lane
        weigh(
            scratch.scores + at * _PIECE,
            num_vectors,
            scratch.top + at,
            scratch.total + at,
            scratch.shrink + at,
        )
    for lane in range(0, lanes, LANES):
        weights, shrink = scratch.scores + 4 * lane * _PIECE, scratch.shrink + 4 * lane
        c = 0
        while c < size:
            out, values = scratch.out + 4 * (lane * size + c), offset + 4 * c
            if c + 4 * WIDTH <= size:
                accumulate_4(out, size, weights, _PIECE, shrink, scratch.v_rows, values, num_keys)
                c += 4 * WIDTH
            else:
                accumulate_1(out, size, weights, _PIECE, shrink, scratch.v_rows, values, num_keys)
                c += WIDTH


@njit
def _store(batch, tile, kv_head, size, scratch):
    heads_per_kv = batch.num_heads // batch.num_kv_heads
    lane = 0
    for row in range(tile.first_row, tile.end_row):
        for head in range(kv_head * heads_per_kv, (kv_head + 1) * heads_per_kv):
            offset = ((tile.start + row) * batch.num_heads + head) * batch.head_size
            total = _floats(scratch.total, lane, 1)[0]
            inverse = np.float32(1) / total if total != 0 else np.float32(0)  # 0: it sees nothing
            out_C = _floats(scratch.out, lane * size, size)
            if batch.is_bf16_query:
                halves = _halves(batch.out, offset, batch.head_size)
                for c in range(batch.head_size):
                    halves[c] = _to_bf16(out_C[c] * inverse)
            else:
                floats = _floats(batch.out, offset, batch.head_size)
                for c in range(batch.head_size):
                    floats[c] = out_C[c] * inverse
            lane += 1
