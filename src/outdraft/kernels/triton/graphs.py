# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# torch documents its copy of many tensors at once, but does not export it.
"""Functions of tensors as CUDA graphs: one launch instead of some hundreds.

A graph repeats the launches of one call on the same addresses. So what is given is copied into
tensors that the graph reads. These, and what comes out, lie in memory that all graphs of a function
share, since one runs after the other. Calls are alike, and share a graph, if the shapes of all
tensors and all other parts of the arguments are the same. The first of those that differ in shapes
only is launched as it is, which compiles kernels and allocates what libraries need. Later each new
shape becomes a graph at once: to make one takes about as long as its launches would.
"""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from outdraft.distributed.group import RequestShares
from outdraft.kernels.data.graph_sizes import GRAPH_BYTES, MOST_GRAPHS
from outdraft.kernels.ops import Kernels, WarmUps

_FIXED = (Kernels, RequestShares)  # they are what they are, whatever they hold
_ALIGNED = 256  # bytes

Result = TypeVar("Result")
Kept = TypeVar("Kept")
Shape = tuple[tuple[int, ...], torch.dtype]
Replay = Callable[[], object]
# Makes a graph of launches: a function that repeats them, and their results, which it computes
# anew.
Capture = Callable[[Callable[[], Any]], tuple[Replay, Any]]


class Padding(NamedTuple):
    """The size that the tensors of an argument grow to, so that few graphs are made.

    Attributes:
        sizes: of the first dimensions; the others stay.
        value: of the numbers after those that are there.
    """

    sizes: tuple[int, ...] = ()
    value: int = 0


class _NoRoomError(Exception):
    """The memory of a function's graphs is too small for one of them."""


