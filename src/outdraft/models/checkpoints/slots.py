"""Where the tensors of a checkpoint belong."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outdraft.distributed.vocabulary import VocabularyShard


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Where a tensor belongs, or the part of it that this rank has.

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
    """For the rows of a rank's tokens."""
    assert weight is not None, "the weights are packed"
    return Slot(weight.data, 0, shard.first, shard.num_tokens)


Slots = Iterator[tuple[str, Slot | None]]


def slot_of(tensor: Tensor | None) -> Slot | None:
    """For a tensor that every rank has whole; None: there is no such tensor."""
    return None if tensor is None else Slot(tensor.data)
