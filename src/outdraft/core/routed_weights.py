"""Weights of experts: how many of them a step reads."""

from dataclasses import dataclass

import numpy as np


def distinct_experts(num_experts: int, per_row: int, num_rows: np.ndarray) -> np.ndarray:
    """How many experts of a layer so many rows meet together, on average, if they are routed evenly
    and independently: E (1 - (1 - K / E)^r). Rows of one text often share experts, and meet fewer.
    """
    return num_experts * (1 - (1 - per_row / num_experts) ** np.asarray(num_rows, float))


@dataclass(frozen=True, slots=True)
class RoutedWeights:
    """The weights of all experts of a network.

    Attributes:
        nbytes: those of all experts of all layers.
        num_experts: of each layer that has any, and
        per_row: those that a row meets.
    """

    nbytes: int
    num_experts: int
    per_row: int

    def bytes_read(self, num_rows: np.ndarray) -> np.ndarray:
        """By a step of so many rows, on average."""
        share = distinct_experts(self.num_experts, self.per_row, num_rows) / self.num_experts
        return self.nbytes * share
