"""Pointwise work of a decoder layer on a CPU, fused: float32 numpy arrays, results in place.

At one row a layer spends its time on dispatching operators, not on arithmetic. Each kernel here
replaces three to eight operators. Its slow twin is the torch function of the same name in norm.py,
rotary.py and activation.py. Kernels compile at their first call and are kept on disk.

Dimension key: T rows, D hidden, H heads, G kv heads, C head size, I intermediate,
E = (H + 2 G) * C.
"""

import math
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from outdraft.core.jit import njit

FloatArray: TypeAlias = NDArray[np.float32]

# Sums may be reordered, so that they use vector registers; NaN and infinity keep their meaning.
_kernel = njit(cache=True, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
# Without reordering: the range reduction of exp relies on the order of its subtractions.
_exact_kernel = njit(cache=True, fastmath={"contract", "nsz"}, error_model="numpy")
_inlined = njit(inline="always")

_ZERO, _HALF, _ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
_LOG2_E = np.float32(math.log2(math.e))
_LN2_HIGH = np.float32(0.693359375)  # few bits: its small multiples are exact
_LN2_LOW = np.float32(math.log(2) - 0.693359375)
_EXP_MIN, _EXP_MAX = np.float32(-87.0), np.float32(88.0)  # where float32 stays normal


def are_usable(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether tensors of this kind can go through the kernels."""
    return dtype is torch.float32 and device.type == "cpu"


@_kernel
def rms_norm(x_TD: FloatArray, weight_D: FloatArray, eps: float, out_TD: FloatArray) -> None:
    """out = x / rms(x) * weight."""
    for t in range(x_TD.shape[0]):
        _norm_row(x_TD[t], weight_D, eps, out_TD[t])


@_kernel
def add_rms_norm(
    x_TD: FloatArray, residual_TD: FloatArray, weight_D: FloatArray, eps: float, out_TD: FloatArray
) -> None:
    """residual += x, out = residual / rms(residual) * weight."""
    for t in range(x_TD.shape[0]):
        x_D, residual_D = x_TD[t], residual_TD[t]
        for d in range(x_D.shape[0]):
            residual_D[d] += x_D[d]
        _norm_row(residual_D, weight_D, eps, out_TD[t])


@_kernel
def split_rotate(
    qkv_TE: FloatArray,
    cos_sin_TC: FloatArray,
    q_THC: FloatArray,
    k_TGC: FloatArray,
    v_TGC: FloatArray,
) -> None:
    """q, k = their parts of qkv, turned; v = its part."""
    num_heads, num_kv_heads, head_size = q_THC.shape[1], k_TGC.shape[1], q_THC.shape[2]
    for t in range(qkv_TE.shape[0]):
        start = 0
        for h in range(num_heads):
            _turn(qkv_TE[t, start : start + head_size], cos_sin_TC[t], q_THC[t, h])
            start += head_size
        for g in range(num_kv_heads):
            _turn(qkv_TE[t, start : start + head_size], cos_sin_TC[t], k_TGC[t, g])
            start += head_size
        _copy_heads(qkv_TE[t, start:], v_TGC[t])


@_kernel
def split_norm_rotate(
    qkv_TE: FloatArray,
    cos_sin_TC: FloatArray,
    q_norm_C: FloatArray,
    k_norm_C: FloatArray,
    eps: float,
    q_THC: FloatArray,
    k_TGC: FloatArray,
    v_TGC: FloatArray,
) -> None:
    """As split_rotate, with each head of q and k normed before it turns."""
    num_heads, num_kv_heads, head_size = q_THC.shape[1], k_TGC.shape[1], q_THC.shape[2]
    normed_C = np.empty(head_size, dtype=np.float32)
    for t in range(qkv_TE.shape[0]):
        start = 0
        for h in range(num_heads):
            _norm_row(qkv_TE[t, start : start + head_size], q_norm_C, eps, normed_C)
            _turn(normed_C, cos_sin_TC[t], q_THC[t, h])
            start += head_size
        for g in range(num_kv_heads):
            _norm_row(qkv_TE[t, start : start + head_size], k_norm_C, eps, normed_C)
            _turn(normed_C, cos_sin_TC[t], k_TGC[t, g])
            start += head_size
        _copy_heads(qkv_TE[t, start:], v_TGC[t])


@_exact_kernel
def silu_mul(gate_up_T2I: FloatArray, out_TI: FloatArray) -> None:
    """out = gate / (1 + exp(-gate)) * up."""
    num_columns = out_TI.shape[1]
    for t in range(out_TI.shape[0]):
        gate_I, up_I, out_I = gate_up_T2I[t, :num_columns], gate_up_T2I[t, num_columns:], out_TI[t]
        for i in range(num_columns):
            out_I[i] = gate_I[i] / (_ONE + _exp(-gate_I[i])) * up_I[i]


@_inlined
def _norm_row(x_D: FloatArray, weight_D: FloatArray, eps: float, out_D: FloatArray) -> None:
    total = _ZERO
    for d in range(x_D.shape[0]):
        total += x_D[d] * x_D[d]
    scale = _ONE / np.sqrt(total / np.float32(x_D.shape[0]) + np.float32(eps))
    for d in range(x_D.shape[0]):
        out_D[d] = x_D[d] * scale * weight_D[d]


@_inlined
def _turn(x_C: FloatArray, cos_sin_C: FloatArray, out_C: FloatArray) -> None:
    half = x_C.shape[0] // 2
    for i in range(half):
        low, high, cos, sin = x_C[i], x_C[half + i], cos_sin_C[i], cos_sin_C[half + i]
        out_C[i] = low * cos - high * sin
        out_C[half + i] = high * cos + low * sin


@_inlined
def _copy_heads(x_E: FloatArray, out_GC: FloatArray) -> None:
    head_size = out_GC.shape[1]
    for g in range(out_GC.shape[0]):
        for c in range(head_size):
            out_GC[g, c] = x_E[g * head_size + c]


@_inlined
def _exp(x: np.float32) -> np.float32:
    """exp within 2e-7 of relative error, in code that fits vector registers (Cephes' expf).

    exp(x) = 2^n * exp(r) with |r| <= ln(2) / 2; 2^n is made from its bits.
    """
    x = _EXP_MIN if x < _EXP_MIN else x
    x = _EXP_MAX if x > _EXP_MAX else x
    n = np.floor(x * _LOG2_E + _HALF)
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    series = np.float32(1.9875691500e-4)
    series = series * r + np.float32(1.3981999507e-3)
    series = series * r + np.float32(8.3334519073e-3)
    series = series * r + np.float32(4.1665795894e-2)
    series = series * r + np.float32(1.6666665459e-1)
    series = series * r + np.float32(5.0000001201e-1)
    series = series * r * r + r + _ONE
    bits = (np.int32(n) + np.int32(127)) << np.int32(23)
    return series * np.int32(bits).view(np.float32)
