"""Finds and opens the compiled library for this processor.

There is one for each instruction set, with the same functions; `make lib` compiles them. A small
one for any processor of its kind says which of the others runs.

The threads of a library (`Team`, csrc/team.h) share work of microseconds.
"""

import ctypes
import functools
import mmap
import platform
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor

from outdraft.core.errors import ConfigError, did_you_mean

FOLDER = Path(__file__).parent / "lib"
MULTIPLY_UNITS = 256  # of work, in a reading of the most operations

# By architecture, the fastest one last, as build_kernels.py compiles them.
INSTRUCTION_SETS = {
    "x86_64": (
        *("x86-64-v3", "x86-64-v3-vnni", "x86-64-v4", "x86-64-v4-vnni", "x86-64-v4-bf16"),
        "x86-64-v4-amx",
    ),
    "aarch64": ("aarch64", "aarch64-bf16"),
}


_NUMBERS: dict[str, tuple[Any, torch.dtype | None]] = {
    "bool": (ctypes.c_bool, torch.bool),
    "int32": (ctypes.c_int32, torch.int32),
    "uint32": (ctypes.c_uint32, torch.int32),  # a mask of bits
    "int64": (ctypes.c_int64, torch.int64),
    "uint64": (ctypes.c_uint64, None),
    "float32": (ctypes.c_float, torch.float32),
    "float64": (ctypes.c_double, torch.float64),
}


class _KeptAddress(ctypes.c_void_p):
    """An address of a copy, and the copy."""

    kept: object = None


class Pointer:
    """A parameter or a field that is an address, as ctypes converts values for it.

    A tensor stands for the address of its numbers, or of those of a contiguous copy if they are
    only read; so does an array. Numbers in a list become a tensor. A struct has an address, and so
    have structs in a list.
    """

    def __init__(self, kind: str) -> None:
        """`kind`: as in csrc/export.h, such as "const int64*" or "any*"."""
        self._is_read, self._kind = kind.startswith("const "), kind.removeprefix("const ")[:-1]
        _, self._dtype = _NUMBERS.get(self._kind, (None, None))

    def address(self, value: Any) -> tuple[int | None, object]:
        """The address, and what it points to; None is 0, and a number is one already."""
        if isinstance(value, Tensor):
            dtype = self._dtype
            assert dtype is None or value.dtype is dtype, f"expected {dtype}, got {value.dtype}"
            assert value.is_cpu
            if not value.is_contiguous():
                assert self._is_read, "numbers that are written lie apart"
                value = value.contiguous()
            return value.data_ptr(), value
        if value is None or isinstance(value, int):
            return value, None
        if isinstance(value, np.ndarray):
            assert value.flags.c_contiguous, "numbers lie apart"
            assert self._dtype is None or value.dtype.name == self._kind, f"not {self._kind}"
            return value.ctypes.data, value
        if isinstance(value, Struct):
            return ctypes.addressof(value), value
        if isinstance(value, list | tuple) and value and isinstance(value[0], Struct):
            structs = (type(value[0]) * len(value))(*value)
            return ctypes.addressof(structs), (structs, value)
        return self.address(torch.tensor(value, dtype=self._dtype))

    def from_param(self, value: Any) -> ctypes.c_void_p:
        """The address as ctypes passes it on. The caller keeps the value until the call is over."""
        if type(value) is int:
            return ctypes.c_void_p(value)
        address, kept = self.address(value)
        if kept is value or kept is None:
            return ctypes.c_void_p(address)
        found = _KeptAddress(address)
        found.kept = kept
        return found


class Struct(ctypes.Structure):
    """A struct of the library. It keeps alive what its addresses point to.

    Attributes:
        converters: of all fields; None: it is a number.
    """

    converters: ClassVar[dict[str, Pointer | None]] = {}

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[str, object] = {}

    def fill(self, **values: Any) -> None:
        """Set fields. Raises KeyError: one of them is not there."""
        converters = self.converters
        for name, value in values.items():
            if (pointer := converters[name]) is not None:
                value, self._kept[name] = pointer.address(value)
            setattr(self, name, value)


def _number_type(kind: str) -> Any:
    """The type of a number, an address, or some numbers side by side."""
    if kind.endswith("*"):
        return ctypes.c_void_p
    kind, _, length = kind.removesuffix("]").partition("[")
    number, _ = _NUMBERS[kind]
    return number * int(length) if length else number


def _converter(kind: str) -> Any:
    return Pointer(kind) if kind.endswith("*") else _number_type(kind)


def _struct(kind: str, size: int, names: Sequence[str], types: Sequence[str]) -> type[Struct]:
    """The struct whose fields have these types, each with its place in bytes."""
    names = [name.rpartition(".")[2] for name in names]
    kinds, places = zip(*(one.split(",") for one in types), strict=True)
    converters = [Pointer(one) if one.endswith("*") else None for one in kinds]
    fields = list(zip(names, map(_number_type, kinds), strict=True))
    of_names = dict(zip(names, converters, strict=True))
    made = type(kind, (Struct,), {"_fields_": fields, "converters": of_names})
    found = [getattr(made, name).offset for name in names]
    assert (ctypes.sizeof(made), found) == (size, [*map(int, places)]), f"layout of {kind}"
    return made


