"""Places in a network where the tensors of a checkpoint belong.

All names and shapes are compared before any weight is copied, so a wrong checkpoint fails at once
and by name. Quantised weights of a product, which may fuse several, stay codes or become numbers
together.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from outdraft.core.errors import ConfigError
from outdraft.core.weights import WeightFormat
from outdraft.distributed.vocabulary import VocabularyShard
from outdraft.models.checkpoints.files import Place, StoredTensors, listed
from outdraft.models.checkpoints.stored import StoredParameter, StoredWeight

_READABLE = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """The place of a tensor in a network, or of the part of it that this rank has.

    Attributes:
        to: a view into the model.
        dim: along which the part is cut out.
        start: where in the whole tensor the part begins.
        whole: size of the whole tensor along `dim`; None: the part is all of it.
    """

    to: Tensor
    dim: int = 0
    start: int = 0
    whole: int | None = None

    @property
    def is_whole(self) -> bool:
        return self.whole is None or self.whole == self.to.shape[self.dim]

    @property
    def shape(self) -> list[int]:
        """The shape of the whole tensor."""
        shape = list(self.to.shape)
        if self.whole is not None:
            shape[self.dim] = self.whole
        return shape

    def part_of(self, whole: Any) -> Tensor:
        """The part, of a tensor or of anything that gives parts of one as a tensor does."""
        return whole[:] if self.is_whole else whole[self.indices]

    @property
    def indices(self) -> tuple[slice, ...]:
        """The indices of the part in the whole tensor."""
        indices = [slice(0, size) for size in self.to.shape]
        indices[self.dim] = slice(self.start, self.start + self.to.shape[self.dim])
        return tuple(indices)


def rows_of(shard: VocabularyShard, weight: Tensor | None) -> Slot:
    """The place of the rows of a rank's tokens."""
    assert weight is not None, "the weights are packed"
    return Slot(weight.data, 0, shard.first, shard.num_tokens)


Slots = Iterator[tuple[str, Slot | None]]


def slot_of(tensor: Tensor | None) -> Slot | None:
    """The place of a tensor that every rank has whole; None: there is no such tensor."""
    return None if tensor is None else Slot(tensor.data)


def fill_slots(slots: Mapping[str, Slot], places: Mapping[str, Place]) -> None:
    """Copy tensors to where they belong, after all names and shapes were compared.

    Raises:
        ConfigError: a tensor is missing, unknown, or of another shape.
    """
    check_slots(slots, places)
    for name, tensor in mapped_tensors(slots, places).items():
        slots[name].to.copy_(tensor)


def check_slots(
    slots: Mapping[str, Slot],
    places: Mapping[str, Place],
    stored: Mapping[str, StoredWeight] | None = None,
) -> None:
    """Check that every slot has a tensor of its shape, and that no tensor is left.

    Raises:
        ConfigError: something is missing, unknown, of another shape, or of an unreadable dtype.
    """
    stored = stored or {}
    if missing := [name for name in slots if name not in places and name not in stored]:
        raise ConfigError(f"the checkpoint lacks tensors: {listed(missing)}")
    if unknown := [name for name in (*places, *stored) if name not in slots]:
        raise ConfigError(
            f"the checkpoint has tensors that its config.json has no use for: {listed(unknown)}"
        )
    for name, one in stored.items():
        if list(one.shape) != slots[name].shape:
            raise ConfigError(
                f"weight {name!r} has shape {list(one.shape)}, but config.json asks for "
                f"{slots[name].shape}"
            )
    tensors = StoredTensors(places)
    for slot, (_, name) in places.items():
        found, expected, dtype = tensors.shape(slot), slots[slot].shape, tensors.dtype(slot)
        if found != expected:
            raise ConfigError(
                f"tensor {name!r} has shape {found}, but config.json asks for {expected}"
            )
        if dtype not in _READABLE:
            raise ConfigError(
                f"tensor {name!r} has dtype {dtype}, which is not supported; "
                f"supported: {', '.join(sorted(_READABLE))}"
            )


def mapped_tensors(slots: Mapping[str, Slot], places: Mapping[str, Place]) -> dict[str, Tensor]:
    """The tensors of these slots, or this rank's parts of them; pages that were read of a file
    leave the memory with them."""
    by_file: dict[Path, list[str]] = {}
    for name, (file, _) in places.items():
        if name in slots:
            by_file.setdefault(file, []).append(name)
    mapped: dict[str, Tensor] = {}
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as tensors:
            for name in names:
                mapped[name] = _part(tensors, places[name][1], slots[name])
    return mapped


def read_part(place: Place, slot: Slot) -> Tensor | None:
    """The part of one tensor that belongs into the slot; None: the tensor has another shape."""
    file, name = place
    with safe_open(file, framework="pt") as tensors:
        if list(tensors.get_slice(name).get_shape()) != slot.shape:
            return None
        return _part(tensors, name, slot)


def _part(tensors: Any, name: str, slot: Slot) -> Tensor:
    """The part that belongs into the slot, of a tensor of an open file."""
    if slot.is_whole:
        return tensors.get_tensor(name)
    return slot.part_of(tensors.get_slice(name))


def stored_product(
    names: Sequence[str],
    stored: Mapping[str, StoredWeight],
    slots: Mapping[str, Slot],
    *,
    is_permuted: bool = False,
) -> StoredParameter | None:
    """This rank's parts of the weights of a product; where they cannot stay codes together, they
    have no tiles but a reason. None: none of them is quantised.

    Args:
        names: of the weights, one below the other; those that are not in `stored` are plain.
        is_permuted: the order of the outputs changes.
    """
    found = [stored[name].part(*slots[name].indices) for name in names if name in stored]
    quantised = [one for one in found if not one.is_plain]
    if not quantised:
        return None
    if numbers := [one for one in quantised if one.tile is None]:
        reason = numbers[0].reason
    elif len(quantised) < len(names):
        reason = "a part of the same product is not quantised"
    elif is_permuted:
        reason = "its heads turn in part, so their order changes"
    elif (product := StoredParameter([found])).has_tiles:
        return product
    else:
        reason = "parts of the same product do not fit one tile"
    return StoredParameter([[replace(one, tile=None, reason=reason) for one in found]])


def check_quantization(quantization: WeightFormat | None, kept: Iterable[StoredWeight]) -> None:
    """Raise ConfigError if weights that stay codes are to be quantised: a second rounding would add
    its error to that of the first."""
    stored = next(iter(kept), None)
    if quantization is not None and stored is not None:
        raise ConfigError(
            f"quantization {quantization}: this checkpoint is quantised already ({stored.label}), "
            f"and its weights are kept as they are, in {stored.tile} tiles: leave the option out"
        )


def describe(kept: Iterable[tuple[str, str]], dequantised: Iterable[tuple[str, str]]) -> list[str]:
    """Lines for a log: the fate of quantised weights, by label and tile, or by label and the reason
    for none."""
    return [
        *(
            f"{count} weights ({label}) are kept as they are, in {tile} tiles"
            for (label, tile), count in Counter(kept).items()
        ),
        *(
            f"{count} weights ({label}) are dequantised: {reason}"
            for (label, reason), count in Counter(dequantised).items()
        ),
    ]
