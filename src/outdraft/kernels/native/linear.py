"""Products, and mixtures of experts, by the compiled library: csrc/linear.cpp and experts.cpp.

Dimension key: T rows, D inputs, E outputs; K experts of a row, X experts.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from outdraft.core.weights import BLOCK_FORMATS, QUANTIZATIONS, WeightFormat
from outdraft.kernels.data.block_weight import BlockRows, BlockWeight
from outdraft.kernels.data.coded_weight import Codes
from outdraft.kernels.native.library import Team
from outdraft.kernels.products import (
    Activation,
    ExpertWeights,
    Gate,
    Product,
    RowParallel,
    VocabParallel,
)

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # Dtype of csrc/linear.h
_FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}  # Format of csrc/linear.h
_SCALES = torch.bfloat16, torch.float16, torch.float32  # ScaleKind of csrc/linear.h
_ACTIVATIONS = {one: place for place, one in enumerate(Activation)}  # of csrc/linear_tiles.h
_SHORT_BYTES = 1 << 20  # of weights; for a product of so few Python keeps its lock


class NativeLinear:
    """The operations of csrc/linear.cpp and norms.cpp."""

    def __init__(self, team: Team, *, meets_bytes: bool = False) -> None:
        """`meets_bytes`: rows that meet weights in blocks become integers of 8 bits, else of 16."""
        self.team, self.meets_bytes = team, meets_bytes
        function, long = team.library.function, partial(team.library.function, releases_gil=True)
        self._fits, self._pack = long("linear_fits_bf16"), long("linear_pack")
        self._pack_codes, self._pack_gguf = long("linear_pack_codes"), long("linear_pack_gguf")
        self.read_rows, self.bytes = function("linear_read_rows"), function("linear_bytes")
        self.free = long("linear_free")
        self.multiply, self.multiply_long = function("linear_multiply"), long("linear_multiply")
        self._scale_to_rms = function("scale_to_rms")

    def pack_linear(
        self,
        weight_ED: Tensor | Sequence[Tensor],
        bias_E: Tensor | None,
        quantization: WeightFormat | None = None,
    ) -> "NativeProduct":
        parts_ED = [weight_ED] if isinstance(weight_ED, Tensor) else weight_ED
        parts_ED = [part if part.stride(1) == 1 else part.contiguous() for part in parts_ED]
        dtype = parts_ED[0].dtype
        rows_E = torch.cat([_row_addresses(part) for part in parts_ED])
        weight = rows_E, DTYPES[dtype], len(rows_E), parts_ED[0].shape[1]
        fitting = WeightFormat.BFLOAT16 if self._fits(*weight) else WeightFormat.FLOAT32
        kept = quantization or fitting
        handle = self._pack(
            *(self.team.address, _format(kept), kept.group_inputs, kept.has_zero),
            *(*weight, float32(bias_E), self.meets_bytes),
        )
        return NativeProduct(self, handle, kept, (len(rows_E), parts_ED[0].shape[1]), dtype)

    def pack_codes(
        self, weight: Codes, bias_E: Tensor | None, dtype: torch.dtype
    ) -> "NativeProduct":
        """Scales and shifts of codes are kept in the first dtype of _SCALES that holds all."""
        if isinstance(weight, BlockWeight):
            return self._pack_blocks(weight, bias_E, dtype)
        numbers = [float32(weight.scales_EN), float32(weight.shifts_EN)]
        fitting = (
            kind
            for kind, scale in enumerate(_SCALES)
            if all(one is None or torch.equal(one.to(scale).float(), one) for one in numbers)
        )
        scale_kind = next(fitting, len(_SCALES) - 1)  # a NaN equals itself in none
        num_outputs, num_inputs = weight.codes_ED.shape
        handle = self._pack_codes(
            *(self.team.address, _format(weight.format), weight.format.group_inputs, scale_kind),
            *(weight.codes_ED, *numbers, DTYPES[dtype], num_outputs, num_inputs),
            *(float32(bias_E), self.meets_bytes),
        )
        return NativeProduct(self, handle, weight.format, (num_outputs, num_inputs), dtype)

    def scale_to_rms(self, x_RS: Tensor, rms: float, eps: float) -> Tensor:
        to_RS = torch.empty(x_RS.shape, dtype=x_RS.dtype)
        self._scale_to_rms(*x_RS.shape, DTYPES[x_RS.dtype], rms, eps, x_RS, to_RS)
        return to_RS

    def _pack_blocks(
        self, weight: BlockWeight, bias_E: Tensor | None, dtype: torch.dtype
    ) -> "NativeProduct":
        parts = _joined_parts(weight.parts)
        addresses_E = np.concatenate([addresses_E for _, addresses_E in parts])
        num_inputs = weight.parts[0].num_inputs
        handle = self._pack_gguf(
            *(self.team.address, len(parts)),
            [BLOCK_FORMATS.index(part.format) for part, _ in parts],
            [len(addresses_E) for _, addresses_E in parts],
            *(addresses_E, num_inputs, float32(bias_E), self.meets_bytes),
        )
        return NativeProduct(self, handle, weight.format, (len(addresses_E), num_inputs), dtype)


class NativeProduct:
    """A product with a weight that the library keeps in tiles.

    Attributes:
        handle: address of the `LinearWeights`, for the functions of the library.
    """

    def __init__(
        self,
        functions: NativeLinear,
        handle: int | None,
        kept: WeightFormat,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        """
        Args:
            handle: None: there was no memory.
            shape: outputs and inputs.
            dtype: of the rows that it multiplies.
        """
        self.num_outputs, self.num_inputs = shape
        if not handle:
            raise MemoryError(f"no memory for {self.num_outputs} x {self.num_inputs} weights")
        self.handle: int = handle
        self.format, self._dtype = kept, dtype
        self._team_address, self._read_rows = functions.team.address, functions.read_rows
        # Not at the end of the process: a late helper may still read them.
        weakref.finalize(self, _free, functions.team, functions.free, self.handle).atexit = False
        self.nbytes: int = functions.bytes(self.handle)
        is_short = self.nbytes < _SHORT_BYTES
        self._multiply = functions.multiply if is_short else functions.multiply_long

    def rows(self, outputs_T: Tensor) -> Tensor:
        """[T, D]; only of a weight in blocks."""
        assert self.format.is_blocks, f"rows of {self.format}"
        outputs_T = outputs_T.long()
        if (
            len(outputs_T)
            and not 0 <= int(outputs_T.min()) <= int(outputs_T.max()) < self.num_outputs
        ):
            raise IndexError(f"outputs must be from 0 to {self.num_outputs - 1}")
        rows_TD = torch.empty((len(outputs_T), self.num_inputs), dtype=self._dtype)
        dtype = DTYPES[self._dtype]
        self._read_rows(self.handle, outputs_T, len(outputs_T), dtype, rows_TD)
        return rows_TD

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, E]."""
        num_rows, num_inputs = x_TD.shape
        assert x_TD.dtype is self._dtype, f"expected {self._dtype}, got {x_TD.dtype}"
        assert num_inputs == self.num_inputs, f"expected {self.num_inputs}, got {num_inputs}"
        if x_TD.stride(1) != 1:
            x_TD = x_TD.contiguous()
        out_TE = torch.empty((num_rows, self.num_outputs), dtype=self._dtype)
        dtype = DTYPES[self._dtype]
        self._multiply(
            *(self._team_address, self.handle, x_TD.data_ptr(), dtype, x_TD.stride(0)),
            *(out_TE, dtype, self.num_outputs, num_rows),
        )
        return out_TE


