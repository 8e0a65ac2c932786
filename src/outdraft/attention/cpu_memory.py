# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# ruff: noqa: ANN001, ANN201
# numba infers the types of these functions and specialises on them.
"""Numbers behind addresses, for the CPU kernels."""

import numpy as np
from numba import carray

from outdraft.attention.cpu_simd import COPY_WIDTH, copy_f32, pointer, widen_bf16
from outdraft.core.jit import njit


@njit
def floats_at(address, offset, size):
    return carray(pointer(address + 4 * offset), (size,), np.float32)


@njit
def halves_at(address, offset, size):
    return carray(pointer(address + 2 * offset), (size,), np.int16)


@njit
def ints_at(address, offset, size):
    return carray(pointer(address + 4 * offset), (size,), np.int32)


@njit
def longs_at(address, offset, size):
    return carray(pointer(address + 8 * offset), (size,), np.int64)


@njit
def from_bf16(bits):
    return np.int32(np.int32(bits) << 16).view(np.float32)


@njit
def to_bf16(value):
    """Round to nearest, ties to even, as PyTorch does."""
    bits = np.int64(np.float32(value).view(np.int32))
    rounded = np.int16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    return rounded if value == value else np.int16(0x7FC0)


@njit
def copy_row(target, source, offset, size, is_bf16):
    """target[:size] = source[offset : offset + size] as float32; both are addresses."""
    whole = size // COPY_WIDTH
    if is_bf16:
        widen_bf16(target, source + 2 * offset, whole)
        halves, floats = halves_at(source, offset, size), floats_at(target, 0, size)
        for c in range(whole * COPY_WIDTH, size):
            floats[c] = from_bf16(halves[c])
    else:
        copy_f32(target, source + 4 * offset, whole)
        rest, floats = floats_at(source, offset, size), floats_at(target, 0, size)
        for c in range(whole * COPY_WIDTH, size):
            floats[c] = rest[c]


@njit
def round_up(count, multiple):
    return (count + multiple - 1) // multiple * multiple
