# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# torch documents its copy of many tensors at once, but does not export it.
"""Functions of tensors as CUDA graphs: drafts that grow, and rules that verify them.

A graph repeats the launches of one call on the same addresses. So what is given is copied into
tensors that the graph reads, and what comes out is copied from those that it writes. Calls are
alike, and share a graph, if the shapes of all tensors and all other parts of the arguments are the
same. The first of them is launched as it is, which compiles what it needs; the second one becomes a
graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from outdraft.distributed.request_shares import RequestShares
from outdraft.kernels.data.first_times import FirstTimes
from outdraft.kernels.data.graph_sizes import GRAPH_BYTES
from outdraft.kernels.ops import Kernels
from outdraft.kernels.triton.graphs import Capture, DeviceCapture, Replay
from outdraft.kernels.triton.kept_graphs import SecondTimes

_FIXED = (Kernels, RequestShares)  # they are what they are, whatever they hold

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Graph(Generic[Result]):
    inputs: Sequence[Tensor]
    replay: Replay
    result: Result


class CallGraphs(Generic[Result]):
    """The graphs of a function."""

    def __init__(
        self,
        first_times: FirstTimes,
        capture: Capture | None = None,
        most_bytes: int = GRAPH_BYTES,
    ) -> None:
        """
        Args:
            first_times: counts kinds of calls that are new, and graphs.
            capture: what makes graphs; None: that of the device.
            most_bytes: that the arguments of all graphs take together.
        """
        self._capture = capture or DeviceCapture()
        self._graphs = SecondTimes[_Graph[Result]](first_times, most_bytes)

    def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """function(*arguments), in tensors of their own.

        Args:
            function: waits for nothing, and writes to none of its arguments.
            arguments: tensors, dataclasses of such, and what can be compared.
        """
        tensors: list[Tensor] = []
        kind = _parts(arguments, tensors)

        def make() -> _Graph[Result]:
            return self._captured(function, arguments, tensors)

        graph = self._graphs.find(kind, make, tensors)
        if graph is None:
            return function(*arguments)
        _copy_all(tensors, graph.inputs)
        graph.replay()
        return _cloned(graph.result)

    def _captured(
        self,
        function: Callable[..., Result],
        arguments: tuple[object, ...],
        tensors: Sequence[Tensor],
    ) -> _Graph[Result]:
        inputs = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in tensors]
        moved = _with_tensors(arguments, iter(inputs))
        return _Graph(inputs, *self._capture(lambda: function(*moved)))


def _parts(value: Any, tensors: list[Tensor]) -> object:
    """What two values must have in common; their tensors are added to the list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.dtype
    if isinstance(value, tuple):
        return tuple(_parts(one, tensors) for one in value)
    if _is_open(value):
        return type(value), tuple(
            _parts(getattr(value, one.name), tensors) for one in fields(value)
        )
    return id(value) if isinstance(value, _FIXED) else value


def _with_tensors(value: Any, tensors: Any) -> Any:
    """The same value of other tensors, in the order of `_parts`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple):
        return tuple(_with_tensors(one, tensors) for one in value)
    if _is_open(value):
        parts = {
            one.name: _with_tensors(getattr(value, one.name), tensors) for one in fields(value)
        }
        return replace(value, **parts)
    return value


def _cloned(value: Any) -> Any:
    tensors: list[Tensor] = []
    _parts(value, tensors)
    return _with_tensors(value, iter([one.clone() for one in tensors]))


def _is_open(value: object) -> bool:
    """Whether a dataclass counts as what it holds."""
    return is_dataclass(value) and not isinstance(value, (*_FIXED, type))


def _copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """One launch for all tensors of a dtype."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for source, target in zip(sources, targets, strict=True):
        if source.numel():
            of_dtype = by_dtype.setdefault(source.dtype, ([], []))
            of_dtype[0].append(target)
            of_dtype[1].append(source)
    for some_targets, some_sources in by_dtype.values():
        torch._foreach_copy_(some_targets, some_sources)
