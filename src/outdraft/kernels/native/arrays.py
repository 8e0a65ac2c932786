"""Addresses of tensors and arrays."""

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import c_int64

import numpy as np
import torch
from torch import Tensor

from outdraft.kernels.data.sampling import SamplingBatch


def address_of(tensor: Tensor, dtype: torch.dtype) -> int:
    """The address of the numbers; the caller must keep the tensor alive."""
    assert tensor.dtype is dtype, f"expected {dtype}, got {tensor.dtype}"
    assert tensor.is_cpu
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def addresses(*tensors: Tensor) -> list[int]:
    """The addresses of contiguous tensors of the right dtypes; the caller must keep them alive."""
    return [tensor.data_ptr() for tensor in tensors]


def array_address(array: np.ndarray) -> int:
    """The address of a contiguous array; others are refused. It takes a third of `ctypes.data`."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data)) if array.size else 0


@functools.lru_cache(maxsize=256)
def index_array(numbers: tuple[int, ...]) -> ctypes.Array[c_int64]:
    """int64, kept for the next call with the same numbers; no call writes to it."""
    return (c_int64 * len(numbers))(*numbers)


class Addresses:
    """Addresses of tensors or of contiguous copies, which it keeps alive until the call is over."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def __call__(self, tensor: Tensor, dtype: torch.dtype) -> int:
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        self._tensors.append(tensor)
        return address_of(tensor, dtype)


Column = tuple[Tensor, torch.dtype]


class BatchColumns:
    """Addresses of a batch's columns: the newest batch is the next one too, as a rule."""

    def __init__(self, columns: Callable[[SamplingBatch], Sequence[Column]]) -> None:
        self._columns = columns
        self._newest: tuple[SamplingBatch, Addresses, list[int]] | None = None

    def of(self, sampling: SamplingBatch) -> list[int]:
        """The addresses, in order."""
        if self._newest is None or self._newest[0] is not sampling:
            at = Addresses()
            addresses = [at(column, dtype) for column, dtype in self._columns(sampling)]
            self._newest = sampling, at, addresses
        return self._newest[2]
