# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# ruff: noqa: ANN001, ANN201, ANN202
# numba infers the types of these functions and specialises on them.
"""The compiled half of the cpu backend: numba functions that read the blocks in place.

Everything arrives as addresses and numbers in one `Batch`, because unpacking a dozen arrays costs
more than a short attention. bfloat16 is read as int16, whose bits are the upper half of a float32.

Threads share the tiles of cpu_tiles.py, each for one kv head; where a request has few of them, also
the parts of its context, as in flash-decoding (Dao, Haziza, Massa, Sizov 2023). The result does not
depend on which thread computes which part, bit for bit.

Dimension key: B requests, T rows, H heads, G kv heads, C head size, P blocks, S slots per block.
"""

from typing import NamedTuple

import numpy as np

from outdraft.attention.cpu_memory import (
    copy_row,
    floats_at,
    halves_at,
    ints_at,
    longs_at,
    round_up,
    to_bf16,
)
from outdraft.attention.cpu_simd import WIDTH
from outdraft.attention.cpu_tiles import (
    attend_parts,
    count_lanes,
    count_parts,
    fold,
    lay_out,
    make_tile,
    rows_per_tile,
    scratch_bytes,
    store,
    sums_at,
    sums_bytes,
)
from outdraft.core.jit import njit

_EVEN_JOBS = 4  # per share; prefill has that many, and its partial sums would be large


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


@njit(nogil=True, cache=True)
def write_rows(new, row_stride, is_bf16_new, cached, is_bf16_cached, slots, num_rows, row_size):
    """cached[slots[t]] = new[t] for slots that are not negative; new, cached, slots: addresses."""
    slots_T = longs_at(slots, 0, num_rows)
    row = np.empty(row_size, np.float32)
    for t in range(num_rows):
        if slots_T[t] < 0:
            continue
        copy_row(row.ctypes.data, new, t * row_stride, row_size, is_bf16_new)
        if is_bf16_cached:
            target_bf16 = halves_at(cached, slots_T[t] * row_size, row_size)
            for i in range(row_size):
                target_bf16[i] = to_bf16(row[i])
        else:
            target_f32 = floats_at(cached, slots_T[t] * row_size, row_size)
            for i in range(row_size):
                target_f32[i] = row[i]


@njit(nogil=True, cache=True)
def attend(batch, share, num_shares, partial):
    """Compute the jobs whose number is share modulo num_shares.

    A job is a tile for one kv head, or one part of it, whose sums `merge` needs in `partial`: the
    address of partial_bytes(batch, num_shares) bytes that all shares have in common.
    """
    starts = ints_at(batch.query_start, 0, batch.num_requests + 1)
    tile_rows = rows_per_tile(batch)
    memory = np.empty(scratch_bytes(batch), np.uint8)
    scratch = lay_out(np.int64(memory.ctypes.data), batch)
    number, is_split = 0, _is_split(batch, num_shares)
    for b in range(batch.num_requests):
        num_rows = starts[b + 1] - starts[b]
        for first_row in range(0, num_rows, tile_rows):
            tile = make_tile(batch, b, first_row, min(first_row + tile_rows, num_rows))
            num_parts = count_parts(tile)
            parts_each = 1 if is_split else num_parts  # of one job
            is_whole = parts_each == num_parts
            for part in range(0, num_parts, parts_each):
                for kv_head in range(batch.num_kv_heads):
                    if number % num_shares == share:
                        kept = _partial_sums(batch, tile, kv_head, part, partial)
                        sums = scratch.sums if is_whole else kept
                        attend_parts(batch, tile, kv_head, part, part + parts_each, sums, scratch)
                        if is_whole:
                            store(batch, tile, kv_head, sums)
                    number += 1
            if not is_whole:
                partial += _tile_partial_bytes(batch, tile)
    return memory[0]  # it has to live until here


@njit(nogil=True, cache=True)
def partial_bytes(batch, num_shares):
    """What the shares have to keep for `merge`: little beside the keys that they read."""
    starts = ints_at(batch.query_start, 0, batch.num_requests + 1)
    tile_rows = rows_per_tile(batch)
    size = 0
    if not _is_split(batch, num_shares):
        return size
    for b in range(batch.num_requests):
        num_rows = starts[b + 1] - starts[b]
        for first_row in range(0, num_rows, tile_rows):
            tile = make_tile(batch, b, first_row, min(first_row + tile_rows, num_rows))
            if count_parts(tile) > 1:
                size += _tile_partial_bytes(batch, tile)
    return size


@njit(nogil=True, cache=True)
def merge(batch, num_shares, partial):
    """Fold and store what all shares of `attend` have left."""
    if not _is_split(batch, num_shares):
        return
    starts = ints_at(batch.query_start, 0, batch.num_requests + 1)
    tile_rows = rows_per_tile(batch)
    for b in range(batch.num_requests):
        num_rows = starts[b + 1] - starts[b]
        for first_row in range(0, num_rows, tile_rows):
            tile = make_tile(batch, b, first_row, min(first_row + tile_rows, num_rows))
            num_parts = count_parts(tile)
            if num_parts == 1:
                continue
            for kv_head in range(batch.num_kv_heads):
                sums = _partial_sums(batch, tile, kv_head, 0, partial)
                for part in range(1, num_parts):
                    next_sums = _partial_sums(batch, tile, kv_head, part, partial)
                    fold(batch, tile, sums, next_sums)
                store(batch, tile, kv_head, sums)
            partial += _tile_partial_bytes(batch, tile)


@njit
def _is_split(batch, num_shares):
    """Are the jobs too few to be even among the shares, unless each part is one?"""
    starts = ints_at(batch.query_start, 0, batch.num_requests + 1)
    tile_rows, num_tiles = rows_per_tile(batch), 0
    for b in range(batch.num_requests):
        num_tiles += (starts[b + 1] - starts[b] + tile_rows - 1) // tile_rows
    return num_shares > 1 and num_tiles * batch.num_kv_heads < _EVEN_JOBS * num_shares


@njit
def _tile_partial_bytes(batch, tile):
    lanes, size = count_lanes(batch, tile), round_up(batch.head_size, WIDTH)
    return count_parts(tile) * batch.num_kv_heads * sums_bytes(lanes, size)


@njit
def _partial_sums(batch, tile, kv_head, part, partial):
    """Where the sums of one part are kept, in what begins at the tile's `partial`."""
    lanes, size = count_lanes(batch, tile), round_up(batch.head_size, WIDTH)
    place = part * batch.num_kv_heads + kv_head
    return sums_at(partial + place * sums_bytes(lanes, size), lanes, size)
