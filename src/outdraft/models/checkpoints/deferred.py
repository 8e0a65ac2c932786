"""Parameters of a checkpoint that are not read yet: quantised ones, and those of which a rank needs
a part.

A loader of another library may stack such tensors, put them below one another, transpose or cut
them: it gets tensors that are still not read. All else is computed with their numbers. What stays
codes has a small tensor of random numbers in its place until the network's products are packed.

Dimension key: X experts, D inputs, E outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from outdraft.core.weight_format import WeightFormat
from outdraft.kernels.data.block_weight import TILE_OUTPUTS
from outdraft.kernels.data.coded_weight import Codes, joined
from outdraft.kernels.ops import Kernels
from outdraft.models.checkpoints.placing import common_tile
from outdraft.models.checkpoints.stored import StoredWeight
from outdraft.models.modules import Linear


@dataclass(frozen=True, slots=True, eq=False)
class StoredParameter:
    """A parameter [E, D], or of experts [X, E, D], that is made of weights of a checkpoint.

    Attributes:
        rows_X: for each expert its weights, one below the other.
        is_stack: it has a first dimension X.
        is_turned: it is [D, E], or [X, D, E].
        dtype: that of its numbers.
    """

    rows_X: Sequence[Sequence[StoredWeight]]
    is_stack: bool
    is_turned: bool
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the parameter."""
        num_outputs = sum(weight.shape[0] for weight in self.rows_X[0])
        sizes = num_outputs, self.rows_X[0][0].shape[1]
        sizes = (sizes[1], sizes[0]) if self.is_turned else sizes
        return (len(self.rows_X), *sizes) if self.is_stack else sizes

    @property
    def has_tiles(self) -> bool:
        """Whether the codes of all experts fit one tile."""
        return self.tile is not None

    @property
    def coded_bytes(self) -> int:
        """Those of all codes and scales."""
        return sum(weight.coded_bytes for rows in self.rows_X for weight in rows)

    def coded(self, expert: int = 0) -> Codes:
        """The codes of one expert, [E, D]."""
        tile = self.tile
        assert tile is not None, "a parameter of numbers"
        parts = [weight.codes().coded(tile) for weight in self.rows_X[expert]]
        return joined(parts)

    def numbers(self) -> Tensor:
        """The parameter; those of one weight after the other are there twice.

        Those of codes are rounded to bfloat16 where the network has float32, as CausalLM does.
        """
        kept = torch.bfloat16 if self.dtype is torch.float32 else self.dtype
        found = torch.empty(self.shape, dtype=self.dtype)
        stack = found if self.is_stack else found[None]
        for to, weights in zip(stack, self.rows_X, strict=True):
            to_ED = to.T if self.is_turned else to
            sizes = [weight.shape[0] for weight in weights]
            for part_ED, weight in zip(to_ED.split(sizes), weights, strict=True):
                numbers_ED = weight.numbers()
                part_ED.copy_(numbers_ED if weight.is_plain else numbers_ED.to(kept))
        return found

    @property
    def tile(self) -> WeightFormat | None:
        """The format that keeps the codes of all experts; None: there is none."""
        every = [common_tile([(one.tile, one.shape[0]) for one in rows]) for rows in self.rows_X]
        return common_tile([(tile, TILE_OUTPUTS) for tile in every])


class DeferredTensor(Tensor):
    """A tensor on the CPU that stands for a stored parameter."""

    stored: StoredParameter

    @staticmethod
    def __new__(cls: type["DeferredTensor"], stored: StoredParameter) -> "DeferredTensor":
        made = Tensor._make_wrapper_subclass(cls, stored.shape, dtype=stored.dtype)
        made.stored = stored
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keep = _KEPT.get(func)
        stored = keep(*args, **kwargs or {}) if keep is not None else None
        if stored is not None:
            return cls(stored)
        read: tuple[Any, dict[str, Any]] = tree_map_only(
            cls, lambda one: one.stored.numbers(), (args, kwargs or {})
        )
        return func(*read[0], **read[1])


