"""Root mean square norm, with the residual addition before it.

Zhang and Sennrich 2019. Statistics are float32 at least, as in the checkpoints' own code.

Dimension key: T rows, D hidden.
"""

import numpy as np
import torch
from torch import Tensor, nn

from outdraft.models.layers import cpu_kernels


class RMSNorm(nn.Module):
    """x / rms(x) * weight; memory is not initialised."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        weight_D = torch.empty(size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight_D, requires_grad=False)
        self.eps = eps
        # A view of the weight's memory: to ask the tensor for it at each call costs a microsecond.
        self.numpy_D = self.weight.numpy() if cpu_kernels.are_usable(dtype, device) else None

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] of x's dtype."""
        if self.numpy_D is None:
            return rms_norm(x_TD, self.weight, self.eps)
        x = x_TD.numpy()
        out = np.empty_like(x)
        cpu_kernels.rms_norm(x, self.numpy_D, self.eps, out)
        return torch.from_numpy(out)

    def add(self, x_TD: Tensor, residual_TD: Tensor) -> Tensor:
        """The norm of x + residual, [T, D]; the sum replaces the residual, in place."""
        if self.numpy_D is None:
            return add_rms_norm(x_TD, residual_TD, self.weight, self.eps)
        x = x_TD.numpy()
        out = np.empty_like(x)
        cpu_kernels.add_rms_norm(x, residual_TD.numpy(), self.numpy_D, self.eps, out)
        return torch.from_numpy(out)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """[..., D] of x's dtype: x / rms(x) * weight over the last dimension."""
    wide_TD = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
    scale_T1 = torch.rsqrt(wide_TD.square().mean(-1, keepdim=True) + eps)
    return weight_D * (wide_TD * scale_T1).to(x_TD.dtype)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The norm of x + residual; the sum replaces the residual, in place."""
    residual_TD.add_(x_TD)
    return rms_norm(residual_TD, weight_D, eps)
