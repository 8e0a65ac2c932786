# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201, ANN202
# Triton infers the types of these functions and specialises on them.
"""The kernels of the triton backend.

A tile is some rows of one request and the query heads that one kv head serves: every (row, query
head) pair is a lane. A program of `attend_tiles` takes one tile, one kv head and one split of the
context through an online softmax in base 2 (log2(e) is part of the scale); `merge_splits` joins
the splits of a lane. Pieces of keys and splits begin at multiples of their size, and what a lane
does not see adds exact zeros to its sums: nothing but its own request decides its result. A sink
joins the sums of a lane when they are complete.

Names that are not tensors of attention/base.py are numbers or pointers to them.

Dimension key: M lanes of a tile, N keys of a piece, C size of a key and E of a value, both rounded
up, G kv heads, S splits.
"""

import triton
import triton.language as tl

MERGED_SPLITS = tl.constexpr(16)  # that are joined at a time
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _copy_row(source, target, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    place = tl.arange(0, WIDTH)
    numbers = tl.load(source + place, mask=place < SIZE)
    tl.store(target + place, numbers.to(target.dtype.element_ty), mask=place < SIZE)


# Where numbers of rows begin in the tensor that brought them says nothing: one kernel serves all.
@triton.jit(do_not_specialize_on_alignment=["slots"])
def write_rows(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    k_stride,
    v_stride,
    KEY_ROW: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """cache[slots[t]] = new[t] for slots that are not negative. Grid: [T]."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    _copy_row(k + row * k_stride, k_cache + slot * KEY_ROW, KEY_ROW, KEY_WIDTH)
    _copy_row(v + row * v_stride, v_cache + slot * VALUE_ROW, VALUE_ROW, VALUE_WIDTH)


@triton.jit
def _find_tile(tile, query_start, num_requests, TILE_ROWS: tl.constexpr):
    """(request, first row) of a tile; past the request's rows if there is no such tile.

    Request b has the tiles from query_start[b] // TILE_ROWS + b on: room for all of them whatever
    the rows before it are, so that neither the host nor another kernel has to count.
    """
    low: tl.int32 = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // TILE_ROWS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    request = low - 1
    first_tile = tl.load(query_start + request) // TILE_ROWS + request
    return request, (tile - first_tile) * TILE_ROWS


@triton.jit
def _bit_length(bits):
    place = tl.arange(0, 64)
    return tl.sum(((bits >> place) > 0).to(tl.int32), axis=0)


@triton.jit
def _nearest(bits_M, count_M):
    """The `count` highest bits of each mask: the rank of an ancestor is its distance."""
    kept_M = tl.zeros_like(bits_M)
    seen_M = tl.zeros_like(bits_M)
    for back in range(63):
        bit_M = (bits_M >> (62 - back)) & 1
        kept_M = tl.where(seen_M < count_M, kept_M | (bit_M << (62 - back)), kept_M)
        seen_M += bit_M
    return kept_M


@triton.jit
def _lowest(position, window, chunk, HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr):
    """The lowest position that the one at `position` sees; a window may begin before the text."""
    lowest = position - window + 1
    if HAS_CHUNK:
        first = position // chunk * chunk
        lowest = tl.maximum(lowest, first) if HAS_WINDOW else first
    return lowest


@triton.jit
def _tanh(x):
    """Within 3e-7 of relative error (Cephes' tanhf)."""
    square = x * x
    series = -5.70498872745e-3 * square + 2.06390887954e-2
    series = series * square - 5.37397155531e-2
    series = series * square + 1.33314422036e-1
    series = series * square - 3.33332819422e-1
    size = tl.abs(x)
    # Behind 15 it is 1 to the last bit.
    far = 1.0 - 2.0 / (tl.exp2(tl.minimum(size, 15.0) * (2.0 * LOG2_E)) + 1.0)
    return tl.where(size < 0.625, series * square * x + x, tl.where(x < 0.0, -far, far))


@triton.jit
def _load_rows(source, row_N, is_row_N, SIZE: tl.constexpr, TILE: tl.constexpr):
    """[N, C], zeros where there is no row."""
    size_C = tl.arange(0, TILE)
    is_number_NC = is_row_N[:, None] & (size_C < SIZE)[None, :]
    return tl.load(source + row_N[:, None] + size_C[None, :], mask=is_number_NC, other=0.0)


@triton.jit
def _take_in_keys(
    begin,
    end,
    q_MC,
    state,  # sums, highest scores, and sums of weights
    cache,  # keys, values, and the request's blocks
    scale,
    soft_cap,
    seen,  # first draft, last and lowest key of the text, bits of drafts
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """The softmax's state after keys [begin, end); lanes see all of them unless IS_MASKED."""
    acc_ME, top_M, sum_M = state
    k, v, table = cache
    first_draft, last_M, lowest_M, bits_M = seen
    for first_key in range(begin, end, TILE_KEYS):
        key_N = first_key + tl.arange(0, TILE_KEYS)
        is_read_N = key_N < end
        block_N = tl.load(table + key_N // BLOCK_SIZE, mask=is_read_N, other=0).to(tl.int64)
        row_N = (block_N * BLOCK_SIZE + key_N % BLOCK_SIZE) * NUM_KV_HEADS
        k_NC = _load_rows(k, row_N * KEY_SIZE, is_read_N, KEY_SIZE, KEY_TILE).to(q_MC.dtype)
        scores_MN = tl.dot(q_MC, tl.trans(k_NC), input_precision="ieee") * scale
        if HAS_CAP:
            scores_MN = _tanh(scores_MN) * soft_cap
        if IS_MASKED:
            draft_N = key_N - first_draft
            is_text_MN = (key_N[None, :] <= last_M[:, None]) & (key_N[None, :] >= lowest_M[:, None])
            place_N = tl.minimum(tl.maximum(draft_N, 0), 63).to(tl.int64)
            is_bit_MN = ((bits_M[:, None] >> place_N[None, :]) & 1) != 0
            is_seen_MN = is_text_MN | (is_bit_MN & (draft_N >= 0)[None, :])
            is_seen_MN = is_seen_MN & is_read_N[None, :]
            scores_MN = tl.where(is_seen_MN, scores_MN, float("-inf"))
            # A weight of zero does not silence a NaN that an earlier text left in a reused block.
            is_read_N = tl.max(is_seen_MN.to(tl.int32), axis=0) > 0
        new_top_M = tl.maximum(top_M, tl.max(scores_MN, axis=1))
        base_M = tl.where(new_top_M == float("-inf"), 0.0, new_top_M)  # nothing seen so far
        weights_MN = tl.exp2(scores_MN - base_M[:, None])
        shrink_M = tl.exp2(top_M - base_M)
        sum_M = sum_M * shrink_M + tl.sum(weights_MN, axis=1)
        v_NE = _load_rows(v, row_N * VALUE_SIZE, is_read_N, VALUE_SIZE, VALUE_TILE).to(q_MC.dtype)
        acc_ME = tl.dot(
            weights_MN.to(v_NE.dtype), v_NE, acc_ME * shrink_M[:, None], input_precision="ieee"
        )
        top_M = new_top_M
    return acc_ME, top_M, sum_M


@triton.jit(
    do_not_specialize=["first_tile", "num_requests", "table_stride", "window", "chunk"],
    do_not_specialize_on_alignment=["ancestors", "positions"],
)
def attend_tiles(
    out,
    part_acc,  # float32 [tile, G, S, M, VALUE_SIZE]; the sums of a split that is not all
    part_top,  # float32 [tile, G, S, M]; its highest score
    part_sum,  # and the sum of its weights
    q,
    k,
    v,
    query_start,
    context_lens,
    num_causal_B,
    ancestors,
    positions,
    block_table,
    sinks,  # float32 [H]; None if HAS_SINKS is not
    q_stride,
    scale,  # in base 2, or to parts of the cap
    soft_cap,  # in base 2
    first_tile,
    num_requests,
    table_stride,
    window,
    chunk,
    MIN_ROWS: tl.constexpr,  # of the requests that this launch is for
    MAX_ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_LANES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    CUTS_DRAFTS: tl.constexpr,  # what a row sees may begin inside of the draft
    IS_SPLIT: tl.constexpr,
    IS_WIDE: tl.constexpr,  # queries and keys differ in dtype and meet in float32
):
    """Grid: [tiles, G, splits]. Requests that this launch is not for stay as they are."""
    TILE_ROWS: tl.constexpr = TILE_LANES // HEADS_PER_KV
    kv_head, split = tl.program_id(1), tl.program_id(2)
    tile = first_tile + tl.program_id(0)
    request, first_row = _find_tile(tile, query_start, num_requests, TILE_ROWS)
    start = tl.load(query_start + request)
    num_rows = tl.load(query_start + request + 1) - start
    if (first_row >= num_rows) | (num_rows < MIN_ROWS) | (num_rows > MAX_ROWS):
        return
    context_len = tl.load(context_lens + request)
    num_causal = tl.load(num_causal_B + request)
    first_draft = context_len + num_causal
    lane_M = tl.arange(0, TILE_LANES)
    row_M = first_row + lane_M // HEADS_PER_KV
    is_lane_M = (lane_M < TILE_ROWS * HEADS_PER_KV) & (row_M < num_rows)
    is_draft_M = is_lane_M & (row_M >= num_causal)
    bits_M = tl.load(ancestors + start + row_M, mask=is_draft_M, other=0)
    last_M = context_len + tl.minimum(row_M, num_causal - 1)
    lowest_M = tl.zeros_like(row_M)
    first_key = 0
    first_common = 0
    if HAS_WINDOW | HAS_CHUNK:
        position_M = tl.load(positions + start + row_M, mask=is_lane_M, other=0).to(tl.int32)
        first_M = _lowest(position_M, window, chunk, HAS_WINDOW, HAS_CHUNK)
        count_M = position_M - first_M + 1
        lowest_M = tl.maximum(first_M, 0)
        first_key = tl.min(tl.where(is_lane_M, lowest_M, first_draft), axis=0)
        first_key = tl.minimum(first_key, first_draft) // TILE_KEYS * TILE_KEYS
        first_common = tl.max(tl.where(is_lane_M, lowest_M, 0), axis=0)
    end_row = tl.minimum(first_row + TILE_ROWS, num_rows)
    end_key = context_len + tl.minimum(end_row, num_causal) + _bit_length(tl.max(bits_M, axis=0))
    end_common = context_len + tl.minimum(first_row + 1, num_causal)
    begin = tl.maximum(split * SPLIT_KEYS, first_key)
    end = tl.minimum((split + 1) * SPLIT_KEYS, end_key)
    if IS_SPLIT & (begin >= end):
        return
    if CUTS_DRAFTS:
        bits_M = _nearest(bits_M, count_M)

    head_M = kv_head * HEADS_PER_KV + lane_M % HEADS_PER_KV
    flat_row_M = (start + row_M).to(tl.int64)
    q_MC = _load_rows(q, flat_row_M * q_stride + head_M * KEY_SIZE, is_lane_M, KEY_SIZE, KEY_TILE)
    q_MC = q_MC.to(tl.float32) if IS_WIDE else q_MC
    acc_ME = tl.zeros((TILE_LANES, VALUE_TILE), tl.float32)
    top_M = tl.full((TILE_LANES,), float("-inf"), tl.float32)
    sum_M = tl.zeros((TILE_LANES,), tl.float32)
    table = block_table + request.to(tl.int64) * table_stride
    k += kv_head * KEY_SIZE
    v += kv_head * VALUE_SIZE
    # Keys that some lane does not see, keys that all see, and again some that not all see.
    low = tl.minimum(tl.cdiv(first_common, TILE_KEYS) * TILE_KEYS, end)
    low = tl.maximum(low, begin)
    high = tl.maximum(tl.minimum(end_common, end) // TILE_KEYS * TILE_KEYS, low)
    for part in tl.static_range(0 if HAS_WINDOW | HAS_CHUNK else 1, 3):
        acc_ME, top_M, sum_M = _take_in_keys(
            begin if part == 0 else (low if part == 1 else high),
            low if part == 0 else (high if part == 1 else end),
            q_MC,
            (acc_ME, top_M, sum_M),
            (k, v, table),
            scale,
            soft_cap,
            (first_draft, last_M, lowest_M, bits_M),
            NUM_KV_HEADS,
            BLOCK_SIZE,
            KEY_SIZE,
            KEY_TILE,
            VALUE_SIZE,
            VALUE_TILE,
            TILE_KEYS,
            HAS_CAP,
            part != 1,
        )

    size_E = tl.arange(0, VALUE_TILE)
    is_number_ME = is_lane_M[:, None] & (size_E < VALUE_SIZE)[None, :]
    if IS_SPLIT:
        place = (tl.program_id(0) * NUM_KV_HEADS + kv_head) * tl.num_programs(2) + split
        part_M = place.to(tl.int64) * TILE_LANES + lane_M
        tl.store(part_top + part_M, top_M, mask=is_lane_M)
        tl.store(part_sum + part_M, sum_M, mask=is_lane_M)
        target_ME = part_acc + part_M[:, None] * VALUE_SIZE + size_E[None, :]
        tl.store(target_ME, acc_ME, mask=is_number_ME)
    else:
        if HAS_SINKS:
            sink_M = tl.load(sinks + head_M, mask=is_lane_M, other=0.0) * LOG2_E
            highest_M = tl.maximum(top_M, sink_M)
            shrink_M = tl.exp2(top_M - highest_M)
            acc_ME = acc_ME * shrink_M[:, None]
            sum_M = sum_M * shrink_M + tl.exp2(sink_M - highest_M)
        sum_M = tl.where(sum_M == 0.0, 1.0, sum_M)  # it sees nothing
        out_ME = (acc_ME / sum_M[:, None]).to(out.dtype.element_ty)
        target_M = (flat_row_M * NUM_KV_HEADS * HEADS_PER_KV + head_M) * VALUE_SIZE
        tl.store(out + target_M[:, None] + size_E[None, :], out_ME, mask=is_number_ME)


@triton.jit(
    do_not_specialize=["first_tile", "num_requests", "num_splits", "window", "chunk"],
    do_not_specialize_on_alignment=["ancestors", "positions"],
)
def merge_splits(
    out,
    part_acc,
    part_top,
    part_sum,
    query_start,
    context_lens,
    num_causal_B,
    ancestors,
    positions,
    sinks,
    first_tile,
    num_requests,
    num_splits,
    window,
    chunk,
    MIN_ROWS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    TILE_LANES: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge the splits of `attend_tiles`. Grid: [tiles, G, TILE_ROWS * HEADS_PER_KV].

    A lane joins the splits that hold keys it sees: its tile has written those at least.
    """
    TILE_ROWS: tl.constexpr = TILE_LANES // HEADS_PER_KV
    kv_head, lane = tl.program_id(1), tl.program_id(2)
    tile = first_tile + tl.program_id(0)
    request, first_row = _find_tile(tile, query_start, num_requests, TILE_ROWS)
    start = tl.load(query_start + request)
    num_rows = tl.load(query_start + request + 1) - start
    row = first_row + lane // HEADS_PER_KV
    if (row >= num_rows) | (num_rows < MIN_ROWS) | (num_rows > MAX_ROWS):
        return
    context_len = tl.load(context_lens + request)
    num_causal = tl.load(num_causal_B + request)
    bits = tl.load(ancestors + start + row, mask=row >= num_causal, other=0)
    end_key = context_len + tl.minimum(row + 1, num_causal) + _bit_length(bits)
    first_split = 0
    if HAS_WINDOW | HAS_CHUNK:
        position = tl.load(positions + start + row).to(tl.int32)
        lowest = _lowest(position, window, chunk, HAS_WINDOW, HAS_CHUNK)
        lowest = tl.minimum(tl.maximum(lowest, 0), context_len + num_causal)
        first_split = lowest // SPLIT_KEYS
    end_split = tl.cdiv(end_key, SPLIT_KEYS)
    size_E = tl.arange(0, VALUE_TILE)
    acc_E = tl.zeros((VALUE_TILE,), tl.float32)
    top = float("-inf")
    total = 0.0
    place = ((tl.program_id(0) * NUM_KV_HEADS + kv_head) * num_splits).to(tl.int64)
    for first in range(first_split // MERGED_SPLITS * MERGED_SPLITS, end_split, MERGED_SPLITS):
        split_S = first + tl.arange(0, MERGED_SPLITS)
        is_split_S = (split_S >= first_split) & (split_S < end_split)
        part_S = (place + split_S) * TILE_LANES + lane
        top_S = tl.load(part_top + part_S, mask=is_split_S, other=float("-inf"))
        sum_S = tl.load(part_sum + part_S, mask=is_split_S, other=0.0)
        acc_SE = _load_rows(part_acc, part_S * VALUE_SIZE, is_split_S, VALUE_SIZE, VALUE_TILE)
        new_top = tl.maximum(top, tl.max(top_S, axis=0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight_S = tl.exp2(top_S - base)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(sum_S * weight_S, axis=0)
        acc_E = acc_E * shrink + tl.sum(acc_SE * weight_S[:, None], axis=0)
        top = new_top
    head = kv_head * HEADS_PER_KV + lane % HEADS_PER_KV
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2_E
        highest = tl.maximum(top, sink)
        shrink = tl.exp2(top - highest)
        acc_E = acc_E * shrink
        total = total * shrink + tl.exp2(sink - highest)
    total = tl.where(total == 0.0, 1.0, total)
    target = ((start + row).to(tl.int64) * NUM_KV_HEADS * HEADS_PER_KV + head) * VALUE_SIZE
    out_E = (acc_E / total).to(out.dtype.element_ty)
    tl.store(out + target + size_E, out_E, mask=size_E < VALUE_SIZE)
