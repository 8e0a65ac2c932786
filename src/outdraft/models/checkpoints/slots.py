"""Places in a network where the tensors of a checkpoint belong.

All names and shapes are compared before any weight is copied, so a wrong checkpoint fails at once
and by name. Quantised weights of a product, which may fuse several, stay codes or become numbers
together.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from outdraft.core.errors import ConfigError
from outdraft.core.weights import WeightFormat
from outdraft.distributed.vocabulary import VocabularyShard
from outdraft.models.checkpoints.config_json import check_supported
from outdraft.models.checkpoints.files import Place, listed, plain_weights
from outdraft.models.checkpoints.stored import StoredParameter, StoredWeight

_READABLE = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """The place of a tensor in a network, or of the part of it that this rank has.

    Attributes:
        to: a view into the model.
        dim: along which the part is cut out.
        start: where in the whole tensor the part begins.
        whole: size of the whole tensor along `dim`; None: the part is all of it.
        order: int64, the row of the part that each row is to be; None: they stay in order.
    """

    to: Tensor
    dim: int = 0
    start: int = 0
    whole: int | None = None
    order: Tensor | None = None

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

    def numbers(self, weight: StoredWeight) -> Tensor:
        """The numbers of the weight that belong here, as the network keeps them; of plain ones no
        more is read."""
        if not self.is_whole and weight.read_part is not None:
            numbers = weight.read_part(*self.indices)
        else:
            numbers = weight.rounded(self.to.dtype)
            numbers = numbers if self.is_whole else numbers[self.indices]
        return numbers if self.order is None else numbers[self.order]

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


def own_slots(module: nn.Module | None, prefix: str = "") -> dict[str, Slot]:
    """The places of all weights of a module, which every rank has whole, by a prefix and their
    names there; none without a module."""
    weights = () if module is None else module.named_parameters()
    return {prefix + name: Slot(weight.data) for name, weight in weights}


def fill_slots(slots: Mapping[str, Slot], places: Mapping[str, Place]) -> None:
    """Copy tensors to where they belong, after all names and shapes were compared.

    Raises:
        ConfigError: a tensor is missing, unknown, or of another shape.
    """
    weights = plain_weights(places)
    check_slots(slots, weights)
    for name, slot in slots.items():
        slot.to.copy_(slot.numbers(weights[name]))


def check_slots(slots: Mapping[str, Slot], weights: Mapping[str, StoredWeight]) -> None:
    """Check that every slot has a weight of its shape, and that no weight is left.

    Raises:
        ConfigError: something is missing, unknown, of another shape, or of an unreadable dtype.
    """
    if missing := [name for name in slots if name not in weights]:
        raise ConfigError(f"the checkpoint lacks tensors: {listed(missing)}")
    if unknown := [name for name in weights if name not in slots]:
        raise ConfigError(
            f"the checkpoint has tensors that its config.json has no use for: {listed(unknown)}"
        )
    for name, one in weights.items():
        what, dtype = f"tensor {one.name!r}" if one.name else f"weight {name!r}", one.dtype
        if list(one.shape) != slots[name].shape:
            raise ConfigError(
                f"{what} has shape {list(one.shape)}, but config.json asks for {slots[name].shape}"
            )
        if one.is_plain:
            check_supported(dtype, _READABLE, f"{what} has dtype {dtype}, which")


def stored_product(weights: Sequence[StoredWeight], slots: Sequence[Slot]) -> StoredParameter:
    """This rank's parts of the weights of a product, one below the other; where they cannot stay
    codes together, none has a tile, but those that are quantised have a reason."""
    found = [one.part(*slot.indices) for one, slot in zip(weights, slots, strict=True)]
    quantised = [one for one in found if not one.is_plain]
    if numbers := [one for one in quantised if one.tile is None]:
        reason = numbers[0].reason
    elif not quantised:
        reason = ""
    elif len(quantised) < len(found):
        reason = "a part of the same product is not quantised"
    elif any(slot.order is not None for slot in slots):
        reason = "its heads turn in part, so their order changes"
    elif (product := StoredParameter([found])).tile is not None:
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
