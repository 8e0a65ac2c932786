"""Places in a network where the tensors of a checkpoint belong.

All names and shapes are compared before any weight is copied, so a wrong checkpoint fails at once
and by name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from outdraft.core.errors import ConfigError
from outdraft.distributed.vocabulary import VocabularyShard
from outdraft.models.checkpoints.files import Place, StoredTensors, listed
from outdraft.models.checkpoints.stored import StoredWeight

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
        if self.is_whole:
            return whole[:]
        end = self.start + self.to.shape[self.dim]
        places = [slice(None)] * self.dim + [slice(self.start, end)]
        return whole[tuple(places)]


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
