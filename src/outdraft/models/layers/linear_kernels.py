# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# ruff: noqa: ANN001, ANN201, ANN202
# numba infers the types of these functions and specialises on them.
"""The compiled half of linear_bf16.py: products of float32 rows and bfloat16 weights.

Everything arrives as addresses and numbers, because unpacking arrays costs more than a small
product. The inner loops are in linear_simd.py.

Dimension key: R rows of one block, D inputs, E outputs.
"""

from typing import NamedTuple

import numpy as np
from numba import carray, njit

from outdraft.models.layers.linear_simd import (
    MAX_PRODUCT_ROWS,
    TILE,
    pointer,
    product_1,
    product_3,
    product_5,
    product_8,
)

BLOCK_ROWS = 64  # rows that meet a tile while it is in the cache, itself read from memory once
_ROW_GAP = 16  # numbers behind each row of a block: rows must not share the sets of the cache
_PIECE = 64  # pairs of inputs that are summed apart: long sums in float32 lose digits
_BF16_NAN = 0x7FC0


class Job(NamedTuple):
    """One block of rows: addresses, then numbers."""

    weights: int  # tiles of linear_bf16.pack_tiles
    bias: int  # float32 [E], or 0 for none
    x: int  # float32 [R, D], D rounded up to even, rows x_row_bytes apart
    out: int  # [R, E] contiguous
    x_row_bytes: int
    num_rows: int
    num_pairs: int  # of inputs
    num_outputs: int
    is_bf16: bool  # out


@njit
def _floats(address, size):
    return carray(pointer(address), (size,), np.float32)


@njit
def _halves(address, size):
    return carray(pointer(address), (size,), np.uint16)


@njit(nogil=True, cache=True)
def multiply(weights, bias, x, x_step, out, num_rows, num_inputs, num_outputs, is_bf16):
    """out = x W^T + b for any number of rows.

    weights, bias: as in Job. x, out: addresses of [T, D] with rows x_step elements apart, and of
    [T, E] contiguous, both bfloat16 or both float32.
    """
    num_pairs = (num_inputs + 1) // 2
    row_size = 2 * num_pairs + _ROW_GAP
    x_RD = np.empty(min(num_rows, BLOCK_ROWS) * row_size, np.float32)
    tile_RE = np.empty(BLOCK_ROWS * TILE, np.float32)
    item = 2 if is_bf16 else 4
    for first_row in range(0, num_rows, BLOCK_ROWS):
        block_rows = min(BLOCK_ROWS, num_rows - first_row)
        for r in range(block_rows):
            source = x + item * (first_row + r) * x_step
            _load_row(source, num_inputs, is_bf16, x_RD[r * row_size : (r + 1) * row_size])
        job = Job(
            weights,
            bias,
            x_RD.ctypes.data,
            out + item * first_row * num_outputs,
            4 * row_size,
            block_rows,
            num_pairs,
            num_outputs,
            is_bf16,
        )
        for tile in range((num_outputs + TILE - 1) // TILE):
            _compute_tile(job, tile, tile_RE.ctypes.data)
            _store_tile(job, tile, tile_RE.ctypes.data)


@njit
def _load_row(source, num_inputs, is_bf16, row):
    """row = source as float32, then zeros."""
    if is_bf16:
        halves = _halves(source, num_inputs)
        bits = row.view(np.uint32)
        for d in range(num_inputs):
            bits[d] = np.uint32(halves[d]) << np.uint32(16)
    else:
        floats = _floats(source, num_inputs)
        for d in range(num_inputs):
            row[d] = floats[d]
    row[num_inputs:] = 0


@njit
def _compute_tile(job, tile, out):
    """out [R, TILE] = the products of one tile, without the bias."""
    _floats(out, job.num_rows * TILE)[:] = 0
    weights = job.weights + tile * job.num_pairs * 4 * TILE
    for first_row in range(0, job.num_rows, MAX_PRODUCT_ROWS):
        num_rows = job.num_rows - first_row
        x = job.x + first_row * job.x_row_bytes
        out_rows = out + 4 * first_row * TILE
        for pair in range(0, job.num_pairs, _PIECE):
            num_pairs = min(_PIECE, job.num_pairs - pair)
            w = weights + 4 * TILE * pair
            _product(num_rows, w, x + 8 * pair, job.x_row_bytes, num_pairs, out_rows)


@njit
def _product(num_rows, weights, x, x_row_bytes, num_pairs, out):
    """As of the fewest rows that are enough: the others are read and written, and mean nothing."""
    if num_rows > 5:
        product_8(weights, x, x_row_bytes, num_pairs, out)
    elif num_rows > 3:
        product_5(weights, x, x_row_bytes, num_pairs, out)
    elif num_rows > 1:
        product_3(weights, x, x_row_bytes, num_pairs, out)
    else:
        product_1(weights, x, x_row_bytes, num_pairs, out)


@njit
def _store_tile(job, tile, tile_address):
    """The columns of one tile, into their place in out; the last tile may be cut."""
    first = tile * TILE
    size = min(TILE, job.num_outputs - first)
    tile_RE = _floats(tile_address, job.num_rows * TILE)
    if job.bias != 0:
        bias_E = _floats(job.bias + 4 * first, size)
        for r in range(job.num_rows):
            for e in range(size):
                tile_RE[r * TILE + e] += bias_E[e]
    for r in range(job.num_rows):
        row = tile_RE[r * TILE : r * TILE + size]
        start = r * job.num_outputs + first
        if job.is_bf16:
            _round_row(row, _halves(job.out + 2 * start, size))
        else:
            _floats(job.out + 4 * start, size)[:] = row


@njit
def _round_row(row, halves):
    """float32 to bfloat16: to nearest, ties to even, as PyTorch does."""
    bits = row.view(np.uint32)
    for e in range(len(row)):
        odd = (bits[e] >> np.uint32(16)) & np.uint32(1)
        rounded = (bits[e] + np.uint32(0x7FFF) + odd) >> np.uint32(16)
        halves[e] = rounded if row[e] == row[e] else _BF16_NAN
