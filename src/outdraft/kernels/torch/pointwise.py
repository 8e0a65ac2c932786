"""Computations number by number of decoders and draft heads, in torch, for any floating dtype.

On a CPU each row of a decoder is computed as if it were alone.

Dimension key: T or R rows, D hidden, H heads, C head size, I intermediate, S state, V vocabulary.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """[..., D] of x's dtype: x / rms(x) * weight over the last dimension (Zhang, Sennrich 2019).

    Statistics are float32 at least, as in the checkpoints' own code.
    """
    wide_TD = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
    scale_T1 = torch.rsqrt(wide_TD.square().mean(-1, keepdim=True) + eps)
    return weight_D * (wide_TD * scale_T1).to(x_TD.dtype)


def rotate(x_THC: Tensor, cos_sin_TC: Tensor) -> Tensor:
    """[T, H, C] of x's dtype: each pair (x[i], x[i + C / 2]) rotated by its angle (Su et al. 2021).

    `cos_sin_TC`: cos of all frequencies, then sin, at each row's position.
    """
    cos_T1F, sin_T1F = cos_sin_TC[:, None].chunk(2, dim=-1)
    low_THF, high_THF = x_THC.chunk(2, dim=-1)
    rotated = (low_THF * cos_T1F - high_THF * sin_T1F, high_THF * cos_T1F + low_THF * sin_T1F)
    return torch.cat(rotated, dim=-1).to(x_THC.dtype)


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """silu(gate) * up, [T, I]: the first half of the columns is the gate (Shazeer 2020)."""
    gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
    if gate_up_T2I.device.type != "cpu":
        return F.silu(gate_TI) * up_TI
    return (sigmoid_mul(gate_TI, 1.0) * up_TI).to(gate_TI.dtype)


def sigmoid_mul(x_TI: Tensor, alpha: float) -> Tensor:
    """x * sigmoid(alpha x); on a CPU in float32 or better."""
    if x_TI.device.type != "cpu":
        return x_TI * torch.sigmoid(alpha * x_TI)
    # exp is numpy's: torch computes vectors by one method and the rest by another.
    wide_TI = x_TI.to(torch.promote_types(x_TI.dtype, torch.float32)).numpy()
    with np.errstate(over="ignore"):  # infinity is right
        return torch.from_numpy(wide_TI / (1 + np.exp(-alpha * wide_TI)))


def scale_to_rms(x_RS: Tensor, rms: float, eps: float) -> Tensor:
    """Rows of one root mean square, x / sqrt(mean(x ** 2) + eps) * rms: [R, S], of x's dtype.

    Statistics are float32 at least.
    """
    wide_RS = x_RS.to(torch.promote_types(x_RS.dtype, torch.float32))
    scale_R1 = torch.rsqrt(wide_RS.square().mean(-1, keepdim=True) + eps)
    return (wide_RS * scale_R1 * rms).to(x_RS.dtype)
