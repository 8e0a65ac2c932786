"""Quantised weights of a checkpoint in the products of a network, which fuse several of them.

Dimension key: D inputs, E outputs.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outdraft.core.errors import ConfigError
from outdraft.core.weights import WeightFormat
from outdraft.kernels.data.coded_weight import Codes
from outdraft.models.checkpoints.slots import Slot
from outdraft.models.checkpoints.stored import CUT_GROUP, StoredParameter, StoredWeight
from outdraft.models.modules import Linear


@dataclass(frozen=True, slots=True)
class Placing:
    """The weights of a product, and how they are kept.

    Attributes:
        weights: some of its weights, this rank's parts of them; the others are plain.
        tile: the format that keeps the codes of all of them; None: they become numbers.
        reason: why they do; empty if none of them is quantised.
    """

    weights: dict[str, StoredWeight]
    tile: WeightFormat | None
    reason: str = ""

    def coded(self) -> Codes:
        """The weights, one below the other, for a product with a tile."""
        assert self.tile is not None, "a product of numbers"
        return StoredParameter([[*self.weights.values()]]).coded()


def place(
    names: Sequence[str],
    stored: Mapping[str, StoredWeight],
    slots: Mapping[str, Slot],
    *,
    is_permuted: bool = False,
) -> Placing:
    """The way to keep a product of the weights of those names.

    Args:
        stored: those of the checkpoint that are not plain.
        is_permuted: the order of the outputs changes.
    """
    found = {name: stored[name].part(*_part(slots[name])) for name in names if name in stored}
    quantised = [stored[name] for name, one in found.items() if not one.is_plain]
    if not quantised:
        return Placing(found, None)
    if numbers := [one for one in quantised if one.tile is None]:
        return Placing(found, None, numbers[0].reason)
    if len(quantised) < len(names):
        return Placing(found, None, "a part of the same product is not quantised")
    if is_permuted:
        return Placing(found, None, "its heads turn in part, so their order changes")
    if any(one.tile is None for one in found.values()):
        return Placing(found, None, CUT_GROUP)
    tile = StoredParameter([[*found.values()]]).tile
    if tile is None:
        return Placing(found, None, "parts of the same product do not fit one tile")
    return Placing(found, tile)


def _rounded(numbers: Tensor, stored: StoredWeight, dtype: torch.dtype) -> Tensor:
    """The numbers as a network of that dtype keeps them: bfloat16 in a float32 network if they were
    quantised, so that they take 2 bytes."""
    if stored.is_plain or dtype is not torch.float32:
        return numbers
    return numbers.bfloat16()


def check_quantization(quantization: WeightFormat | None, kept: Iterable[StoredWeight]) -> None:
    """Raise ConfigError if weights that stay codes are to be quantised: a second rounding would add
    its error to that of the first."""
    stored = next(iter(kept), None)
    if quantization is not None and stored is not None:
        raise ConfigError(
            f"quantization {quantization}: this checkpoint is quantised already ({stored.label}), "
            f"and its weights are kept as they are, in {stored.tile} tiles: leave the option out"
        )


def fill_stored(
    slots: Mapping[str, Slot],
    stored: Mapping[str, StoredWeight],
    placings: Mapping[Linear, Placing],
) -> list[StoredWeight]:
    """Copy the numbers of what is kept in no tile to the slots; what belongs to no product."""
    others: list[StoredWeight] = []
    for name, slot in slots.items():
        placing = next((one for linear, one in placings.items() if linear.owns(slot.to)), None)
        if name not in stored or (placing is not None and placing.tile is not None):
            continue
        if placing is None:
            others.append(stored[name])
        numbers = _rounded(stored[name].numbers(), stored[name], slot.to.dtype)
        slot.to.copy_(slot.part_of(numbers))
    return others


def summary(placings: Sequence[Placing], others: Sequence[StoredWeight]) -> list[str]:
    """Lines for a log: the fate of all quantised weights.

    Args:
        others: that are in no product, such as a table of vectors.
    """
    kept = Counter(
        (stored.label, str(placing.tile))
        for placing in placings
        if placing.tile is not None
        for stored in placing.weights.values()
    )
    dequantised = Counter(
        (stored.label, placing.reason)
        for placing in placings
        if placing.tile is None
        for stored in placing.weights.values()
        if not stored.is_plain
    )
    dequantised.update((one.label, "it is read row by row") for one in others if not one.is_plain)
    return describe(kept, dequantised)


def describe(kept: Counter[tuple[str, str]], dequantised: Counter[tuple[str, str]]) -> list[str]:
    """Numbers of weights in words, by label and tile, or by label and the reason for none."""
    return [
        *(
            f"{count} weights ({label}) are kept as they are, in {tile} tiles"
            for (label, tile), count in kept.items()
        ),
        *(
            f"{count} weights ({label}) are dequantised: {reason}"
            for (label, reason), count in dequantised.items()
        ),
    ]


def _part(slot: Slot) -> tuple[slice, slice]:
    """The rows and columns of the whole weight that belong into the slot."""
    rows, columns = slot.to.shape
    if slot.dim == 0:
        return slice(slot.start, slot.start + rows), slice(0, columns)
    return slice(0, rows), slice(slot.start, slot.start + columns)
