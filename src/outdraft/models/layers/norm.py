"""The weight of a root mean square norm.

Dimension key: T rows, D hidden.
"""

import torch
from torch import Tensor, nn

from outdraft.kernels.torch.pointwise import rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) * weight; memory is not initialised."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        weight_D = torch.empty(size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight_D, requires_grad=False)
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] of x's dtype."""
        return rms_norm(x_TD, self.weight, self.eps)


def norm_weight(norm: RMSNorm | None) -> Tensor | None:
    """The weight, if there is a norm."""
    return None if norm is None else norm.weight.data
