"""Quantised weights of a checkpoint in the products of a network, which fuse several of them.

Dimension key: D inputs, E outputs.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outdraft.core.errors import ConfigError
from outdraft.core.weight_format import WeightFormat
from outdraft.kernels.data.block_weight import fits_tiles
from outdraft.kernels.data.coded_weight import Codes, joined
from outdraft.models.checkpoints.slots import Slot
from outdraft.models.checkpoints.stored import CUT_GROUP, StoredWeight
from outdraft.models.modules import Linear


@dataclass(frozen=True, slots=True)
class Placing:
    """How a product keeps the weights that it is made of.

    Attributes:
        stored: some of its weights, with their places; the others are plain.
        tile: the format that keeps the codes of all of them; None: they become numbers.
        reason: why they do; empty if none of them is quantised.
    """

    stored: dict[str, tuple[StoredWeight, Slot]]
    tile: WeightFormat | None
    reason: str = ""

    def coded(self) -> Codes:
        """The weights, one below the other, for a product with a tile."""
        assert self.tile is not None, "a product of numbers"
        parts = [
            stored.codes().part(*_part(slot)).coded(self.tile)
            for stored, slot in self.stored.values()
        ]
        return joined(parts)


def place(
    names: Sequence[str],
    stored: Mapping[str, StoredWeight],
    slots: Mapping[str, Slot],
    *,
    is_turned: bool = False,
) -> Placing:
    """For a product of the weights of those names.

    Args:
        stored: those of the checkpoint that are not plain.
        is_turned: the order of the outputs changes.
    """
    found = {name: (stored[name], slots[name]) for name in names if name in stored}
    quantised = {name: one for name, one in found.items() if not one[0].is_plain}
    if not quantised:
        return Placing(found, None)
    if numbers := [one for one, _ in quantised.values() if one.tile is None]:
        return Placing(found, None, numbers[0].reason)
    if len(quantised) < len(names):
        return Placing(found, None, "a part of the same product is not quantised")
    if is_turned:
        return Placing(found, None, "its heads turn in part, so their order changes")
    if any(one.cuts_a_group(_part(slot)[1]) for one, slot in quantised.values()):
        return Placing(found, None, CUT_GROUP)
    tile = common_tile([(one.tile, slot.to.shape[0]) for one, slot in quantised.values()])
    if tile is None:
        return Placing(found, None, "parts of the same product do not fit one tile")
    return Placing(found, tile)


def _rounded(numbers: Tensor, stored: StoredWeight, dtype: torch.dtype) -> Tensor:
    """What a weight becomes in a network of that dtype: bfloat16 where it was quantised, so that it
    takes two bytes, but not in networks of other dtypes than float32 and bfloat16."""
    if stored.is_plain or dtype is not torch.float32:
        return numbers
    return numbers.bfloat16()


def check_quantization(placings: Iterable[Placing], quantization: WeightFormat | None) -> None:
    """A second rounding would add its error to that of the first.

    Raises:
        ConfigError: weights are to be quantised that are so already.
    """
    kept = next((one for one in placings if one.tile is not None), None)
    if quantization is not None and kept is not None:
        raise kept_already(quantization, next(stored for stored, _ in kept.stored.values()))


def kept_already(quantization: WeightFormat, stored: StoredWeight) -> ConfigError:
    """What to raise where a weight is to be quantised that stays codes."""
    return ConfigError(
        f"quantization {quantization}: this checkpoint is quantised already ({stored.label}), and "
        f"its weights are kept as they are, in {stored.tile} tiles: leave the option out"
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
    """What became of all quantised weights, for people.

    Args:
        others: that are in no product, such as a table of vectors.
    """
    kept = Counter(
        (stored.label, str(placing.tile))
        for placing in placings
        if placing.tile is not None
        for stored, _ in placing.stored.values()
    )
    given_up = Counter(
        (stored.label, placing.reason)
        for placing in placings
        if placing.tile is None
        for stored, _ in placing.stored.values()
        if not stored.is_plain
    )
    given_up.update((one.label, "it is read row by row") for one in others if not one.is_plain)
    return told(kept, given_up)


def told(kept: Counter[tuple[str, str]], given_up: Counter[tuple[str, str]]) -> list[str]:
    """Numbers of weights in words, by label and tile, or by label and the reason for none."""
    return [
        *(
            f"{count} weights ({label}) are kept as they are, in {tile} tiles"
            for (label, tile), count in kept.items()
        ),
        *(
            f"{count} weights ({label}) are dequantised: {reason}"
            for (label, reason), count in given_up.items()
        ),
    ]


def common_tile(parts: Sequence[tuple[WeightFormat | None, int]]) -> WeightFormat | None:
    """The format that can keep the codes of all; None: one has no tile, or they do not fit.

    Args:
        parts: of weights one below the other, their tiles and numbers of outputs.
    """
    sizes = [(tile, num_outputs) for tile, num_outputs in parts if tile is not None]
    tiles = [tile for tile, _ in sizes]
    if len(tiles) < len(parts) or len({tile.is_int8 for tile in tiles}) > 1:
        return None
    if len(set(tiles)) == 1:
        return tiles[0]
    if any(tile.is_blocks for tile in tiles):
        fits = all(tile.is_blocks for tile in tiles) and fits_tiles(sizes)
        return WeightFormat.MIXED if fits else None
    least = min(tile.group_inputs or 128 for tile in tiles)
    bits = "int8" if tiles[0].is_int8 else "int4"
    size = "-g32" if least == 32 else "-g128" if bits == "int8" else ""
    zero = "-zero" if any(tile.has_zero for tile in tiles) else ""
    return WeightFormat(bits + size + zero)


def _part(slot: Slot) -> tuple[slice, slice]:
    """The rows and columns of the whole weight that belong into the slot."""
    rows, columns = slot.to.shape
    if slot.dim == 0:
        return slice(slot.start, slot.start + rows), slice(0, columns)
    return slice(0, rows), slice(slot.start, slot.start + columns)
