"""A weight that comes in the blocks of a GGUF file.

Dimension key: D inputs, E outputs, B bytes of an output.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from outdraft.core.errors import ConfigError
from outdraft.core.weights import BLOCK_FORMATS, WeightFormat

TILE_OUTPUTS = 32  # kTile of csrc/linear.h
# Bytes of an output's block in a tile. Scales of 6 bits have a byte each there.
TILE_BYTES = {
    WeightFormat.Q4_0: 18,
    WeightFormat.Q4_1: 20,
    WeightFormat.Q5_0: 22,
    WeightFormat.Q5_1: 24,
    WeightFormat.Q8_0: 34,
    WeightFormat.Q2_K: 84,
    WeightFormat.Q3_K: 114,
    WeightFormat.Q4_K: 148,
    WeightFormat.Q5_K: 180,
    WeightFormat.Q6_K: 210,
    WeightFormat.IQ4_NL: 18,
    WeightFormat.IQ4_XS: 138,
}


@dataclass(frozen=True, slots=True, eq=False)
class BlockRows:
    """Outputs of a weight as a GGUF file stores them, block by block of inputs.

    Attributes:
        format: one of BLOCK_FORMATS.
        num_inputs: D, a multiple of the block's inputs.
        rows_EB: uint8; each row contiguous; may be a mapped file.
        order_E: int64; which row is each output; None: they are in order.
    """

    format: WeightFormat
    num_inputs: int
    rows_EB: np.ndarray
    order_E: np.ndarray | None = None

    def __post_init__(self) -> None:
        assert self.format in BLOCK_FORMATS, self.format
        assert self.rows_EB.dtype == np.uint8
        assert self.rows_EB.strides[1] == 1, "the bytes of a row lie apart"

    @property
    def num_outputs(self) -> int:
        return len(self.rows_EB) if self.order_E is None else len(self.order_E)

    @property
    def addresses_E(self) -> np.ndarray:
        """uint64 [E]: where each output begins."""
        order_E = np.arange(len(self.rows_EB)) if self.order_E is None else self.order_E
        offsets_E = order_E.astype(np.int64) * self.rows_EB.strides[0]
        return (self.rows_EB.ctypes.data + offsets_E).astype(np.uint64)

    def numbers(self) -> Tensor:
        """float32 [E, D]; raises as `dequantised`."""
        rows_EB = self.rows_EB if self.order_E is None else self.rows_EB[self.order_E]
        return dequantised(rows_EB, self.format.upper())

    def part(self, rows: slice | Tensor, columns: slice) -> "BlockRows":
        """Some outputs, or outputs in that order, and some inputs, which cut no block."""
        size = self.format.group_inputs
        first, end = columns.start, min(columns.stop, self.num_inputs)
        assert first % size == 0, "a block is cut"
        assert end % size == 0, "a block is cut"
        block_bytes = self.rows_EB.shape[1] * size // self.num_inputs
        rows_EB = self.rows_EB[:, first // size * block_bytes : end // size * block_bytes]
        if isinstance(rows, slice) and self.order_E is None:
            return replace(self, num_inputs=end - first, rows_EB=rows_EB[rows])
        own_E = np.arange(self.num_outputs) if self.order_E is None else self.order_E
        order_E = own_E[rows if isinstance(rows, slice) else rows.numpy()]
        return replace(self, num_inputs=end - first, rows_EB=rows_EB, order_E=order_E)

    def coded(self, tile: WeightFormat) -> "BlockWeight":
        """These rows: they fit every tile of blocks."""
        assert tile.is_blocks
        return BlockWeight((self,))


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight:
    """Outputs in blocks of several kinds, one part below the other."""

    parts: tuple[BlockRows, ...]

    @property
    def format(self) -> WeightFormat:
        """That of all parts, or MIXED."""
        kinds = {part.format for part in self.parts}
        return kinds.pop() if len(kinds) == 1 else WeightFormat.MIXED

    def numbers(self) -> Tensor:
        """float32 [E, D]; raises as BlockRows.numbers."""
        return torch.cat([part.numbers() for part in self.parts])

    def part(self, rows: slice) -> "BlockWeight":
        """Some of the outputs of a weight with one part."""
        (own,) = self.parts
        return BlockWeight((own.part(rows, slice(0, own.num_inputs)),))


def dequantised(rows_EB: np.ndarray, kind: str) -> Tensor:
    """The numbers of rows of a GGUF file, float32 [E, D].

    Args:
        rows_EB: uint8.
        kind: as ggml names it, such as "Q4_K".

    Raises:
        ConfigError: the gguf package, which computes them, is missing, or cannot read that kind.
    """
    try:
        from gguf import GGMLQuantizationType, dequantize
    except ImportError:
        raise ConfigError(
            f"GGUF tensors of kind {kind} are dequantised by the gguf package: "
            "pip install 'outdraft[gguf]'"
        ) from None
    try:
        numbers = dequantize(np.ascontiguousarray(rows_EB), GGMLQuantizationType[kind])
    except NotImplementedError as error:
        raise ConfigError(f"GGUF: tensors of kind {kind} are not supported") from error
    return torch.from_numpy(np.array(numbers))


def fits_tiles(sizes: Sequence[tuple[WeightFormat, int]]) -> bool:
    """True if no tile has outputs of two formats when the parts lie one below the other.

    Args:
        sizes: format and number of outputs of each part.
    """
    return len({kind for kind, _ in sizes}) == 1 or all(
        num_outputs % TILE_OUTPUTS == 0 for _, num_outputs in sizes[:-1]
    )
