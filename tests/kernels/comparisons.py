"""Comparisons: one operation of a table against the reference, on drawn inputs.

How to add one. In the test module of the operation (tests/kernels/test_*.py), write a function that
draws inputs, computes on both tables and asserts, and name it in the module's `COMPARISONS` under
the operation's field of `ops.Kernels`:

    def compare_place_rows(case: Case) -> None:
        step = case.data.draw(steps())
        got, want = case.kernels.place_rows(*step), case.reference.place_rows(*step)
        ...

    COMPARISONS = {"place_rows": compare_place_rows}

test_table.py finds it there, and runs it on every table that this machine has. Large arrays are
best made from a drawn seed: `case.rng()`. Integers, noise and row independence are compared bit by
bit, other results within a bound that follows from the length of the sums (tests/rounding.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from outdraft.core.weights import WeightFormat
from outdraft.kernels.native.library import open_library, usable_instruction_sets
from outdraft.kernels.ops import Kernels

MATRIX_REGISTERS = "x86-64-v4-amx"  # which multiply bfloat16 rows with codes as they are


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        kernels: the table under test.
        reference: the readable one.
        dtype: of the model that `kernels` were chosen for.
        data: where inputs are drawn from.
    """

    kernels: Kernels
    reference: Kernels
    dtype: torch.dtype
    data: st.DataObject

    def rng(self) -> np.random.Generator:
        """Numbers of a drawn seed."""
        return np.random.default_rng(self.data.draw(st.integers(0, 2**32 - 1), "seed"))

    def rounded_group(self, format: WeightFormat) -> int:
        """How many inputs share a step where rows become integers of 16 bits; 0: they do not."""
        if self.kernels.name not in usable_instruction_sets():
            return 0
        library = open_library(self.kernels.name)
        assert library is not None
        is_bf16 = self.dtype is torch.bfloat16
        if format.is_int8:
            return 0 if library.keeps_bf16 and is_bf16 else format.group_inputs or 128
        return 0 if self.kernels.name == MATRIX_REGISTERS and is_bf16 else 32


Comparison = Callable[[Case], None]
