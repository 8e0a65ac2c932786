"""Computations of draft heads between their products, by the compiled library.

Dimension key: R rows, D hidden, S state, V vocabulary.
"""

from ctypes import c_bool, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from outdraft.kernels.native.arrays import Addresses, address_of
from outdraft.kernels.native.library import Library


class NativeHeads:
    """The operations of csrc/heads.cpp: float32 and bfloat16 on the CPU."""

    def __init__(self, library: Library) -> None:
        def of(num_sizes: int, num_floats: int, num_arrays: int) -> list[object]:
            sizes, floats = [c_int64] * num_sizes, [c_float] * num_floats
            return [*sizes, c_bool, *floats, *[c_void_p] * num_arrays]

        self._add_silu = library.function("add_silu", of(1, 0, 3))
        self._scale_to_rms = library.function("scale_to_rms", of(2, 2, 2))
        self._mix_tokens = library.function("mix_tokens", of(2, 2, 6))

    def add_silu(self, x_RD: Tensor, y_RD: Tensor) -> Tensor:
        at, dtype = Addresses(), x_RD.dtype
        assert x_RD.shape == y_RD.shape
        x, y = at(x_RD, dtype), at(y_RD, dtype)
        to_RD = torch.empty(x_RD.shape, dtype=dtype)
        self._add_silu(x_RD.numel(), dtype is torch.bfloat16, x, y, to_RD.data_ptr())
        return to_RD

    def scale_to_rms(self, x_RS: Tensor, rms: float, eps: float) -> Tensor:
        at, dtype = Addresses(), x_RS.dtype
        x = at(x_RS, dtype)
        to_RS = torch.empty(x_RS.shape, dtype=dtype)
        self._scale_to_rms(*x_RS.shape, dtype is torch.bfloat16, rms, eps, x, to_RS.data_ptr())
        return to_RS

    def mix_tokens(
        self,
        z_RS: Tensor,
        ids_R: Tensor,
        embedding_VS: Tensor,
        share: float,
        norm_2S: Tensor,
        eps: float,
    ) -> Tensor:
        at, dtype = Addresses(), z_RS.dtype
        z, ids = at(z_RS, dtype), at(ids_R, torch.int64)
        to_RS = torch.empty(z_RS.shape, dtype=dtype)
        norm = address_of(norm_2S, dtype)
        self._mix_tokens(
            *z_RS.shape,
            dtype is torch.bfloat16,
            share,
            eps,
            z,
            address_of(embedding_VS, dtype),
            ids,
            norm,
            norm + norm_2S.shape[1] * norm_2S.element_size(),
            to_RS.data_ptr(),
        )
        return to_RS
