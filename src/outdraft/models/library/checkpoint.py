"""A checkpoint as the transformers library reads it: as if it were plain and whole, and no tensor
before the library asks for it.

Quantised parameters, and those of which a rank needs a part, are then still not read: the library
may stack them, put them below one another, transpose or cut them. All else is computed with their
numbers. What stays codes has a small tensor of random numbers in its place until the network's
products are packed.

Dimension key: X experts, D inputs, E outputs.
"""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from outdraft.core.weights import WeightFormat
from outdraft.kernels.data.coded_weight import Codes
from outdraft.kernels.ops import Kernels
from outdraft.models.checkpoints.reader import Checkpoint
from outdraft.models.checkpoints.slots import describe
from outdraft.models.checkpoints.stored import StoredParameter, StoredWeight, below
from outdraft.models.modules import Linear

_NO_PRODUCT = "no product of this network can read its codes"
_NO_CPU = "tiles are for CPUs"
_logger = logging.getLogger(__name__)


def presented(
    checkpoint: Checkpoint, dtype: torch.dtype, *, keeps_codes: bool, is_cut: bool
) -> dict[str, "PresentedTensor"]:
    """Present a checkpoint to the library's loader.

    Args:
        dtype: of the network.
        keeps_codes: weights whose codes fit tiles are deferred tensors.
        is_cut: so is every weight that could be cut, until it is. Others are dequantised.
    """
    found = _small(checkpoint)
    for name, parameter in _parameters(checkpoint, dtype).items():
        defers = (keeps_codes and parameter.tile is not None) or (is_cut and not parameter.is_stack)
        first = parameter.weights[0]
        # The library converts plain numbers by itself, some of them to another dtype.
        read = first.numbers if first.is_plain else parameter.numbers
        found[name] = PresentedTensor(partial(DeferredTensor, parameter) if defers else read)
    return found


def unread(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, "PresentedTensor"]:
    """Present tensors that stay unread, except small ones and stacks of plain numbers: those have
    no numbers."""
    found = _small(checkpoint)
    for name, weight in checkpoint.weights.items():
        if len(weight.shape) > 2:
            nothing = torch.zeros((), dtype=dtype)
            found[name] = PresentedTensor(partial(nothing.expand, weight.shape))
    for name, parameter in _parameters(checkpoint, dtype).items():
        found[name] = PresentedTensor(partial(DeferredTensor, parameter))
    return found


def log_summary(
    checkpoint: Checkpoint,
    kept: Iterable[StoredWeight],
    dequantised: Iterable[StoredWeight],
    *,
    has_tiles: bool,
) -> None:
    """Log the fate of the quantised weights.

    Args:
        kept: those that are codes, or of which parts are.
        dequantised: others that were deferred, or parts of such.
        has_tiles: the device keeps codes.
    """
    otherwise = _NO_PRODUCT if has_tiles else _NO_CPU
    of_kept = {id(weight.whole or weight): weight for weight in kept}
    reasons = {id(weight.whole or weight): weight.reason for weight in dequantised}
    weights = [
        weight
        for parameter in _parameters(checkpoint, torch.float32).values()
        for weight in parameter.weights
        if id(weight) not in of_kept and not weight.is_plain
    ]
    tiles = [(weight.label, str(weight.tile)) for weight in of_kept.values()]
    lost = [(one.label, reasons.get(id(one)) or one.reason or otherwise) for one in weights]
    for line in describe(tiles, lost):
        _logger.info("%s", line)


class PresentedTensor:
    """Stands for a slice of a safetensors file, of which the library takes all."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def __getitem__(self, place: Any) -> Tensor:
        assert place is Ellipsis, "the library asks for a part"
        return self._read()


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Is true if one of the regular expressions is found in the name of a tensor."""
    return any(re.search(pattern, name) for pattern in patterns)


def _parameters(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, StoredParameter]:
    """The weights that are products."""
    found = {
        name: StoredParameter([[weight]], dtype=dtype)
        for name, weight in checkpoint.weights.items()
        if len(weight.shape) == 2
    }
    return found | {name: replace(one, dtype=dtype) for name, one in checkpoint.stacks.items()}


def _small(checkpoint: Checkpoint) -> dict[str, PresentedTensor]:
    """The weights that are no products, such as norms."""
    return {
        name: PresentedTensor(weight.numbers)
        for name, weight in checkpoint.weights.items()
        if len(weight.shape) != 2
    }


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
    return replace(old, rows_X=[cut(weights, first, stop) for weights in old.rows_X])


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


class CodedParameter(nn.Parameter):
    """A parameter whose codes are to be packed. Its numbers are random, so that passes through the
    network try all of it; they take next to no memory."""

    stored: StoredParameter


def replace_deferred(
    module: nn.Module, can_keep: Callable[[nn.Module, str, StoredParameter], bool]
) -> tuple[list[StoredWeight], list[StoredWeight]]:
    """Replace all deferred tensors of a network by parameters; returns the weights that stay codes,
    and those that are numbers now. All are to be packed, then `read_rest` reads others.

    Args:
        can_keep: whether something packs the codes of this parameter of a module.
    """
    kept, dequantised = list[StoredWeight](), list[StoredWeight]()
    of_tied = dict[int, nn.Parameter]()
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            if not isinstance(weight, DeferredTensor):
                continue
            made, stored = of_tied.get(id(weight)), weight.stored
            if made is None and stored.tile is not None and can_keep(part, name, stored):
                made = CodedParameter(_random_like(stored), requires_grad=False)
                made.stored = stored
                kept += stored.weights
            elif made is None:
                made = nn.Parameter(stored.numbers(), requires_grad=False)
                dequantised += stored.weights
            of_tied[id(weight)] = made
            part.register_parameter(name, made)
    return kept, dequantised


def can_join(weights: Sequence[Tensor]) -> bool:
    """Is true if these make one product: none is codes, or all are and fit one format."""
    kept = [weight.stored for weight in weights if isinstance(weight, CodedParameter)]
    return not kept or (len(kept) == len(weights) and below(kept).tile is not None)


def coded(weights: Sequence[Tensor]) -> Codes | None:
    """The codes of weights one below the other; None: they are numbers."""
    assert can_join(weights), "weights of several kinds"
    kept = [weight.stored for weight in weights if isinstance(weight, CodedParameter)]
    return below(kept).coded() if kept else None


def read_rest(module: nn.Module) -> list[StoredWeight]:
    """Give the numbers to all that was not packed; returns their weights."""
    found = list[StoredWeight]()
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            if isinstance(weight, CodedParameter):
                part.register_parameter(name, nn.Parameter(weight.stored.numbers(), False))
                found += weight.stored.weights
    return found


@dataclass(frozen=True, slots=True)
class Packing:
    """Packs the products of a network; those that are codes stay so.

    Attributes:
        release: gives memory back that was mapped to read them.
    """

    kernels: Kernels
    quantization: WeightFormat | None = None
    release: Callable[[], None] = lambda: None

    def pack(self, linear: Linear, weight: Tensor) -> None:
        """Make a product of this weight of the network; as Linear.pack."""
        codes = coded([weight])
        linear.pack(self.kernels, self.quantization, codes or ())
        if codes is not None:
            self.release()


def _random_like(stored: StoredParameter) -> Tensor:
    """Numbers of that shape; each row is the one before it, moved by one place."""
    generator = torch.Generator().manual_seed(0)
    shape = stored.shape
    numbers = torch.randn(sum(shape), generator=generator) * shape[-1] ** -0.5
    return numbers.to(stored.dtype).as_strided(shape, (1,) * len(shape))
