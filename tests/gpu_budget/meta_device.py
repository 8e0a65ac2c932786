"""A GPU that computes nothing: tensors of torch's meta device, which have shapes and no values.

Code that needs a value raises: `.item()`, `.tolist()`, `bool`, a copy that waits, a shape that
depends on values. So code that runs here never waits for the device. Operators are counted as
launches of kernels, and so are Triton's kernels, which do nothing. A CUDA graph is 1 launch.

An operator counts as 1 launch, though some are several kernels (a sort, a top-k). Allocations,
views and results without elements count as none.
"""

import types
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from outdraft.kernels.triton import graphs

META = torch.device("meta")
PHASES = DRAFT, PASS, CHOOSE, REST = "draft", "pass", "choose", "rest"
# They only name memory. Views are found by their schema.
_NO_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("lift_fresh", "detach", "alias", "_unsafe_view", "_reshape_alias", "resize_", "item"),
}
_TO_HOST, _TO_DEVICE = "copy to the host", "copy to the device"
_PLACES = ("index_put_", "index_copy_", "index_add_", "scatter_", "scatter_add_")  # write a part
_VALUES = {
    *("_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select"),
    *("unique_dim", "_unique", "_unique2", "unique_consecutive", "bincount"),
}


class HostWaitError(Exception):
    """The host would wait for the device."""


@dataclass
class Counts:
    """Launches and bytes by phase.

    Attributes:
        names: launches of each operator or kernel of a phase.
        num_bytes: that torch's operators write; what Triton's kernels write is not known here.
    """

    names: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    num_bytes: Counter[str] = field(default_factory=Counter[str])

    def add(self, phase: str, name: str, num_bytes: int = 0) -> None:
        """Count one launch."""
        self.names.setdefault(phase, Counter())[name] += 1
        self.num_bytes[phase] += num_bytes

    def launches(self) -> tuple[int, ...]:
        """Launches of drafting, of the target's pass, of choosing, and of the rest."""
        return tuple(self.names.get(phase, Counter()).total() for phase in PHASES)


