"""Finds and opens the compiled library for this processor.

There is one for each instruction set, with the same functions; `make lib` compiles them. A small
one for any processor of its kind says which of the others runs. A library carries a digest of the
files in this folder, which say what it is called with: one of another version is refused.
"""

import ctypes
import functools
import hashlib
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outdraft.core.errors import ConfigError, did_you_mean

FOLDER = Path(__file__).parent / "lib"

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
        """That of the Python files it was made for; None: it is older than this question."""
        try:
            return self.function("caller_digest", [], ctypes.c_char_p)().decode()
        except AttributeError:
            return None


def usable_instruction_sets() -> tuple[str, ...]:
    """Those that this processor has and for which there is a library, the fastest one last."""
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
    """As `caller_digest` of build_kernels.py."""
    texts = [(path.name, path.read_bytes()) for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def _path(name: str) -> Path:
    return FOLDER / f"outdraft-{name}.so"


def _architecture() -> str:
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