class NativeExperts:
    """The experts of a layer, for float32 and bfloat16 on the CPU."""

    def __init__(
        self,
        linear: NativeLinear,
        weights: ExpertWeights,
        gate: Gate,
        quantization: WeightFormat | None = None,
    ) -> None:
        self._dtype = weights.dtype

        pack_linear = partial(linear.pack_linear, quantization=quantization)
        self._gate_up_X, self._down_X = weights.packed(pack_linear, linear.pack_codes)
        for of_one_kind in (self._gate_up_X, self._down_X):
            formats = {product.format for product in of_one_kind}
            if len(formats) > 1 and formats & set(QUANTIZATIONS):
                raise ValueError(f"experts of one layer in several formats: {sorted(formats)}")
        self.format, self._hidden = self._down_X[0].format, self._down_X[0].num_outputs
        self.nbytes = sum(product.nbytes for product in (*self._gate_up_X, *self._down_X))
        team = linear.team
        self._handle: int = team.library.function("experts_make")(
            len(self._down_X),
            *([product.handle for product in of_X] for of_X in (self._gate_up_X, self._down_X)),
            *(_ACTIVATIONS[gate.activation], gate.alpha, gate.limit),
        )
        self._multiply = team.library.function("experts_multiply", releases_gil=True)
        self._team_address = team.address
        free = team.library.function("experts_free", releases_gil=True)
        # Not at the end of the process: a late helper may still read them.
        weakref.finalize(self, _free, team, free, self._handle).atexit = False

    def __call__(
        self, x_TD: Tensor, expert_ids_TK: Tensor | None = None, weights_TK: Tensor | None = None
    ) -> Tensor:
        num_rows, num_inputs = x_TD.shape
        if expert_ids_TK is None:
            expert_ids_TK = torch.zeros((num_rows, 1), dtype=torch.int64)
            weights_TK = torch.ones(num_rows, 1)
        assert weights_TK is not None
        assert x_TD.dtype is self._dtype, f"expected {self._dtype}, got {x_TD.dtype}"
        assert num_inputs == self._hidden, f"expected {self._hidden}, got {num_inputs}"
        assert expert_ids_TK.shape == weights_TK.shape
        assert len(expert_ids_TK) == num_rows
        if x_TD.stride(1) != 1:
            x_TD = x_TD.contiguous()
        y_TD = torch.empty((num_rows, num_inputs), dtype=self._dtype)
        are_in_range = self._multiply(
            *(self._team_address, self._handle),
            *(x_TD.data_ptr(), DTYPES[self._dtype], x_TD.stride(0)),
            *(expert_ids_TK, weights_TK.float(), expert_ids_TK.shape[1]),
            *(y_TD, num_inputs, num_rows),
        )
        if not are_in_range:
            raise IndexError(
                f"ids of experts must be from 0 to {len(self._down_X)}, got "
                f"{expert_ids_TK.min()} to {expert_ids_TK.max()}"
            )
        return y_TD


