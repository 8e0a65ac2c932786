# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# torch documents its copy of many tensors at once, but does not export it.
"""Functions of tensors as CUDA graphs: drafts that grow, and rules that verify them.

A graph repeats the launches of one call on the same addresses. So what is given is copied into
tensors that the graph reads. These, and what comes out, lie in memory that all graphs of a function
share, since one runs after the other. Calls are alike, and share a graph, if the shapes of all
tensors and all other parts of the arguments are the same. The first of those that differ in shapes
only is launched as it is, which compiles what it needs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from outdraft.distributed.group import RequestShares
from outdraft.kernels.data.graph_sizes import GRAPH_BYTES
from outdraft.kernels.draft_ops import Capturable, Growth, ModelDrafts, TreeLevels
from outdraft.kernels.ops import Kernels, WarmUps
from outdraft.kernels.triton.graphs import Capture, DeviceCapture, MadeGraphs, PerCache, Replay

_FIXED = (Kernels, RequestShares)  # they are what they are, whatever they hold
_ALIGNED = 256  # bytes

Result = TypeVar("Result")
Shape = tuple[tuple[int, ...], torch.dtype]


class _NoRoomError(Exception):
    """The memory of a function's graphs is too small for one of them."""


@dataclass(frozen=True, slots=True)
class _CallGraph(Generic[Result]):
    inputs: Sequence[Tensor]
    replay: Replay
    result: Result


class _TooLarge:
    """Stands for a graph that there is no room for."""


_TOO_LARGE = _TooLarge()


class CallGraphs(Generic[Result]):
    """The graphs of a function."""

    def __init__(
        self,
        warm_ups: WarmUps,
        capture: Capture | None = None,
        most_bytes: int = GRAPH_BYTES,
    ) -> None:
        """
        Args:
            warm_ups: counts kinds of calls that are new, and graphs.
            capture: what makes graphs; None: that of the device.
            most_bytes: that the arguments and the result of a call may take.
        """
        self._capture = capture or DeviceCapture()
        self._graphs = MadeGraphs[_CallGraph[Result] | _TooLarge](warm_ups)
        self._shared = _GraphMemory(most_bytes)

    def call(
        self,
        function: Callable[..., Result],
        *arguments: object,
        lengths: Sequence[int | None] = (),
    ) -> Result:
        """function(*arguments). What it returns holds until the next call.

        Args:
            function: waits for nothing, and writes to none of its arguments.
            arguments: tensors, dataclasses of such, and what can be compared.
            lengths: by argument, how long its tensors become, so that few graphs are made; None:
                as they are. Zeros follow what is there. (): of all arguments as they are.
        """
        tensors: list[Tensor] = []
        shapes: list[Shape] = []
        kinds: list[object] = []
        for argument, length in zip(arguments, lengths or [None] * len(arguments), strict=True):
            start = len(tensors)
            kinds.append(_parts(argument, tensors))
            shapes += [_shape(one, length) for one in tensors[start:]]

        def moved(inputs: Sequence[Tensor]) -> Callable[[], Result]:
            """The call, over tensors that hold its arguments."""
            _fill(inputs, tensors)
            return lambda: function(*_with_tensors(arguments, iter(inputs)))

        def make() -> _CallGraph[Result] | _TooLarge:
            return self._captured(moved, shapes, tensors[0].device)

        graph = self._graphs.find(tuple(kinds), tuple(shapes), make)
        if isinstance(graph, _CallGraph):
            _fill(graph.inputs, tensors)
            graph.replay()
            return graph.result
        own = [
            one if _shape(one) == shape else one.new_empty(shape[0])
            for one, shape in zip(tensors, shapes, strict=True)
        ]
        return moved(own)()

    def _captured(
        self,
        moved: Callable[[Sequence[Tensor]], Callable[[], Result]],
        shapes: Sequence[Shape],
        device: torch.device,
    ) -> _CallGraph[Result] | _TooLarge:
        try:
            inputs, end = self._shared.tensors(shapes, device)
            call = moved(inputs)
            return _CallGraph(inputs, *self._capture(lambda: self._kept(call(), end)))
        except _NoRoomError:
            return _TOO_LARGE

    def _kept(self, result: Result, start: int) -> Result:
        """A result in the memory of all graphs, from a byte on."""
        tensors: list[Tensor] = []
        _parts(result, tensors)
        shapes = [_shape(one) for one in tensors]
        kept, _ = self._shared.tensors(shapes, tensors[0].device, start)
        _copy_all(tensors, kept)
        return _with_tensors(result, iter(kept))


