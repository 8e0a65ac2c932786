# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportArgumentType=false
# ruff: noqa: ANN001, ANN201, ANN202
# numba infers the types of these functions and specialises on them.
"""One tile of the CPU attention: the query rows of one request that one kv head serves together.

Every (row, query head) pair of it is a lane. Keys and values are read where they lie, unless they
have to be widened or padded, and meet all lanes some dozens at a time. The softmax runs online over
these pieces, in base 2: log2(e) is part of the scale. The inner loops are in cpu_simd.py.

A long context has parts. The sums of the parts are added in the order of the parts, whichever
thread made them. So the order of a lane's sums does not depend on the other lanes or on the number
of threads. So that this holds in trees too, each row of a tree meets its own drafted keys in the
order of its text, as if they were committed; only the pieces before them are read for all rows.

Dimension key: L lanes, K keys of a piece, C head size, rounded up to WIDTH.
"""

from typing import NamedTuple

import numpy as np

from outdraft.attention.cpu_memory import (
    copy_row,
    floats_at,
    from_bf16,
    halves_at,
    ints_at,
    longs_at,
    round_up,
    to_bf16,
)
from outdraft.attention.cpu_simd import (
    KEYS,
    LANES,
    WIDTH,
    accumulate_1,
    accumulate_4,
    dots,
    weigh,
)
from outdraft.core.jit import njit

PART = 2048  # keys of one part: cache indices from one of its multiples to the next
_PIECE = 64  # keys of one piece
_MAX_LANES = 64  # lanes of one tile
_HIDDEN = -1e30  # start value of a score that is not to be seen; finite, so that x - x is 0


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
    is_tree: bool  # between the drafted tokens that a row sees, there are others


class _Sums(NamedTuple):
    """What the lanes of a tile have summed over some keys: addresses of float32 numbers."""

    out: int  # [L, C]; the values by their weights
    top: int  # [L]; the highest score
    total: int  # [L]; the weights, relative to it


class _Scratch(NamedTuple):
    """Working memory of one thread, addresses of float32 numbers unless it says otherwise."""

    sums: _Sums  # over the parts so far
    next_sums: _Sums  # over one more
    q: int  # [L, C]
    k: int  # [K, C]; of keys that cannot be read where they lie
    v: int
    scores: int  # [L, K]
    shrink: int  # [L]; what a rising top does to all that was summed before
    k_rows: int  # int64 [K] addresses
    v_rows: int
    zeros: int  # [C]