class CallGraphs(Generic[Result]):
    """The graphs of a function. The one that was not called for longest leaves for a new one."""

    def __init__(
        self, warm_ups: WarmUps, capture: Capture | None = None, most_bytes: int = GRAPH_BYTES
    ) -> None:
        """
        Args:
            warm_ups: counts first launches, and graphs that are made.
            capture: what makes graphs; None: that of the device.
            most_bytes: that the arguments and the result of a call may take.
        """
        self._warm_ups, self._capture = warm_ups, capture or DeviceCapture()
        self._launched = set[object]()
        # Inputs, how to repeat the launches, and their result; None: there is no room for it.
        self._graphs: dict[object, tuple[Sequence[Tensor], Replay, Result] | None] = {}
        self._most_bytes = most_bytes
        self._memory: Tensor | None = None  # of a device, allocated when it is needed first

    def call(
        self,
        function: Callable[..., Result],
        *arguments: object,
        paddings: Sequence[Padding] = (),
    ) -> Result:
        """function(*arguments). What it returns holds until the next call.

        Args:
            function: waits for nothing, and writes to none of its arguments.
            arguments: tensors, dataclasses of such, and what can be compared.
            paddings: of each argument; (): all stay as they are.
        """
        tensors, kinds = list[Tensor](), list[object]()
        shapes, values = list[Shape](), list[int]()
        for argument, padding in zip(
            arguments, paddings or [Padding()] * len(arguments), strict=True
        ):
            kinds.append(_parts(argument, tensors))
            for one in tensors[len(shapes) :]:
                rest = tuple(one.shape[len(padding.sizes) :])
                shapes.append(((*padding.sizes, *rest), one.dtype))
                values.append(padding.value)

        def filled(inputs: Sequence[Tensor]) -> Callable[[], Result]:
            """The call, over tensors that hold its arguments."""
            _fill(inputs, tensors, values)
            return lambda: function(*_with_tensors(arguments, iter(inputs)))

        launches = tuple(kinds)
        if launches not in self._launched:
            self._launched.add(launches)
            self._warm_ups.count += 1
        elif graph := self._graph((launches, tuple(shapes)), filled, shapes, tensors[0].device):
            inputs, replay, result = graph
            _fill(inputs, tensors, values)
            replay()
            return result
        own = [
            one if tuple(one.shape) == shape else one.new_empty(shape)
            for one, (shape, _) in zip(tensors, shapes, strict=True)
        ]
        return filled(own)()

    def _graph(
        self,
        kind: object,
        filled: Callable[[Sequence[Tensor]], Callable[[], Result]],
        shapes: Sequence[Shape],
        device: torch.device,
    ) -> tuple[Sequence[Tensor], Replay, Result] | None:
        if kind in self._graphs:
            graph = self._graphs.pop(kind)
        else:
            if len(self._graphs) >= MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            graph = self._captured(filled, shapes, device)
            self._warm_ups.count += 1
        self._graphs[kind] = graph  # the newest is last
        return graph

    def _captured(
        self,
        filled: Callable[[Sequence[Tensor]], Callable[[], Result]],
        shapes: Sequence[Shape],
        device: torch.device,
    ) -> tuple[Sequence[Tensor], Replay, Result] | None:
        def launch() -> Result:
            result, made = call(), list[Tensor]()
            _parts(result, made)
            of_result = [(tuple(one.shape), one.dtype) for one in made]
            kept, _ = self._tensors(of_result, device, end)
            _copy_all(made, kept)
            return _with_tensors(result, iter(kept))

        try:
            inputs, end = self._tensors(shapes, device)
            call = filled(inputs)
            replay, result = self._capture(launch)
            return inputs, replay, result
        except _NoRoomError:
            return None

    def _tensors(
        self, shapes: Sequence[Shape], device: torch.device, start: int = 0
    ) -> tuple[list[Tensor], int]:
        """Tensors of the memory that all graphs share, and the byte where they end.

        Raises:
            _NoRoomError: they do not fit.
        """
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
        end = start + sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes)
        if end > self._most_bytes:
            raise _NoRoomError
        if self._memory is None:
            self._memory = torch.zeros(self._most_bytes, dtype=torch.uint8, device=device)
        found: list[Tensor] = []
        for (shape, dtype), size in zip(shapes, sizes, strict=True):
            found.append(self._memory[start : start + size].view(dtype).view(shape))
            start += -(-size // _ALIGNED) * _ALIGNED
        return found, end


class PerCache(Generic[Kept]):
    """Something for each cache that lives: graphs hold the addresses of the one they read."""

    def __init__(self, make: Callable[[], Kept]) -> None:
        self._make, self._by_keys = make, WeakIdKeyDictionary()

    def of(self, keys_PSGC: Tensor) -> Kept:
        """`keys_PSGC`: of the cache's first layer."""
        if keys_PSGC not in self._by_keys:
            self._by_keys[keys_PSGC] = self._make()
        return cast(Kept, self._by_keys[keys_PSGC])


class DeviceCapture:
    """Makes CUDA graphs whose passing results share memory: no two of them run at once."""

    def __init__(self) -> None:
        self._pool: Any = None  # a handle
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, launch: Callable[[], Result]) -> tuple[Replay, Result]:
        """Capture the launches. Their results are not there before the first replay.

        `torch.cuda.graph` would wait for the device and give all spare memory back each time.
        """
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        graph, was_on = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # to destroy an old graph would spoil the one that is made
        try:
            with torch.cuda.stream(self._stream):
                # Kernels may be loaded meanwhile, and other threads may allocate and copy.
                graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
                try:
                    results = launch()
                finally:
                    graph.capture_end()
        finally:
            if was_on:
                gc.enable()
        return graph.replay, results


def _parts(value: Any, tensors: list[Tensor]) -> object:
    """The parts in which two values must be equal, besides the shapes of their tensors, which are
    added to the list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.dtype
    if isinstance(value, tuple):
        return type(value), tuple([_parts(one, tensors) for one in value])
    names = _open_fields(type(value))
    if names is not None:
        return type(value), tuple([_parts(getattr(value, name), tensors) for name in names])
    return id(value) if isinstance(value, _FIXED) else value


def _with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """A value with other tensors, in the order of `_parts`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple):
        parts = [_with_tensors(one, tensors) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
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


def _fill(targets: Sequence[Tensor], sources: Sequence[Tensor], values: Sequence[int]) -> None:
    """Copy into tensors that may be larger, and fill these up with a value; a tensor that is its
    own target stays."""
    starts: list[Tensor] = []
    for target, source, value in zip(targets, sources, values, strict=True):
        if target.shape != source.shape:
            is_longer = target.shape[1:] == source.shape[1:]
            (target[len(source) :] if is_longer else target).fill_(value)
            target = target[tuple(map(slice, source.shape))]
        starts.append(target)
    _copy_all(sources, starts)


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
