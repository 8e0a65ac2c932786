"""A weight that comes as integers.

Dimension key: D inputs, E outputs, N groups of inputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from outdraft.core.weight_format import WeightFormat


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
        numbers_ED = self.codes_ED.float()
        if self.shifts_EN is not None:
            numbers_ED = numbers_ED + self._spread(self.shifts_EN)
        return numbers_ED * self._spread(self.scales_EN)

    def rows(self, outputs: slice) -> "CodedWeight":
        """Some of the outputs."""
        shifts_EN = None if self.shifts_EN is None else self.shifts_EN[outputs]
        return CodedWeight(self.format, self.codes_ED[outputs], self.scales_EN[outputs], shifts_EN)

    def _spread(self, numbers_EN: Tensor) -> Tensor:
        """[E, D]: the number of each input's group."""
        num_inputs = self.codes_ED.shape[1]
        group_inputs = self.format.group_inputs or num_inputs
        return numbers_EN.repeat_interleave(group_inputs, dim=1)[:, :num_inputs]