class Library:
    """One open library.

    It describes itself (csrc/export.h): the types of its functions' arguments, and the fields of
    the structs that they take.

    Attributes:
        name: its instruction set.
        keeps_bf16: it multiplies bfloat16 as it is; else numbers become float32 first, or
            integers of 16 bits where they meet codes.

    Raises:
        ConfigError: it belongs to another version of the code, which may call it with other
            arguments; from `function` and `struct` too.
    """

    def __init__(self, name: str, folder: Path = FOLDER) -> None:
        self.name, self._path = name, str(folder / f"outdraft-{name}.so")
        # Python waits for its own lock after a call that gave it away, perhaps for milliseconds:
        # calls of microseconds keep it.
        self._keeps_gil, self._releases_gil = ctypes.PyDLL(self._path), ctypes.CDLL(self._path)
        self._signatures: dict[str, list[str]] = {}
        self._structs: dict[str, type[Struct]] = {}
        for line in self._interface().splitlines():
            kind, names, *types = line.split(";")
            if kind == "functions":
                signatures = [one.split(",") for one in types]
                self._signatures |= zip(names.split(", "), signatures, strict=True)
            else:
                name, size = kind.split(",")
                self._structs[name] = _struct(name, int(size), names.split(", "), types)
        self.keeps_bf16 = bool(self.function("linear_keeps_bf16")())

    def function(self, name: str, *, releases_gil: bool = False) -> Callable[..., Any]:
        """A function of the library. As an address it takes a number, or None, or anything that
        `Pointer` has one of: a tensor must have the right dtype.

        `releases_gil`: for calls that take longer than some tens of microseconds.
        """
        result, *arguments = self._signatures.get(name) or self._refuse(name)
        function = (self._releases_gil if releases_gil else self._keeps_gil)[name]
        function.argtypes = [_converter(one) for one in arguments]
        function.restype = None if result == "none" else _number_type(result)
        return function

    def struct(self, name: str, **values: Any) -> Struct:
        """A struct with these fields, and zeros; it keeps alive what its addresses point to."""
        made = (self._structs.get(name) or self._refuse(name))()
        try:
            made.fill(**values)
        except KeyError as unknown:
            self._refuse(f"{unknown.args[0]} of {name}")
        return made

    def _interface(self) -> str:
        try:
            function = self._keeps_gil.interface
        except AttributeError:
            self._refuse("interface")
        function.restype = ctypes.c_char_p
        return function().decode()

    def _refuse(self, missing: str) -> NoReturn:
        raise ConfigError(
            f"the compiled library {self._path} belongs to another version of the code, without "
            f"{missing}: in a checkout run `make lib`, else install outdraft anew"
        )


def usable_instruction_sets() -> tuple[str, ...]:
    """Instruction sets of this processor for which there is a library, the fastest one last."""
    selector = _path("cpu")
    if not selector.exists():
        return ()
    bits = ctypes.CDLL(str(selector)).usable_instruction_sets()
    names = enumerate(INSTRUCTION_SETS.get(_architecture(), ()))
    return tuple(name for place, name in names if bits >> place & 1 and _path(name).exists())


def open_library(name: str | None = None) -> Library | None:
    """The library for an instruction set, or the fastest one; None: there is none.

    Raises:
        ConfigError: this processor or this installation does not have that instruction set.
    """
    usable = usable_instruction_sets()
    if name is None:
        return _opened(usable[-1]) if usable else None
    if name not in usable:
        raise ConfigError(f"no kernels for {name!r} run here: {did_you_mean(name, usable)}")
    return _opened(name)


_opened = functools.cache(Library)


class Team:
    """The calling thread and its helpers, which end with this object.

    Attributes:
        address: for the functions of the library.
    """

    def __init__(self, library: Library, num_threads: int) -> None:
        self.library, self.num_threads = library, num_threads
        destroy = library.function("team_destroy", releases_gil=True)
        self.address: int = library.function("team_create")(num_threads)
        end = weakref.finalize(self, destroy, self.address)
        end.atexit = False  # the process ends them


shared_team = functools.cache(Team)  # of this process, for a library


class Limits:
    """Readings of the most bytes a second from memory and operations a second in registers.

    All threads of a team work. Memory is read in huge pages where the system has them. Operations
    are products and sums, two for each pair of numbers.
    """

    def __init__(
        self,
        team: Team,
        *,
        is_bf16: bool,
        read_bytes: int = 1 << 30,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            is_bf16: bfloat16 is multiplied, where the processor can; else float32.
            read_bytes: of a reading; far more than the caches hold.
            clock: seconds.
        """
        self._team, self._is_bf16, self._clock = team, is_bf16, clock
        self._num_bytes = read_bytes
        self._memory = mmap.mmap(-1, read_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._words = np.frombuffer(self._memory, dtype=np.int64)
        self._words[:] = 1
        function = team.library.function
        self._read = function("roofline_read", releases_gil=True)
        self._multiply = function("roofline_multiply", releases_gil=True)

    def bandwidth(self) -> float:
        """One reading, bytes/s."""
        start_s = self._clock()
        self._read(self._team.address, self._words, self._num_bytes)
        return self._num_bytes / (self._clock() - start_s)

    def peak(self) -> float:
        """One reading, operations/s."""
        start_s = self._clock()
        operations = self._multiply(self._team.address, self._is_bf16, MULTIPLY_UNITS)
        return operations / (self._clock() - start_s)


def _path(name: str) -> Path:
    return FOLDER / f"outdraft-{name}.so"


def _architecture() -> str:
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
