"""The gate of the feed-forward block.

Dimension key: T rows, I intermediate.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outdraft.models.layers import cpu_kernels


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """silu(gate) * up, [T, I]: the first half of the columns is the gate (Shazeer 2020)."""
    gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
    return F.silu(gate_TI) * up_TI


def silu_mul_cpu(gate_up_T2I: Tensor) -> Tensor:
    """`silu_mul` for float32 on a CPU, in one pass."""
    gate_up = gate_up_T2I.numpy()
    out = np.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=np.float32)
    cpu_kernels.silu_mul(gate_up, out)
    return torch.from_numpy(out)
