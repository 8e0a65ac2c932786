# numba infers the types of these functions and specialises on them.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# ruff: noqa: ANN001, ANN201
"""Compiled arithmetic on one row of float32 numbers: its maximum, its exponentials, its softmax.

What a row gives depends on that row alone, whatever stands beside it in the batch. Nothing here is
fast-math but the order of a sum, which is fixed when it is compiled.

Dimension key: V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from outdraft.core.jit import njit

_F32 = np.float32
_ZERO, _HALF, _ONE = _F32(0.0), _F32(0.5), _F32(1.0)
_LOG2E = _F32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = _F32(0.693359375), _F32(-2.12194440e-4)  # their sum is log(2)
# exp(r) for |r| <= log(2) / 2: the polynomial of Cephes' expf.
_E5, _E4, _E3 = _F32(1.9875691500e-4), _F32(1.3981999507e-3), _F32(8.3334519073e-3)
_E2, _E1, _E0 = _F32(4.1665795894e-2), _F32(1.6666665459e-1), _F32(5.0000001201e-1)
_ROUNDER = _F32(1.5 * 2**23)  # a float32 whose low bits count ones
_LEAST_EXPONENT = _F32(-87.0)  # below it exp is taken for 0: it would not be a normal number
_LEAST_ORDER = np.int32(-(2**31))
_CHUNK = 1024  # numbers whose scratch stays in the nearest cache


def is_compiled_for(logits: Tensor) -> bool:
    """The compiled twins take over: float32 on the CPU."""
    return logits.dtype == torch.float32 and logits.device.type == "cpu"


@njit(cache=True, nogil=True)
def maximum(x_V):
    """The largest number."""
    # As integers whose order is that of the numbers: that loop vectorises, a NaN harms nothing.
    bits_V = x_V.view(np.int32)
    best = _LEAST_ORDER
    for at in range(bits_V.shape[0]):
        best = max(best, np.int32(bits_V[at] ^ ((bits_V[at] >> 31) & 0x7FFFFFFF)))
    result = np.empty(1, dtype=np.int32)
    result[0] = best ^ ((best >> 31) & 0x7FFFFFFF)
    return result.view(np.float32)[0]


@njit(cache=True, nogil=True)
def argmax(x_V):
    """The lowest place of the largest number."""
    best = maximum(x_V)
    for at in range(x_V.shape[0]):
        if x_V[at] == best:
            return at
    return 0


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def total(x_V):
    """The sum, in float64."""
    result = 0.0
    for at in range(x_V.shape[0]):
        result += x_V[at]
    return result


@njit(cache=True, nogil=True)
def exp_below(x_V, best, out_V):
    """out = exp(x - best) to about 1e-7, for x <= best."""
    size = x_V.shape[0]
    scale_C = np.empty(min(_CHUNK, size), dtype=np.float32)
    for start in range(0, size, _CHUNK):
        end = min(start + _CHUNK, size)
        _exp_chunk(x_V[start:end], best, out_V[start:end], scale_C, scale_C.view(np.int32))


@njit(cache=True)
def _exp_chunk(x_C, best, out_C, scale_C, scale_bits_C) -> None:
    """`exp_below` with scratch and its view. Loops vectorise."""
    for at in range(x_C.shape[0]):
        x = x_C[at] - best
        is_zero = x < _LEAST_EXPONENT
        x = _LEAST_EXPONENT if is_zero else x
        rounded = x * _LOG2E + _ROUNDER
        whole = rounded - _ROUNDER
        r = (x - whole * _LN2_HIGH) - whole * _LN2_LOW
        series = ((((_E5 * r + _E4) * r + _E3) * r + _E2) * r + _E1) * r + _E0
        power = (series * r) * r + r + _ONE
        scale_C[at] = rounded
        out_C[at] = _ZERO if is_zero else power
    for at in range(x_C.shape[0]):
        scale_bits_C[at] = (scale_bits_C[at] + 127) << 23
    for at in range(x_C.shape[0]):
        out_C[at] *= scale_C[at]


@njit(cache=True, nogil=True)
def softmax(x_V, out_V):
    """out = softmax(x)."""
    exp_below(x_V, maximum(x_V), out_V)
    divide(out_V, np.float32(total(out_V)))


@njit(cache=True, nogil=True)
def divide(x_V, divisor):
    """x /= divisor."""
    for at in range(x_V.shape[0]):
        x_V[at] = x_V[at] / divisor
