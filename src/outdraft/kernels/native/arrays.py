"""Addresses of tensors."""

import torch
from torch import Tensor


class Addresses:
    """Addresses of CPU tensors, which it keeps alive until the call is over."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def __call__(self, tensor: Tensor, dtype: torch.dtype) -> int:
        """The first element of the tensor, or of a contiguous copy.

        Raises:
            TypeError: another dtype.
        """
        if tensor.dtype != dtype:
            raise TypeError(f"expected {dtype}, got {tensor.dtype}")
        contiguous = tensor.contiguous()
        self._tensors.append(contiguous)
        return contiguous.data_ptr()
