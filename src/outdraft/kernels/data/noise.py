"""The keys of noise, and the decisions that it makes.

The *position* is that of the token being chosen. The *anchor* of noise that decides about drafts
(Purpose.DRAFT and Purpose.ACCEPT) must be the number of committed tokens when the step began.
Positions past the end of a step come back in the next one, and block verification has looked at
their drafts and coins to find that end: noise that was keyed by the position alone would be
conditioned on the outcome of the step before, and the output would be biased. SAMPLE and RECOVER
noise is used for emitted tokens only, so it needs no anchor. In a tree several nodes draw at one
position: the anchor of a drawn child is the number of committed tokens + (its parent's row << 24),
so that the draws of a level are independent.
"""

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

NOISE_NUMBERS = 1 << 18  # made at the same time in torch: each takes 90 bytes on the way


class Purpose(IntEnum):
    """The decision that a piece of noise makes. Each purpose is an independent stream."""

    DRAFT = 0
    ACCEPT = 1
    RECOVER = 2
    SAMPLE = 3


class NoiseKeys(NamedTuple):
    """A key for each row, int64 [R].

    Attributes:
        seeds_R: of the requests.
        positions_R: text positions of the tokens to be chosen.
        purposes_R: values of `Purpose`.
        anchors_R: committed tokens when the step began, for DRAFT and ACCEPT; 0 for the others.
    """

    seeds_R: Tensor
    positions_R: Tensor
    purposes_R: Tensor
    anchors_R: Tensor

    def split(self, num_rows: int) -> "Iterator[NoiseKeys]":
        """Keys of `num_rows` rows each, in order; the last of fewer."""
        parts = (column_R.split(num_rows) for column_R in self)
        return map(NoiseKeys._make, zip(*parts, strict=True))

    @classmethod
    def of(
        cls, seeds_R: Tensor, positions_R: Tensor, purpose: Purpose, anchors_R: Tensor | None = None
    ) -> "NoiseKeys":
        """Keys of one purpose.

        Raises:
            ValueError: noise that decides about drafts, without anchors.
        """
        if anchors_R is None and purpose in (Purpose.DRAFT, Purpose.ACCEPT):
            raise ValueError(f"noise of purpose {purpose.name} needs anchors")
        if anchors_R is None:
            anchors_R = torch.zeros_like(positions_R)
        return cls(seeds_R, positions_R, torch.full_like(positions_R, int(purpose)), anchors_R)


Gumbel = Callable[[NoiseKeys, int], Tensor]  # from keys and V to float32 [R, V]
