"""Weights of a product: formats, shards, and how many experts' weights a step reads."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np


class WeightFormat(StrEnum):
    """The storage format of a weight."""

    PLAIN = "plain"  # as it came
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"  # a scale for each output
    INT8_G128 = "int8-g128"  # a scale for every 128 inputs of an output
    INT8_G32 = "int8-g32"  # the same for every 32 inputs
    INT4 = "int4"  # a scale for every 128 inputs of an output
    INT4_ZERO = "int4-zero"  # and a zero point
    INT4_G32 = "int4-g32"  # the same for every 32 inputs
    INT4_G32_ZERO = "int4-g32-zero"
    # Blocks of GGUF files, in the order of GgufKind (csrc/gguf_tiles.h).
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    Q8_0 = "q8_0"
    Q2_K = "q2_k"
    Q3_K = "q3_k"
    Q4_K = "q4_k"
    Q5_K = "q5_k"
    Q6_K = "q6_k"
    IQ4_NL = "iq4_nl"
    IQ4_XS = "iq4_xs"
    MIXED = "mixed"  # outputs in several kinds of such blocks

    @property
    def group_inputs(self) -> int:
        """Number of inputs that share a scale or form a block of a GGUF file; 0: all."""
        assert self is not WeightFormat.MIXED, "its parts have groups of their own"
        if self.is_blocks:
            return 256 if self.endswith(("_k", "_xs")) else 32
        if "-g32" in self:
            return 32
        return 128 if self.startswith("int4") or "-g128" in self else 0

    @property
    def is_int8(self) -> bool:
        """Codes have 8 bits."""
        return self.startswith("int8")

    @property
    def has_zero(self) -> bool:
        """A group has a zero point."""
        return self.endswith("-zero")

    @property
    def is_blocks(self) -> bool:
        """The weight stays in the blocks of a GGUF file."""
        return self in BLOCK_FORMATS or self is WeightFormat.MIXED


QUANTIZATIONS = tuple(one for one in WeightFormat if one.startswith("int"))
BLOCK_FORMATS = tuple(one for one in WeightFormat if one.startswith(("q", "iq")))


def shard_width(number: int, size: int) -> int:
    """Items of each of `size` ranks; the last rank has the rest."""
    return -(-number // size)


def can_spread(number: int, size: int) -> bool:
    """At least 1 item is left for the last rank."""
    return shard_width(number, size) * (size - 1) < number


def distinct_experts(num_experts: int, per_row: int, num_rows: np.ndarray) -> np.ndarray:
    """Mean number of a layer's experts that num_rows rows meet, if they are routed evenly and
    independently: E (1 - (1 - K / E)^r). Rows of one text often share experts, and meet fewer.
    """
    return num_experts * (1 - (1 - per_row / num_experts) ** np.asarray(num_rows, float))


@dataclass(frozen=True, slots=True)
class RoutedWeights:
    """The weights of all experts of a network.

    Attributes:
        nbytes: of all experts of all layers.
        num_experts: of each layer that has any, and
        per_row: those that a row meets.
    """

    nbytes: int
    num_experts: int
    per_row: int

    def bytes_read(self, num_rows: np.ndarray) -> np.ndarray:
        """Mean bytes that a step of num_rows rows reads."""
        share = distinct_experts(self.num_experts, self.per_row, num_rows) / self.num_experts
        return self.nbytes * share
