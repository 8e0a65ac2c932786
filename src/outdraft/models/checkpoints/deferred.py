"""Parameters of a checkpoint that are not read yet: quantised ones, and those of which a rank needs
a part.

A loader of another library may stack such tensors, put them below one another, transpose or cut
them: it gets tensors that are still not read. All else is computed with their numbers. What stays
codes has a small tensor of random numbers in its place until the network's products are packed.

Dimension key: X experts, D inputs, E outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from outdraft.core.weights import WeightFormat
from outdraft.kernels.data.coded_weight import Codes
from outdraft.kernels.ops import Kernels
from outdraft.models.checkpoints.stored import StoredParameter, StoredWeight, below
from outdraft.models.modules import Linear


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
    return replace(old, dtype=dtype or old.dtype)


def _stacked(tensors: Sequence[Tensor], dim: int = 0) -> StoredParameter | None:
    parts = _parts(tensors)
    if dim != 0 or not parts or any(part.is_stack for part in parts):
        return None
    return replace(parts[0], rows_X=[part.rows_X[0] for part in parts], is_stack=True)


def _concatenated(tensors: Sequence[Tensor], dim: int = 0) -> StoredParameter | None:
    parts = _parts(tensors)
    if not parts:
        return None
    first = parts[0]
    if dim % len(first.shape) != len(first.shape) - (1 if first.is_transposed else 2):
        return None
    return below(parts)


def _transposed(x: DeferredTensor, dim0: int, dim1: int) -> StoredParameter | None:
    old = x.stored
    last = len(old.shape)
    if {dim0 % last, dim1 % last} != {last - 1, last - 2}:
        return None
    return replace(old, is_transposed=not old.is_transposed)


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
    cut = _columns if (dim == last) != old.is_transposed else _rows
    rows_X = [cut(weights, first, stop) for weights in old.rows_X]
    return replace(old, rows_X=rows_X)


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
    """The stored parameters of the tensors; none if one is not deferred, or lies otherwise."""
    parts = [one.stored for one in tensors if isinstance(one, DeferredTensor)]
    kinds = {(part.is_stack, part.is_transposed, part.dtype, len(part.rows_X)) for part in parts}
    return parts if len(parts) == len(tensors) and len(kinds) == 1 else []


_aten = torch.ops.aten
_KEPT: dict[Any, Callable[..., StoredParameter | None]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.clone.default: _same,
    _aten._to_copy.default: _converted,
    _aten.stack.default: _stacked,
    _aten.cat.default: _concatenated,
    _aten.transpose.int: _transposed,
    _aten.slice.Tensor: _cut,
}


class DeferredWeights:
    """Parameters of a network that are not read yet.

    In the place of each is one of its shape with random numbers, so that passes through the network
    try all of it; it takes next to no memory. All are to be packed, then `read_rest` reads others.

    Attributes:
        dequantised: weights that were deferred, and are numbers now.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[nn.Parameter, StoredParameter]] = {}
        self.dequantised: list[StoredWeight] = []

    def replace_in(
        self, module: nn.Module, can_keep: Callable[[nn.Module, str, StoredParameter], bool]
    ) -> None:
        """Replace all deferred tensors of a network; those that cannot stay codes are read.

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
                        self.dequantised += stored.weights
                part.register_parameter(name, made)

    @property
    def kept(self) -> list[StoredWeight]:
        """All weights that stay codes."""
        return [weight for _, stored in self._found.values() for weight in stored.weights]

    def stored(self, weight: Tensor) -> StoredParameter | None:
        """The stored parameter that this one stands for; None: it stands for itself."""
        found = self._found.get(id(weight))
        return None if found is None else found[1]

    def can_join(self, weights: Sequence[Tensor]) -> bool:
        """Is true if these make one product: none is codes, or all are and fit one format."""
        kept = [stored for weight in weights if (stored := self.stored(weight)) is not None]
        return not kept or (len(kept) == len(weights) and below(kept).has_tiles)

    def coded(self, weights: Sequence[Tensor]) -> Codes | None:
        """The codes of weights one below the other; None: they are numbers."""
        kept = [stored for weight in weights if (stored := self.stored(weight)) is not None]
        if not kept:
            return None
        assert self.can_join(weights), "weights of several kinds"
        return below(kept).coded()

    def read_rest(self, module: nn.Module) -> None:
        """Give the numbers to all that was not packed."""
        for part in module.modules():
            for name, weight in list(part.named_parameters(recurse=False)):
                if (stored := self.stored(weight)) is not None:
                    part.register_parameter(name, nn.Parameter(stored.numbers(), False))
                    del self._found[id(weight)]


@dataclass(frozen=True, slots=True)
class Packing:
    """Packs the products of a network; those that are codes stay so.

    Attributes:
        deferred: has those that are codes.
        release: gives memory back that was mapped to read them.
    """

    kernels: Kernels
    quantization: WeightFormat | None = None
    deferred: DeferredWeights = field(default_factory=DeferredWeights)
    release: Callable[[], None] = lambda: None

    def pack(
        self, linear: Linear, weights: Sequence[Tensor], parts_ED: Sequence[Tensor] = ()
    ) -> None:
        """Make a product of these weights of the network, one below the other; as Linear.pack."""
        if (coded := self.deferred.coded(weights)) is not None:
            linear.pack_codes(self.kernels, coded, weights[0].dtype)
            self.release()
        else:
            linear.pack(self.kernels, self.quantization, parts_ED)


def _random_like(stored: StoredParameter) -> Tensor:
    """Numbers of that shape; each row is the one before it, moved by one place."""
    generator = torch.Generator().manual_seed(0)
    shape = stored.shape
    numbers = torch.randn(sum(shape), generator=generator) * shape[-1] ** -0.5
    return numbers.to(stored.dtype).as_strided(shape, (1,) * len(shape))
