"""Finds and opens the compiled library for this processor.

There is one for each instruction set, with the same functions; `make lib` compiles them. A small
one for any processor of its kind says which of the others runs. A library carries a digest of the
files in this folder, which say what it is called with: one of another version is refused.

The threads of a library (`Team`, csrc/team.h) share work of microseconds.
"""

import ctypes
import functools
import hashlib
import mmap
import platform
import time
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

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


class Library:
    """One open library.

    Attributes:
        name: its instruction set.
        keeps_bf16: it multiplies bfloat16 as it is; else numbers become float32 first, or
            integers of 16 bits where they meet codes.

    Raises:
        ConfigError: it was made for another version of the code, which may call it with other
            arguments.
    """

    def __init__(self, name: str, folder: Path = FOLDER) -> None:
        self.name = name
        path = str(folder / f"outdraft-{name}.so")
        # Python waits for its own lock after a call that gave it away, perhaps for milliseconds:
        # calls of microseconds keep it.
        self._keeps_gil, self._releases_gil = ctypes.PyDLL(path), ctypes.CDLL(path)
        if self._caller_digest() != _digest_of_callers():
            raise ConfigError(
                f"the compiled library {path} belongs to another version of the code: in a "
                "checkout run `make lib`, else install outdraft anew"
            )
        self.keeps_bf16 = bool(self.function("linear_keeps_bf16", [], ctypes.c_int32)())

    def function(
        self,
        name: str,
        arguments: Sequence[Any],
        result: Any = None,
        *,
        releases_gil: bool = False,
    ) -> Callable[..., Any]:
        """A function of the library, with the ctypes of its arguments and of its result.

        `releases_gil`: for calls that take longer than some tens of microseconds.
        """
        function = (self._releases_gil if releases_gil else self._keeps_gil)[name]
        function.argtypes, function.restype = list(arguments), result
        return function

    def _caller_digest(self) -> str | None:
        """The digest of the Python files it was made for; None: it is older than this question."""
        try:
            return self.function("caller_digest", [], ctypes.c_char_p)().decode()
        except AttributeError:
            return None


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


@functools.cache
def _digest_of_callers() -> str:
    """The digest that build_kernels.py computes as `caller_digest`."""
    texts = [(path.name, path.read_bytes()) for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(repr(texts).encode()).hexdigest()


class Team:
    """The calling thread and its helpers, which end with this object.

    Attributes:
        address: for the functions of the library.
    """

    def __init__(self, library: Library, num_threads: int) -> None:
        self.library, self.num_threads = library, num_threads
        create = library.function("team_create", [c_int64], c_void_p)
        destroy = library.function("team_destroy", [c_void_p], releases_gil=True)
        self.address: int = create(num_threads)
        end = weakref.finalize(self, destroy, self.address)
        end.atexit = False  # the process ends them


@functools.cache
def shared_team(library_name: str, num_threads: int) -> Team:
    """The team of this process, for a library."""
    library = open_library(library_name)
    assert library is not None
    return Team(library, num_threads)


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
        self._read = function(
            "roofline_read", [c_void_p, c_void_p, c_int64], c_int64, releases_gil=True
        )
        self._multiply = function(
            "roofline_multiply", [c_void_p, c_int64, c_int64], c_int64, releases_gil=True
        )

    def bandwidth(self) -> float:
        """One reading, bytes/s."""
        start_s = self._clock()
        self._read(self._team.address, self._words.ctypes.data, self._num_bytes)
        return self._num_bytes / (self._clock() - start_s)

    def peak(self) -> float:
        """One reading, operations/s."""
        start_s = self._clock()
        operations = self._multiply(self._team.address, int(self._is_bf16), MULTIPLY_UNITS)
        return operations / (self._clock() - start_s)


def _path(name: str) -> Path:
    return FOLDER / f"outdraft-{name}.so"


def _architecture() -> str:
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
