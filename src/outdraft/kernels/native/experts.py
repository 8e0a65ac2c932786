"""Mixtures of experts by the compiled library, see csrc/experts.cpp.

Dimension key: T rows, K experts of a row, X experts, D hidden, I intermediate, E outputs.
"""

import weakref
from collections.abc import Sequence
from ctypes import c_bool, c_float, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from outdraft.core.weights import QUANTIZATIONS, WeightFormat
from outdraft.kernels.data.coded_weight import Codes
from outdraft.kernels.native.arrays import Addresses
from outdraft.kernels.native.linear import NativeLinear, NativeProduct
from outdraft.kernels.products import Activation, ExpertWeights, Gate

Numbers = Tensor | Sequence[Tensor]
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # Dtype of csrc/linear.h
_ACTIVATIONS = {one: place for place, one in enumerate(Activation)}  # of csrc/linear_tiles.h


class NativeExpertKernels:
    """The operations of csrc/experts.cpp."""

    def __init__(self, linear: NativeLinear) -> None:
        function = linear.team.library.function
        self.linear, self.team = linear, linear.team
        self.make = function(
            "experts_make",
            [c_int64, c_void_p, c_void_p, c_int64, c_float, c_float],
            c_void_p,
        )
        self.free = function("experts_free", [c_void_p, c_void_p], releases_gil=True)
        of_rows = [c_void_p, c_void_p, c_void_p, c_int64, c_int64]
        of_routes = [c_void_p, c_void_p, c_int64]
        self.multiply = function(
            "experts_multiply",
            [*of_rows, *of_routes, c_void_p, c_int64, c_int64],
            c_bool,
            releases_gil=True,
        )


class NativeExperts:
    """The experts of a layer, for float32 and bfloat16 on the CPU."""

    def __init__(
        self,
        functions: NativeExpertKernels,
        weights: ExpertWeights,
        gate: Gate,
        quantization: WeightFormat | None = None,
    ) -> None:
        linear, dtype = functions.linear, weights.dtype

        def pack(weight: Numbers | Codes, bias_E: Tensor | None) -> NativeProduct:
            if isinstance(weight, Codes):
                return linear.pack_codes(weight, bias_E, dtype)
            return linear.pack_linear(weight, bias_E, quantization)

        self._gate_up_X = [
            pack(weight, _row(weights.gate_up_bias_XE, expert))
            for expert, weight in enumerate(weights.gate_up_X)
        ]
        self._down_X = [
            pack(weight, _row(weights.down_bias_XD, expert))
            for expert, weight in enumerate(weights.down_X)
        ]
        products = *self._gate_up_X, *self._down_X
        for of_one_kind in (self._gate_up_X, self._down_X):
            formats = {product.format for product in of_one_kind}
            if len(formats) > 1 and formats & set(QUANTIZATIONS):
                raise ValueError(f"experts of one layer in several formats: {sorted(formats)}")
        self.format = self._down_X[0].format
        self.nbytes = sum(product.nbytes for product in products)
        self._dtype, self._hidden = dtype, self._down_X[0].num_outputs
        addresses = np.array([product.handle for product in products], dtype=np.uintp)
        at, num_experts = addresses.ctypes.data, len(self._down_X)
        self._handle: int = functions.make(
            num_experts,
            at,
            at + num_experts * addresses.itemsize,
            _ACTIVATIONS[gate.activation],
            gate.alpha,
            gate.limit,
        )
        self._multiply, self._team_address = functions.multiply, functions.team.address
        # Not at the end of the process: a late helper may still read them.
        weakref.finalize(self, _free, functions, self._handle).atexit = False

    def __call__(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        num_rows, num_inputs = x_TD.shape
        assert x_TD.dtype is self._dtype, f"expected {self._dtype}, got {x_TD.dtype}"
        assert num_inputs == self._hidden, f"expected {self._hidden}, got {num_inputs}"
        assert expert_ids_TK.shape == weights_TK.shape
        assert len(expert_ids_TK) == num_rows
        if x_TD.stride(1) != 1:
            x_TD = x_TD.contiguous()
        at = Addresses()
        y_TD = torch.empty((num_rows, num_inputs), dtype=self._dtype)
        are_in_range = self._multiply(
            self._team_address,
            self._handle,
            x_TD.data_ptr(),
            _DTYPES[self._dtype],
            x_TD.stride(0),
            at(expert_ids_TK, torch.int64),
            at(weights_TK.float(), torch.float32),
            expert_ids_TK.shape[1],
            y_TD.data_ptr(),
            num_inputs,
            num_rows,
        )
        if not are_in_range:
            raise IndexError(
                f"ids of experts must be from 0 to {len(self._down_X)}, got "
                f"{expert_ids_TK.min()} to {expert_ids_TK.max()}"
            )
        return y_TD


def _row(bias_XE: Tensor | None, expert: int) -> Tensor | None:
    return None if bias_XE is None else bias_XE[expert]


def _free(functions: NativeExpertKernels, handle: int) -> None:
    """It has the team, which so outlives all experts."""
    functions.free(functions.team.address, handle)