@njit
def rows_per_tile(batch):
    """The last tile of a request may have fewer."""
    return max(1, _MAX_LANES // (batch.num_heads // batch.num_kv_heads))


@njit
def count_parts(tile):
    """How many parts of the context it sees; at least one, so that every tile is stored."""
    return max(1, (tile.end_key + PART - 1) // PART - tile.first_key // PART)


@njit
def count_lanes(batch, tile):
    """With those that fill the last LANES."""
    heads_per_kv = batch.num_heads // batch.num_kv_heads
    return round_up((tile.end_row - tile.first_row) * heads_per_kv, LANES)


@njit
def sums_bytes(lanes, size):
    """Whole cache lines, if `size` is a multiple of WIDTH."""
    return 4 * (lanes * size + 2 * round_up(lanes, 16))


@njit
def sums_at(address, lanes, size):
    """In sums_bytes(lanes, size) bytes."""
    top = address + 4 * lanes * size
    return _Sums(address, top, top + 4 * round_up(lanes, 16))


@njit
def _scratch_sizes(batch):
    """Lanes, and the numbers of one with its padding."""
    lanes = round_up(rows_per_tile(batch) * (batch.num_heads // batch.num_kv_heads), 16)
    return lanes, round_up(batch.head_size, WIDTH)


@njit
def scratch_bytes(batch):
    """Enough for any tile of the batch."""
    lanes, size = _scratch_sizes(batch)
    floats = lanes * size + 2 * _PIECE * size + lanes * _PIECE + lanes + size
    return 2 * sums_bytes(lanes, size) + 4 * floats + 16 * _PIECE + 64


@njit
def lay_out(memory, batch):
    """From the start of a cache line on: no vector lies across two.

    Zeroed are `zeros`, and keys and values if they have padding.
    """
    lanes, size = _scratch_sizes(batch)
    sums = memory + -memory % 64
    next_sums = sums + sums_bytes(lanes, size)
    zeros = next_sums + sums_bytes(lanes, size)
    k = zeros + 4 * size
    v = k + 4 * _PIECE * size
    q = v + 4 * _PIECE * size
    scores = q + 4 * lanes * size
    shrink = scores + 4 * lanes * _PIECE
    k_rows = shrink + 4 * lanes
    num_zeros = size if size == batch.head_size else size + 2 * _PIECE * size
    floats_at(zeros, 0, num_zeros)[:] = 0
    return _Scratch(
        sums_at(sums, lanes, size),
        sums_at(next_sums, lanes, size),
        q,
        k,
        v,
        scores,
        shrink,
        k_rows,
        k_rows + 8 * _PIECE,
        zeros,
    )


@njit
def make_tile(batch, request, first_row, end_row):
    """What these rows of a request see."""
    start = np.int64(ints_at(batch.query_start, request, 1)[0])
    context_len = np.int64(ints_at(batch.context_lens, request, 1)[0])
    num_causal = np.int64(ints_at(batch.num_causal, request, 1)[0])
    positions = longs_at(batch.positions, start, end_row)
    ancestors = longs_at(batch.ancestors, start, end_row)
    lowest, highest, bits = positions[first_row], positions[first_row], np.int64(0)
    is_tree = False
    for row in range(first_row, end_row):
        lowest, highest = min(lowest, positions[row]), max(highest, positions[row])
        if row >= num_causal:
            bits |= ancestors[row]
            is_tree |= ancestors[row] & (ancestors[row] + 1) != 0
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
        is_tree,
    )


@njit
def attend_parts(batch, tile, kv_head, first_part, end_part, sums, scratch):
    """`sums` over parts [first_part, end_part) of what the tile sees."""
    _load_queries(batch, tile, kv_head, scratch.q)
    for part in range(first_part, end_part):
        part_sums = sums if part == first_part else scratch.next_sums
        _attend_part(batch, tile, kv_head, part, part_sums, scratch)
        if part != first_part:
            fold(batch, tile, sums, part_sums)


@njit
def _attend_part(batch, tile, kv_head, part, sums, scratch):
    lanes, size = count_lanes(batch, tile), round_up(batch.head_size, WIDTH)
    floats_at(sums.out, 0, lanes * size)[:] = 0
    floats_at(sums.top, 0, lanes)[:] = np.float32(_HIDDEN)
    floats_at(sums.total, 0, lanes)[:] = 0
    start = (tile.first_key // PART + part) * PART
    end = min(start + PART, tile.end_key)
    # A window begins inside of a piece: where pieces begin must not depend on the rows of the tile.
    start = max(start, tile.first_key // _PIECE * _PIECE)
    first_own = end
    if tile.is_tree:
        first_own = min(end, (tile.context_len + tile.num_causal) // _PIECE * _PIECE)
    for first_key in range(start, first_own, _PIECE):
        end_key = min(first_key + _PIECE, first_own)
        offset = _find_rows(batch, tile, kv_head, first_key, end_key, size, scratch)
        _score(end_key - first_key, size, 0, lanes, offset, scratch)
        if first_key < tile.first_common or tile.end_common < end_key:
            _hide(batch, tile, first_key, end_key, offset, scratch)
        _sum_values(end_key - first_key, size, 0, lanes, offset, sums, scratch)
    if tile.is_tree:
        for row in range(tile.first_row, tile.end_row):
            _attend_row(batch, tile, row, kv_head, max(start, first_own), end, sums, scratch)


@njit
def _attend_row(batch, tile, row, kv_head, start, end, sums, scratch):
    """`sums` over one row's keys [start, end): their indices are positions in the row's text."""
    heads_per_kv = batch.num_heads // batch.num_kv_heads
    size = round_up(batch.head_size, WIDTH)
    position = longs_at(batch.positions, tile.start + row, 1)[0]
    lowest = position - batch.window + 1
    lane = (row - tile.first_row) * heads_per_kv
    scores_LK = floats_at(scratch.scores, lane * _PIECE, heads_per_kv * _PIECE)
    for first_key in range(start, min(end, position + 1), _PIECE):
        num_keys = min(first_key + _PIECE, position + 1) - first_key
        offset = _find_text(batch, tile, row, kv_head, first_key, num_keys, size, scratch)
        _score(num_keys, size, lane, lane + heads_per_kv, offset, scratch)
        for key in range(min(num_keys, lowest - first_key)):
            for head in range(heads_per_kv):
                scores_LK[head * _PIECE + key] = np.float32(_HIDDEN)
        _sum_values(num_keys, size, lane, lane + heads_per_kv, offset, sums, scratch)


@njit
def _load_queries(batch, tile, kv_head, q):
    """Scaled queries of the tile, and zeros for the lanes that fill the last LANES."""
    heads_per_kv = batch.num_heads // batch.num_kv_heads
    lanes, size = count_lanes(batch, tile), round_up(batch.head_size, WIDTH)
    scale = np.float32(batch.scale * 1.4426950408889634)  # log2(e)
    lane = 0
    for row in range(tile.first_row, tile.end_row):
        for head in range(kv_head * heads_per_kv, (kv_head + 1) * heads_per_kv):
            offset = (tile.start + row) * batch.q_stride + head * batch.head_size
            q_C = floats_at(q, lane * size, size)
            if batch.is_bf16_query:
                halves = halves_at(batch.q, offset, batch.head_size)
                for c in range(batch.head_size):
                    q_C[c] = from_bf16(halves[c]) * scale
            else:
                floats = floats_at(batch.q, offset, batch.head_size)
                for c in range(batch.head_size):
                    q_C[c] = floats[c] * scale
            q_C[batch.head_size :] = 0
            lane += 1
    floats_at(q, lane * size, (lanes - lane) * size)[:] = 0


@njit
def _find_rows(batch, tile, kv_head, first_key, end_key, size, scratch):
    """Addresses of the keys and values of a piece, and how far behind them this head's are."""
    table = ints_at(batch.block_table, tile.request * batch.table_stride, batch.table_stride)
    step = batch.num_kv_heads * batch.head_size
    key = first_key
    while key < end_key:
        block = key // batch.block_size
        end_of_run = min(end_key, (block + 1) * batch.block_size)
        source = (np.int64(table[block]) * batch.block_size + key - block * batch.block_size) * step
        for place in range(key - first_key, end_of_run - first_key):
            _put_row(batch, kv_head, place, source, size, scratch)
            source += step
        key = end_of_run
    return _fill_rows(batch, kv_head, end_key - first_key, size, scratch)


@njit
def _find_text(batch, tile, row, kv_head, first_key, num_keys, size, scratch):
    """As `_find_rows`, for keys by their positions in the text of one row."""
    table = ints_at(batch.block_table, tile.request * batch.table_stride, batch.table_stride)
    bits = longs_at(batch.ancestors, tile.start + row, 1)[0]
    first_draft = tile.context_len + tile.num_causal
    for _ in range(first_draft, first_key):
        bits &= bits - 1
    for place in range(num_keys):
        key = first_key + place
        if key >= first_draft:
            key = first_draft + _bit_length(bits & -bits) - 1
            bits &= bits - 1
        block = key // batch.block_size
        slot = np.int64(table[block]) * batch.block_size + key - block * batch.block_size
        source = slot * batch.num_kv_heads * batch.head_size
        _put_row(batch, kv_head, place, source, size, scratch)
    return _fill_rows(batch, kv_head, num_keys, size, scratch)


@njit
def _put_row(batch, kv_head, place, source, size, scratch):
    """The addresses of a key and its value; `source`: numbers before those of its first head."""
    k_rows, v_rows = longs_at(scratch.k_rows, 0, _PIECE), longs_at(scratch.v_rows, 0, _PIECE)
    if _is_in_place(batch, size):
        k_rows[place] = batch.k + 4 * source
        v_rows[place] = batch.v + 4 * source
    else:
        row, at = 4 * place * size, source + kv_head * batch.head_size
        copy_row(scratch.k + row, batch.k, at, batch.head_size, batch.is_bf16_cache)
        copy_row(scratch.v + row, batch.v, at, batch.head_size, batch.is_bf16_cache)
        k_rows[place] = scratch.k + row
        v_rows[place] = scratch.v + row


@njit
def _fill_rows(batch, kv_head, num_keys, size, scratch):
    """Fill the last KEYS; how far behind the addresses this head's numbers are."""
    k_rows = longs_at(scratch.k_rows, 0, _PIECE)
    k_rows[num_keys : round_up(num_keys, KEYS)] = k_rows[num_keys - 1]
    return 4 * kv_head * batch.head_size if _is_in_place(batch, size) else 0


@njit
def _is_in_place(batch, size):
    """Can keys and values be read where they lie?"""
    return size == batch.head_size and not batch.is_bf16_cache


@njit
def _score(num_keys, size, first_lane, end_lane, offset, scratch):
    """scores = q . k; the lowest score for what fills the last vector."""
    first_lane, end_lane = first_lane // LANES * LANES, round_up(end_lane, LANES)
    for key in range(0, num_keys, KEYS):
        for lane in range(first_lane, end_lane, LANES):
            dots(
                scratch.q + 4 * lane * size,
                size,
                scratch.k_rows + 8 * key,
                offset,
                size // WIDTH,
                scratch.scores + 4 * (lane * _PIECE + key),
                _PIECE,
            )
    num_filled = round_up(num_keys, WIDTH) - num_keys
    if num_filled:
        for lane in range(first_lane, end_lane):
            floats_at(scratch.scores, lane * _PIECE + num_keys, num_filled)[:] = np.float32(_HIDDEN)


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
    ancestors = longs_at(batch.ancestors, tile.start, tile.end_row)
    positions = longs_at(batch.positions, tile.start, tile.end_row)
    first_draft = tile.context_len + tile.num_causal
    for row in range(tile.first_row, tile.end_row):
        last_seen = tile.context_len + min(row, tile.num_causal - 1)
        bits = _nearest(ancestors[row], batch.window) if row >= tile.num_causal else 0
        lowest = positions[row] - batch.window + 1
        lane = (row - tile.first_row) * heads_per_kv
        scores_LK = floats_at(scratch.scores, lane * _PIECE, heads_per_kv * _PIECE)
        for key in range(first_key, end_key):
            if key < first_draft:
                is_seen = lowest <= key <= last_seen
            else:
                is_seen = (bits >> (key - first_draft)) & 1 == 1
            if not is_seen:
                for head in range(heads_per_kv):
                    scores_LK[head * _PIECE + key - first_key] = np.float32(_HIDDEN)
    v_rows = longs_at(scratch.v_rows, 0, _PIECE)
    for key in range(max(first_key, first_draft), end_key):
        if (tile.bits >> (key - first_draft)) & 1 == 0:  # nobody may have written it
            v_rows[key - first_key] = scratch.zeros - offset


@njit
def _sum_values(num_keys, size, first_lane, end_lane, offset, sums, scratch):
    """Turn scores into weights relative to the new top, and take in the values they weigh.

    Lanes beside these that share a vector with them keep what they have.
    """
    num_vectors = (num_keys + WIDTH - 1) // WIDTH
    first_vector, end_vector = first_lane // LANES * LANES, round_up(end_lane, LANES)
    for lane in range(first_vector, end_vector):
        if lane < first_lane or lane >= end_lane:
            floats_at(scratch.scores, lane * _PIECE, num_keys)[:] = 0
            floats_at(scratch.shrink, lane, 1)[0] = 1
            continue
        at = 4 * lane
        weigh(
            scratch.scores + at * _PIECE,
            num_vectors,
            sums.top + at,
            sums.total + at,
            scratch.shrink + at,
        )
    for lane in range(first_vector, end_vector, LANES):
        weights, shrink = scratch.scores + 4 * lane * _PIECE, scratch.shrink + 4 * lane
        c = 0
        while c < size:
            out, values = sums.out + 4 * (lane * size + c), offset + 4 * c
            if c + 4 * WIDTH <= size:
                accumulate_4(out, size, weights, _PIECE, shrink, scratch.v_rows, values, num_keys)
                c += 4 * WIDTH
            else:
                accumulate_1(out, size, weights, _PIECE, shrink, scratch.v_rows, values, num_keys)
                c += WIDTH


@njit
def store(batch, tile, kv_head, sums):
    """The results of the lanes, from their sums over all parts."""
    heads_per_kv = batch.num_heads // batch.num_kv_heads
    size = round_up(batch.head_size, WIDTH)
    lane = 0
    for row in range(tile.first_row, tile.end_row):
        for head in range(kv_head * heads_per_kv, (kv_head + 1) * heads_per_kv):
            offset = ((tile.start + row) * batch.num_heads + head) * batch.head_size
            total = floats_at(sums.total, lane, 1)[0]
            inverse = np.float32(1) / total if total != 0 else np.float32(0)  # 0: it sees nothing
            out_C = floats_at(sums.out, lane * size, size)
            if batch.is_bf16_query:
                halves = halves_at(batch.out, offset, batch.head_size)
                for c in range(batch.head_size):
                    halves[c] = to_bf16(out_C[c] * inverse)
            else:
                floats = floats_at(batch.out, offset, batch.head_size)
                for c in range(batch.head_size):
                    floats[c] = out_C[c] * inverse
            lane += 1


@njit
def fold(batch, tile, sums, next_sums):
    """Add what the lanes have summed over a later part."""
    lanes, size = count_lanes(batch, tile), round_up(batch.head_size, WIDTH)
    top_L, next_top_L = floats_at(sums.top, 0, lanes), floats_at(next_sums.top, 0, lanes)
    total_L, next_total_L = floats_at(sums.total, 0, lanes), floats_at(next_sums.total, 0, lanes)
    for lane in range(lanes):
        highest = max(top_L[lane], next_top_L[lane])
        shrink, next_shrink = np.exp2(top_L[lane] - highest), np.exp2(next_top_L[lane] - highest)
        top_L[lane] = highest
        total_L[lane] = total_L[lane] * shrink + next_total_L[lane] * next_shrink
        out_C = floats_at(sums.out, lane * size, size)
        next_out_C = floats_at(next_sums.out, lane * size, size)
        for c in range(size):
            out_C[c] = out_C[c] * shrink + next_out_C[c] * next_shrink
