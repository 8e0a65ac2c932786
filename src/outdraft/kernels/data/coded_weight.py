"""A weight that comes as integers.

Dimension key: D inputs, E outputs, N groups of inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outdraft.core.weights import WeightFormat
from outdraft.kernels.data.block_weight import BlockWeight

_ALL = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """w = scale * (code + shift), with a scale and a shift for each group of an output's inputs.

    Attributes:
        format: one of codes; says how many inputs a group has, and whether it has a shift.
        codes_ED: int8; of int4 from -8 to 7.
        scales_EN, shifts_EN: float32, on the device of the codes.
    """

    format: WeightFormat
    codes_ED: Tensor
    scales_EN: Tensor
    shifts_EN: Tensor | None = None

    def __post_init__(self) -> None:
        num_outputs, num_inputs = self.codes_ED.shape
        shape = (num_outputs, -(-num_inputs // (self.format.group_inputs or num_inputs)))
        assert self.codes_ED.dtype is torch.int8
        assert self.format.has_zero == (self.shifts_EN is not None)
        for numbers_EN in (self.scales_EN, self.shifts_EN):
            assert numbers_EN is None or numbers_EN.shape == shape, f"not {shape}"
            assert numbers_EN is None or numbers_EN.dtype is torch.float32

    def numbers(self) -> Tensor:
        """float32 [E, D]."""
        group_inputs = self.format.group_inputs or self.codes_ED.shape[1]
        return decoded(self.codes_ED, self.scales_EN, self.shifts_EN, group_inputs)

    def part(self, rows: slice | Tensor, columns: slice = _ALL) -> "CodedWeight":
        """Some outputs, or outputs in that order, and some inputs, which begin with a group unless
        an output has the same scale everywhere."""
        return self._regrouped(self.format, rows, columns)

    def coded(self, tile: WeightFormat) -> "CodedWeight":
        """These numbers in groups of that format, each a part of one of these groups."""
        return self._regrouped(tile, _ALL, _ALL)

    def _regrouped(self, tile: WeightFormat, rows: slice | Tensor, columns: slice) -> "CodedWeight":
        codes_ED, num_inputs = self.codes_ED[rows, columns], self.codes_ED.shape[1]
        own = self.format.group_inputs or num_inputs
        size = tile.group_inputs or num_inputs

        def in_tiles(numbers_EN: Tensor) -> Tensor:
            if own == size and columns == _ALL:
                return numbers_EN[rows]
            return regrouped(numbers_EN[rows], own, num_inputs, size, columns)

        scales_EN, shifts_EN = in_tiles(self.scales_EN), None
        if self.shifts_EN is not None:
            shifts_EN = in_tiles(self.shifts_EN)
        elif tile.has_zero:
            shifts_EN = torch.zeros_like(scales_EN)
        return CodedWeight(tile, codes_ED, scales_EN, shifts_EN)


Codes = CodedWeight | BlockWeight


def joined(parts: Sequence[Codes]) -> Codes:
    """Weights one below the other: of one format of codes, or of any formats of blocks."""
    blocks = [part for part in parts if isinstance(part, BlockWeight)]
    if blocks:
        assert len(blocks) == len(parts), "blocks beside other codes"
        return BlockWeight(tuple(rows for part in blocks for rows in part.parts))
    codes = [part for part in parts if isinstance(part, CodedWeight)]
    shifts = [part.shifts_EN for part in codes if part.shifts_EN is not None]
    return CodedWeight(
        codes[0].format,
        torch.cat([part.codes_ED for part in codes]),
        torch.cat([part.scales_EN for part in codes]),
        torch.cat(shifts) if shifts else None,
    )


def decoded(
    codes_ED: Tensor, scales_EN: Tensor, shifts_EN: Tensor | None, group_inputs: int
) -> Tensor:
    """float32 [E, D]: the numbers that codes stand for, in groups of any size."""
    num_inputs, numbers_ED = codes_ED.shape[1], codes_ED.float()
    if shifts_EN is not None:
        numbers_ED = numbers_ED + of_inputs(shifts_EN, group_inputs, num_inputs)
    return numbers_ED * of_inputs(scales_EN, group_inputs, num_inputs)


def of_inputs(numbers_EN: Tensor, group_inputs: int, num_inputs: int) -> Tensor:
    """[E, D]: the number of each input's group."""
    return numbers_EN.repeat_interleave(group_inputs, dim=1)[:, :num_inputs]


def regrouped(
    numbers_EN: Tensor, group_inputs: int, num_inputs: int, size: int, columns: slice = _ALL
) -> Tensor:
    """[E, N]: numbers of groups as those of groups of `size` inputs, of some inputs."""
    return of_inputs(numbers_EN, group_inputs, num_inputs)[:, columns][:, ::size].contiguous()
