"""Addresses of tensors and arrays."""

import ctypes

import numpy as np
import torch
from torch import Tensor


def address_of(tensor: Tensor, dtype: torch.dtype) -> int:
    """The address of the numbers; the caller must keep the tensor alive."""
    assert tensor.dtype is dtype, f"expected {dtype}, got {tensor.dtype}"
    assert tensor.is_cpu
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def array_address(array: np.ndarray) -> int:
    """Where a contiguous array lies; others are refused. A third of the time of `ctypes.data`."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data)) if array.size else 0


class Addresses:
    """Addresses of tensors or of contiguous copies, which it keeps alive until the call is over."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def __call__(self, tensor: Tensor, dtype: torch.dtype) -> int:
        """As `address_of`."""
        self._tensors.append(tensor.contiguous())
        return address_of(self._tensors[-1], dtype)