def weights_of(product: Product) -> int:
    """The address of the `LinearWeights` of a product, of this rank's where it is spread."""
    if isinstance(product, RowParallel | VocabParallel):
        product = product.own
    assert isinstance(product, NativeProduct)
    return product.handle


def _joined_parts(parts: Sequence[BlockRows]) -> list[tuple[BlockRows, np.ndarray]]:
    """Parts with the addresses of their outputs; neighbours of one format are one part."""
    found: list[tuple[BlockRows, np.ndarray]] = []
    for part in parts:
        if found and found[-1][0].format is part.format:
            found[-1] = part, np.concatenate((found[-1][1], part.addresses_E))
        else:
            found.append((part, part.addresses_E))
    return found


def _format(kept: WeightFormat) -> int:
    """Format of csrc/linear.h."""
    return _FORMATS[kept.split("-")[0]]


def float32(numbers: Tensor | None) -> Tensor | None:
    """The numbers as the library reads them."""
    return None if numbers is None else numbers.detach().float()


def _row_addresses(weight_ED: Tensor) -> Tensor:
    """int64 [E]."""
    row_bytes = weight_ED.stride(0) * weight_ED.element_size()
    return weight_ED.data_ptr() + row_bytes * torch.arange(len(weight_ED))


def _free(team: Team, free: Callable[[int, int], None], handle: int) -> None:
    """It has the team, which so outlives all weights that it reads."""
    free(team.address, handle)
