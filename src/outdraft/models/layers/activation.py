"""The gate of the feed-forward block.

Dimension key: T rows, I intermediate.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from outdraft.models.layers import cpu_kernels

_WIDENED_ROWS = 16  # that are float32 at a time: more would take as much memory as the layer


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """silu(gate) * up, [T, I]: the first half of the columns is the gate (Shazeer 2020)."""
    gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
    return F.silu(gate_TI) * up_TI


def silu_mul_cpu(gate_up_T2I: Tensor) -> Tensor:
    """`silu_mul` on a CPU for any dtype, in one pass for float32.

    Each number is computed alike wherever it stands. torch's own exp is not: it computes vectors by
    one method and what is left behind them by another.
    """
    if gate_up_T2I.dtype is torch.float64:
        gate_TI, up_TI = np.split(gate_up_T2I.numpy(), 2, axis=1)
        with np.errstate(over="ignore"):  # infinity is right
            return torch.from_numpy(gate_TI / (1 + np.exp(-gate_TI)) * up_TI)
    if gate_up_T2I.dtype is torch.float32:
        return torch.from_numpy(_silu_mul_float32(gate_up_T2I))
    num_rows, num_columns = gate_up_T2I.shape
    out_TI = gate_up_T2I.new_empty(num_rows, num_columns // 2)
    for first in range(0, num_rows, _WIDENED_ROWS):
        rows = slice(first, first + _WIDENED_ROWS)
        out_TI[rows] = torch.from_numpy(_silu_mul_float32(gate_up_T2I[rows].float()))
    return out_TI


def _silu_mul_float32(gate_up_T2I: Tensor) -> NDArray[np.float32]:
    out_TI = np.empty((gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2), dtype=np.float32)
    cpu_kernels.silu_mul(gate_up_T2I.numpy(), out_TI)
    return out_TI