class GraphedGrowth:
    """The operation `grow`, as CUDA graphs of levels that can be asked of other tensors."""

    def __init__(self, warm_ups: WarmUps) -> None:
        """`warm_ups`: counts kinds of growth that are new, and graphs."""
        self._graphs = PerCache(lambda: CallGraphs[ModelDrafts](warm_ups))

    def __call__(
        self,
        levels: TreeLevels,
        growth: Growth,
        by_levels: Callable[[TreeLevels, Growth], ModelDrafts],
    ) -> ModelDrafts:
        if not isinstance(levels, Capturable):
            return by_levels(levels, growth)

        def grow(tensors: Any, common: Any, its_growth: Growth) -> ModelDrafts:
            return by_levels(levels.rebind(tensors, common), its_growth)

        graphs = self._graphs.of(levels.first_keys_PSGC)
        # Rows that some requests do not want are left out in any case: that is one kind less.
        return graphs.call(grow, *levels.static_inputs(), replace(growth, fewest=0))


class _GraphMemory:
    """Memory of a device, allocated when it is needed first."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._memory: Tensor | None = None

    def tensors(
        self, shapes: Sequence[Shape], device: torch.device, start: int = 0
    ) -> tuple[list[Tensor], int]:
        """Tensors one after the other, and the byte where they end.

        Raises:
            _NoRoomError: they do not fit.
        """
        starts = [start]
        for shape, dtype in shapes:
            num_bytes = math.prod(shape) * dtype.itemsize
            starts.append(starts[-1] + -(-num_bytes // _ALIGNED) * _ALIGNED)
        if starts[-1] > self._num_bytes:
            raise _NoRoomError
        if self._memory is None:
            self._memory = torch.zeros(self._num_bytes, dtype=torch.uint8, device=device)
        found: list[Tensor] = []
        for at, (shape, dtype) in zip(starts, shapes, strict=False):
            num_bytes = math.prod(shape) * dtype.itemsize
            found.append(self._memory[at : at + num_bytes].view(dtype).view(shape))
        return found, starts[-1]


def _parts(value: Any, tensors: list[Tensor]) -> object:
    """The parts in which two values must be equal, besides the shapes of their tensors, which are
    added to the list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.dtype
    if isinstance(value, tuple):
        return tuple([_parts(one, tensors) for one in value])
    names = _open_fields(type(value))
    if names is not None:
        return type(value), tuple([_parts(getattr(value, name), tensors) for name in names])
    return id(value) if isinstance(value, _FIXED) else value


def _with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """A value with other tensors, in the order of `_parts`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple):
        return tuple(_with_tensors(one, tensors) for one in value)
    names = _open_fields(type(value))
    if names is None:
        return value
    return replace(value, **{name: _with_tensors(getattr(value, name), tensors) for name in names})


@cache
def _open_fields(kind: type) -> tuple[str, ...] | None:
    """The names in a dataclass that counts as what it holds; None: a value of that type counts as
    itself."""
    if issubclass(kind, _FIXED) or not is_dataclass(kind):
        return None
    return tuple([one.name for one in fields(kind)])


def _shape(tensor: Tensor, length: int | None = None) -> Shape:
    """The shape of a tensor with this length, or with its own."""
    shape = tuple(tensor.shape)
    return (shape if length is None else (length, *shape[1:])), tensor.dtype


def _fill(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy into tensors that may be longer, and fill these up with zeros; a tensor that is its own
    target stays."""
    starts: list[Tensor] = []
    ends: dict[torch.dtype, list[Tensor]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.shape == source.shape:
            starts.append(target)
            continue
        starts.append(target[: len(source)])
        rest = target[len(source) :]
        if rest.numel():
            ends.setdefault(rest.dtype, []).append(rest)
    _copy_all(sources, starts)
    for rests in ends.values():
        torch._foreach_zero_(rests)


def _copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """One launch for all tensors of a dtype."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for source, target in zip(sources, targets, strict=True):
        if source.numel() and target is not source:
            of_dtype = by_dtype.setdefault(source.dtype, ([], []))
            of_dtype[0].append(target)
            of_dtype[1].append(source)
    for some_targets, some_sources in by_dtype.values():
        torch._foreach_copy_(some_targets, some_sources)