def _same(x: DeferredTensor, **_: Any) -> StoredParameter:
    return x.stored


def _converted(x: DeferredTensor, dtype: torch.dtype | None = None, **others: Any) -> Any:
    if any(value not in (None, False, torch.device("cpu")) for value in others.values()):
        return None
    old = x.stored
    return StoredParameter(old.rows_X, old.is_stack, old.is_turned, dtype or old.dtype)


def _stacked(tensors: Sequence[Tensor], dim: int = 0) -> StoredParameter | None:
    parts = _parts(tensors)
    if dim != 0 or not parts or any(part.is_stack for part in parts):
        return None
    rows_X = [part.rows_X[0] for part in parts]
    return StoredParameter(rows_X, True, parts[0].is_turned, parts[0].dtype)


def _below(tensors: Sequence[Tensor], dim: int = 0) -> StoredParameter | None:
    parts = _parts(tensors)
    if not parts:
        return None
    first = parts[0]
    if dim % len(first.shape) != len(first.shape) - (1 if first.is_turned else 2):
        return None
    experts = zip(*(part.rows_X for part in parts), strict=True)
    rows_X = [[weight for rows in parts for weight in rows] for parts in experts]
    return StoredParameter(rows_X, first.is_stack, first.is_turned, first.dtype)


def _turned(x: DeferredTensor, dim0: int, dim1: int) -> StoredParameter | None:
    old = x.stored
    last = len(old.shape)
    if {dim0 % last, dim1 % last} != {last - 1, last - 2}:
        return None
    return StoredParameter(old.rows_X, old.is_stack, not old.is_turned, old.dtype)