class Device:
    """Counts what is launched while it is `running`, by the phase that it is in."""

    def __init__(self) -> None:
        self._counts = Counts()
        self._phase = REST

    def during(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose launches count for a phase, unless they count for another one."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self._phase = self._phase, name if self._phase == REST else self._phase
            try:
                return function(*args, **kwargs)
            finally:
                self._phase = before

        return run

    def launch(self, name: str, num_bytes: int = 0) -> None:
        """Count one launch."""
        self._counts.add(self._phase, name, num_bytes)

    def capture(self, launch: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Make a graph, as `DeviceCapture`."""
        return lambda: self.launch("graph"), launch()

    @contextmanager
    def running(self) -> Generator[Counts]:
        """Count from 0 what is launched inside."""
        self._counts = Counts()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "Event", _Event)
            patch.setattr(graphs, "DeviceCapture", lambda: self.capture)
            for kind in (JITFunction, InterpretedFunction):
                patch.setattr(kind, "__getitem__", lambda kernel, grid: self._kernel(kernel))
            with _HostCalls(), _Operators(self):
                yield self._counts

    def _kernel(self, kernel: Any) -> Callable[..., None]:
        return lambda *_, **__: self.launch(kernel.fn.__name__)


class _Event:
    """Stands for an event of the device."""

    def record(self) -> None:
        pass


class _HostCalls(TorchFunctionMode):
    """Pins no memory, and refuses tensors that are made of Python's numbers on the device: that
    copies memory which is not pinned, and waits."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        options.pop("pin_memory", None)
        is_made = func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor)
        if is_made and torch.device(options.get("device") or "cpu") == META:
            raise HostWaitError("torch.tensor on the device copies memory that is not pinned")
        return func(*args, **options)


class _Operators(TorchDispatchMode):
    """Counts operators, and refuses those for which the host would wait."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        name = func.overloadpacket.__name__
        given = [one for one in tree_leaves((args, options)) if isinstance(one, Tensor)]
        if name in ("copy_", "_to_copy"):
            found = self._copied(name, args, options)
            if found is not None:
                return found
        if any(one.device == META for one in given):
            _check(name, given)
            if func is torch.ops.aten.repeat_interleave.Tensor and not options.get("output_size"):
                raise HostWaitError("repeat_interleave by numbers of the device, without their sum")
        if func._can_decompose():  # in inference mode these come whole
            with self:
                found = func.decompose(*args, **options)
            if found is not NotImplemented:
                return found
        found = func(*args, **options)
        made = [one for one in tree_leaves(found) if isinstance(one, Tensor)]
        made = [one for one in made if one.device == META and one.numel() > 0]
        is_kernel = bool(made) or (name.startswith("_foreach") and found is None)
        if is_kernel and name not in _NO_KERNEL and not func.is_view:
            written = given[-1:] if name in _PLACES else made
            self._device.launch(name, sum(one.nbytes for one in written))
        return found

    def _copied(self, name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Count a copy between host and device, and refuse one that waits; None: it is none."""
        is_new = name == "_to_copy"
        source = args[0] if is_new else args[1]
        to = torch.device(options.get("device") or source.device) if is_new else args[0].device
        if META not in (to, source.device) or to == source.device:
            return None
        if not is_new and source.dim() == 0 and source.device != META:
            return None  # a number becomes an argument of a kernel
        if not (options.get("non_blocking") or (not is_new and len(args) > 2 and args[2])):
            raise HostWaitError(f"a copy from {source.device} to {to} that waits")
        self._device.launch(_TO_HOST if source.device == META else _TO_DEVICE, source.nbytes)
        if not is_new:
            return args[0]
        return torch.empty_like(source, device=to, dtype=options.get("dtype") or source.dtype)


def _check(name: str, given: Sequence[Tensor]) -> None:
    """Raise HostWaitError for an operator whose result, or whose size, the host must know."""
    if name in _VALUES:
        raise HostWaitError(f"{name} of a tensor of the device")
    if name.startswith("index") and any(one.device != META and one.dim() > 0 for one in given):
        raise HostWaitError(f"{name} with a tensor of the host")
    is_masked = any(one.dtype in (torch.bool, torch.uint8) for one in given[1:-1])
    if name in ("index_put", "index_put_") and is_masked and given[-1].numel() != 1:
        raise HostWaitError(f"{name} by a mask")


def moved(root: Any) -> Any:
    """An object with all tensors inside on the meta device: it, and what it holds, are changed."""
    return _Mover().moved(root)


class _Mover:
    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, Any]] = {}  # also keeps what it has seen alive

    def moved(self, one: Any) -> Any:
        """What stands for an object; itself, if its parts can be changed."""
        if id(one) in self._seen:
            return self._seen[id(one)][1]
        if isinstance(one, torch.device):
            return META if one.type == "cpu" else one
        if isinstance(one, Tensor):
            found = one.detach().to(META)
            if isinstance(one, torch.nn.Parameter):
                found = torch.nn.Parameter(found, requires_grad=False)
            return self._kept(one, found)
        if isinstance(one, tuple):
            parts = [self.moved(part) for part in one]
            if all(new is old for new, old in zip(parts, one, strict=True)):
                return one
            kind: Any = type(one)
            return self._kept(one, kind(*parts) if hasattr(one, "_fields") else kind(parts))
        if isinstance(one, partial):
            made = partial(one.func, *self.moved(one.args), **self.moved(dict(one.keywords)))
            self.moved(one.func)
            return self._kept(one, made)
        self._kept(one, one)
        self._change(one)
        return one

    def _kept(self, one: Any, found: Any) -> Any:
        self._seen[id(one)] = one, found
        return found

    def _change(self, one: Any) -> None:
        """Change the parts of an object."""
        if isinstance(one, type | types.ModuleType | str | bytes | int | float | torch.dtype):
            return
        if isinstance(one, dict):
            for key in list(one):
                one[key] = self.moved(one[key])
        elif isinstance(one, list):
            one[:] = [self.moved(part) for part in one]
        elif isinstance(one, types.MappingProxyType | set | frozenset):
            for part in one.values() if isinstance(one, types.MappingProxyType) else one:
                self.moved(part)
        elif isinstance(one, types.MethodType):
            self.moved(one.__self__)
            self.moved(one.__func__)
        elif isinstance(one, types.FunctionType):
            for cell in one.__closure__ or ():
                try:
                    cell.cell_contents = self.moved(cell.cell_contents)
                except ValueError:  # it is empty
                    continue
        elif type(one).__module__.startswith(("outdraft", "transformers", "torch.nn", "tests")):
            self._change_fields(one)

    def _change_fields(self, one: Any) -> None:
        names = list(getattr(one, "__dict__", ()))
        for kind in type(one).__mro__:
            names += kind.__dict__.get("__slots__", ())
        for name in names:
            try:
                value = object.__getattribute__(one, name)
            except AttributeError:
                continue
            new = self.moved(value)
            if new is not value:
                object.__setattr__(one, name, new)
