"""Products by the compiled library, see csrc/linear.cpp.

Dimension key: T rows, D inputs, E outputs.
"""

import weakref
from collections.abc import Sequence
from ctypes import c_bool, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from outdraft.core.weights import BLOCK_FORMATS, WeightFormat
from outdraft.kernels.data.block_weight import BlockRows, BlockWeight
from outdraft.kernels.data.coded_weight import Codes
from outdraft.kernels.native.library import Team
from outdraft.kernels.products import Product, RowParallel, VocabParallel

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # Dtype of csrc/linear.h
_FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}  # Format of csrc/linear.h
_SCALES = torch.bfloat16, torch.float16, torch.float32  # ScaleKind of csrc/linear.h
_SHORT_BYTES = 1 << 20  # of weights; for a product of so few Python keeps its lock


class NativeLinear:
    """The operations of csrc/linear.cpp."""

    def __init__(self, team: Team, *, meets_bytes: bool = False) -> None:
        """`meets_bytes`: rows that meet weights in blocks become integers of 8 bits, else of 16."""
        self.meets_bytes = meets_bytes
        function = team.library.function
        self.team = team
        of_weights = [c_void_p, c_int64, c_int64, c_int64]
        self.fits = function("linear_fits_bf16", of_weights, c_int64, releases_gil=True)
        self.pack = function(
            "linear_pack",
            [c_void_p, *[c_int64] * 3, *of_weights, c_void_p, c_bool],
            c_void_p,
            releases_gil=True,
        )
        self.pack_coded = function(
            "linear_pack_codes",
            [c_void_p, *[c_int64] * 3, *[c_void_p] * 3, *[c_int64] * 3, c_void_p, c_bool],
            c_void_p,
            releases_gil=True,
        )
        self.pack_gguf = function(
            "linear_pack_gguf",
            [c_void_p, c_int64, *[c_void_p] * 3, c_int64, c_void_p, c_bool],
            c_void_p,
            releases_gil=True,
        )
        self.read_rows = function(
            "linear_read_rows", [c_void_p, c_void_p, c_int64, c_int64, c_void_p]
        )
        self.free = function("linear_free", [c_void_p, c_void_p], releases_gil=True)
        self.bytes = function("linear_bytes", [c_void_p], c_int64)
        of_product = [*[c_void_p] * 3, c_int64, c_int64, c_void_p, *[c_int64] * 3]
        self.multiply = function("linear_multiply", of_product)
        self.multiply_long = function("linear_multiply", of_product, releases_gil=True)

    def pack_linear(
        self,
        weight_ED: Tensor | Sequence[Tensor],
        bias_E: Tensor | None,
        quantization: WeightFormat | None = None,
    ) -> "NativeProduct":
        parts_ED = [weight_ED] if isinstance(weight_ED, Tensor) else weight_ED
        parts_ED = [part if part.stride(1) == 1 else part.contiguous() for part in parts_ED]
        bias_E = _float32(bias_E)
        dtype = parts_ED[0].dtype
        rows_E = torch.cat([_row_addresses(part) for part in parts_ED])
        weight = rows_E.data_ptr(), _DTYPES[dtype], len(rows_E), parts_ED[0].shape[1]
        fitting = WeightFormat.BFLOAT16 if self.fits(*weight) else WeightFormat.FLOAT32
        kept = quantization or fitting
        handle = self.pack(
            self.team.address,
            _format(kept),
            kept.group_inputs,
            kept.has_zero,
            *weight,
            _address(bias_E),
            self.meets_bytes,
        )
        return NativeProduct(self, handle, kept, (len(rows_E), parts_ED[0].shape[1]), dtype)

    def pack_codes(
        self, weight: Codes, bias_E: Tensor | None, dtype: torch.dtype
    ) -> "NativeProduct":
        """Scales and shifts of codes are kept in the first dtype of _SCALES that holds all."""
        if isinstance(weight, BlockWeight):
            return self._pack_blocks(weight, bias_E, dtype)
        bias_E, codes_ED = _float32(bias_E), weight.codes_ED.contiguous()
        numbers = [_float32(weight.scales_EN), _float32(weight.shifts_EN)]
        fitting = (
            kind
            for kind, scale in enumerate(_SCALES)
            if all(one is None or torch.equal(one.to(scale).float(), one) for one in numbers)
        )
        scale_kind = next(fitting, len(_SCALES) - 1)  # a NaN equals itself in none
        num_outputs, num_inputs = codes_ED.shape
        handle = self.pack_coded(
            self.team.address,
            _format(weight.format),
            weight.format.group_inputs,
            scale_kind,
            codes_ED.data_ptr(),
            *map(_address, numbers),
            _DTYPES[dtype],
            num_outputs,
            num_inputs,
            _address(bias_E),
            self.meets_bytes,
        )
        return NativeProduct(self, handle, weight.format, (num_outputs, num_inputs), dtype)

    def _pack_blocks(
        self, weight: BlockWeight, bias_E: Tensor | None, dtype: torch.dtype
    ) -> "NativeProduct":
        bias_E, parts = _float32(bias_E), _joined_parts(weight.parts)
        kinds = np.array([BLOCK_FORMATS.index(part.format) for part, _ in parts])
        counts = np.array([len(addresses_E) for _, addresses_E in parts])
        addresses_E = np.concatenate([addresses_E for _, addresses_E in parts])
        num_inputs = weight.parts[0].num_inputs
        handle = self.pack_gguf(
            self.team.address,
            len(parts),
            kinds.ctypes.data,
            counts.ctypes.data,
            addresses_E.ctypes.data,
            num_inputs,
            _address(bias_E),
            self.meets_bytes,
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
        end = weakref.finalize(self, _free, functions, self.handle)
        end.atexit = False
        self.nbytes: int = functions.bytes(self.handle)
        is_short = self.nbytes < _SHORT_BYTES
        self._multiply = functions.multiply if is_short else functions.multiply_long

    def rows(self, outputs_T: Tensor) -> Tensor:
        """[T, D]; only of a weight in blocks."""
        assert self.format.is_blocks, f"rows of {self.format}"
        outputs_T = outputs_T.long().contiguous()
        if (
            len(outputs_T)
            and not 0 <= int(outputs_T.min()) <= int(outputs_T.max()) < self.num_outputs
        ):
            raise IndexError(f"outputs must be from 0 to {self.num_outputs - 1}")
        rows_TD = torch.empty((len(outputs_T), self.num_inputs), dtype=self._dtype)
        address, dtype = outputs_T.data_ptr(), _DTYPES[self._dtype]
        self._read_rows(self.handle, address, len(outputs_T), dtype, rows_TD.data_ptr())
        return rows_TD

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, E]."""
        num_rows, num_inputs = x_TD.shape
        assert x_TD.dtype is self._dtype, f"expected {self._dtype}, got {x_TD.dtype}"
        assert num_inputs == self.num_inputs, f"expected {self.num_inputs}, got {num_inputs}"
        if x_TD.stride(1) != 1:
            x_TD = x_TD.contiguous()
        out_TE = torch.empty((num_rows, self.num_outputs), dtype=self._dtype)
        dtype = _DTYPES[self._dtype]
        self._multiply(
            self._team_address,
            self.handle,
            x_TD.data_ptr(),
            dtype,
            x_TD.stride(0),
            out_TE.data_ptr(),
            dtype,
            self.num_outputs,
            num_rows,
        )
        return out_TE


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


def _float32(numbers: Tensor | None) -> Tensor | None:
    return None if numbers is None else numbers.detach().float().contiguous()


def _address(numbers: Tensor | None) -> int:
    """0: there are none."""
    return 0 if numbers is None else numbers.data_ptr()


def _row_addresses(weight_ED: Tensor) -> Tensor:
    """int64 [E]."""
    row_bytes = weight_ED.stride(0) * weight_ED.element_size()
    return weight_ED.data_ptr() + row_bytes * torch.arange(len(weight_ED))


def _free(functions: NativeLinear, handle: int) -> None:
    """It has the team, which so outlives all weights that it reads."""
    functions.free(functions.team.address, handle)