def _cut(
    x: DeferredTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> StoredParameter | None:
    """Some outputs or inputs, of a stack those of all experts."""
    old = x.stored
    last = len(old.shape) - 1
    dim %= last + 1
    if step != 1 or dim < last - 1:
        return None
    first, stop, _ = slice(start, end).indices(old.shape[dim])
    cut = _columns if (dim == last) != old.is_turned else _rows
    rows_X = [cut(weights, first, stop) for weights in old.rows_X]
    return StoredParameter(rows_X, old.is_stack, old.is_turned, old.dtype)


def _columns(weights: Sequence[StoredWeight], first: int, stop: int) -> list[StoredWeight]:
    return [one.part(slice(0, one.shape[0]), slice(first, stop)) for one in weights]


def _rows(weights: Sequence[StoredWeight], first: int, stop: int) -> list[StoredWeight]:
    """Some outputs of weights that lie one below the other."""
    rows, above = list[StoredWeight](), 0
    for one in weights:
        own = slice(max(0, first - above), min(one.shape[0], stop - above))
        if own.start < own.stop:
            rows.append(one.part(own, slice(0, one.shape[1])))
        above += one.shape[0]
    return rows


def _parts(tensors: Sequence[Tensor]) -> list[StoredParameter]:
    """None if one is no deferred tensor, or lies otherwise."""
    parts = [one.stored for one in tensors if isinstance(one, DeferredTensor)]
    kinds = {(part.is_stack, part.is_turned, part.dtype, len(part.rows_X)) for part in parts}
    return parts if len(parts) == len(tensors) and len(kinds) == 1 else []


_aten = torch.ops.aten
_KEPT: dict[Any, Callable[..., StoredParameter | None]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.clone.default: _same,
    _aten._to_copy.default: _converted,
    _aten.stack.default: _stacked,
    _aten.cat.default: _below,
    _aten.transpose.int: _turned,
    _aten.slice.Tensor: _cut,
}


class StandIns:
    """What is in the place of parameters that are not read yet.

    A stand-in has the shape of its parameter and random numbers, so that passes through the network
    try all of it, and takes next to no memory. All are to be packed, then `read_rest` reads others.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[nn.Parameter, StoredParameter]] = {}
        self._given_up: list[StoredWeight] = []

    def put(
        self, module: nn.Module, can_keep: Callable[[nn.Module, str, StoredParameter], bool]
    ) -> None:
        """Into all places of deferred tensors; those that cannot stay codes are read.

        Args:
            can_keep: whether something packs the codes of this parameter of a module.
        """
        of_tied = dict[int, nn.Parameter]()
        for part in module.modules():
            for name, weight in list(part.named_parameters(recurse=False)):
                if not isinstance(weight, DeferredTensor):
                    continue
                made = of_tied.get(id(weight))
                if made is None:
                    stored = weight.stored
                    keeps = stored.has_tiles and can_keep(part, name, stored)
                    numbers = _random_like(stored) if keeps else stored.numbers()
                    made = of_tied[id(weight)] = nn.Parameter(numbers, requires_grad=False)
                    if keeps:
                        self._found[id(made)] = made, stored
                    else:
                        self._given_up += _weights_of(stored)
                part.register_parameter(name, made)

    @property
    def kept(self) -> list[StoredWeight]:
        """All weights that stay codes."""
        return [weight for _, stored in self._found.values() for weight in _weights_of(stored)]

    @property
    def given_up(self) -> list[StoredWeight]:
        """Those that were deferred, and are numbers now."""
        return self._given_up

    def stored(self, weight: Tensor) -> StoredParameter | None:
        """What a parameter stands for; None: for itself."""
        found = self._found.get(id(weight))
        return None if found is None else found[1]

    def can_join(self, weights: Sequence[Tensor]) -> bool:
        """Whether these are one product: none of them is codes, or all are and fit one format."""
        kept = [stored for weight in weights if (stored := self.stored(weight)) is not None]
        if not kept:
            return True
        parts = [(weight.tile, weight.shape[0]) for one in kept for weight in one.rows_X[0]]
        return len(kept) == len(weights) and common_tile(parts) is not None

    def coded(self, weights: Sequence[Tensor]) -> Codes | None:
        """The codes of weights one below the other; None: they are numbers."""
        kept = [stored for weight in weights if (stored := self.stored(weight)) is not None]
        if not kept:
            return None
        assert self.can_join(weights), "weights of several kinds"
        rows = [weight for stored in kept for weight in stored.rows_X[0]]
        return StoredParameter([rows], False, False, kept[0].dtype).coded()

    def read_rest(self, module: nn.Module) -> None:
        """Give the numbers to all that was not packed."""
        for part in module.modules():
            for name, weight in list(part.named_parameters(recurse=False)):
                if (stored := self.stored(weight)) is not None:
                    part.register_parameter(name, nn.Parameter(stored.numbers(), False))
                    del self._found[id(weight)]


@dataclass(frozen=True, slots=True)
class Packing:
    """How the products of a network are packed; those that are codes stay so.

    Attributes:
        stand_ins: has those that are codes.
        release: gives memory back that was mapped to read them.
    """

    kernels: Kernels
    quantization: WeightFormat | None = None
    stand_ins: StandIns = field(default_factory=StandIns)
    release: Callable[[], None] = lambda: None

    def pack(
        self, linear: Linear, weights: Sequence[Tensor], parts_ED: Sequence[Tensor] = ()
    ) -> None:
        """Make a product of these weights of the network, one below the other; as Linear.pack."""
        if (coded := self.stand_ins.coded(weights)) is not None:
            linear.pack_codes(self.kernels, coded, weights[0].dtype)
            self.release()
        else:
            linear.pack(self.kernels, self.quantization, parts_ED)


def _weights_of(stored: StoredParameter) -> list[StoredWeight]:
    return [weight for rows in stored.rows_X for weight in rows]


def _random_like(stored: StoredParameter) -> Tensor:
    """Numbers of that shape; each row is the one before it, moved by one place."""
    generator = torch.Generator().manual_seed(0)
    shape = stored.shape
    numbers = torch.randn(sum(shape), generator=generator) * shape[-1] ** -0.5
    return numbers.to(stored.dtype).as_strided(shape, (1,) * len(shape))
