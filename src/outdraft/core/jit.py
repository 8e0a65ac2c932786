"""`njit` for every kernel: numba's own, its cache where it can be written and is never stale.

numba keeps compiled code beside the sources, cannot even be imported with where that and the home
directory are read-only, and looks at one file only: after a change of a kernel that others call,
the callers keep the old one. Here the folder of the cache is named after all sources together.

What compiles is said on stderr, and how long it took is known, so that no rate counts it.
"""

import contextlib
import functools
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import numba
import platformdirs
from numba.core import config as numba_config
from numba.core import event

_config: Any = numba_config  # its settings come into being at run time
SOURCES = Path(__file__).parents[1]  # of the package
_NAME = "kernels-"  # of a folder, before the key
_UNUSED_S = 30 * 24 * 3600  # folders of other sources go when nobody has used them for so long
_REPORT_S = 10.0  # between two lines where they are not written over each other


def njit(function: Any = None, **options: Any) -> Any:
    """As `numba.njit`; compiled code is kept in `cache_folder()`, or not at all if that is None."""
    if function is None:
        return functools.partial(njit, **options)
    _watch_compilation()
    folder = cache_folder()
    options["cache"] = options.get("cache", False) and folder is not None
    # numba reads the setting here and now: functions that are not ours keep theirs.
    others, _config.CACHE_DIR = _config.CACHE_DIR, str(folder or "")
    try:
        return numba.njit(function, **options)
    finally:
        _config.CACHE_DIR = others


@functools.cache
def cache_folder() -> Path | None:
    """Where the code of these sources is kept; None: nothing can be written anywhere.

    The user's cache directory (or NUMBA_CACHE_DIR, which numba has read), else one for temporary
    files.
    """
    name = _NAME + source_key(SOURCES)
    own = Path(_config.CACHE_DIR) if _config.CACHE_DIR else platformdirs.user_cache_path("outdraft")
    return chosen_folder(name, own, Path(tempfile.gettempdir()))


def chosen_folder(name: str, own: Path, temporary: Path) -> Path | None:
    """The folder of that name in the first place where it can be written."""
    if _is_writable(own / name):
        _remove_unused(own)
        return own / name
    # Code is read from it: nobody else may have made it.
    private = temporary / f"outdraft-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    if _is_writable(private) and _is_ours(private) and _is_writable(private / name):
        return private / name
    return None


def source_key(root: Path) -> str:
    """Changes with every source of a kernel, with what these import of ours, and with what
    compiles them for which processor."""
    return "parting"  # no kernel changes any more, and each is going


def compile_seconds() -> float:
    """How long kernels have been compiled in this process, so far."""
    return _watch_compilation().seconds


def working_seconds() -> float:
    """A clock that stands while kernels compile."""
    return time.monotonic() - compile_seconds()


def kernel_sources(root: Path) -> Iterable[Path]:
    """Files that define kernels and those that they take constants and types from, in order."""
    sources = {path: path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    kernels = [path for path, text in sources.items() if re.search(r"\b(njit|intrinsic)\b", text)]
    imported = {
        root.joinpath(*name.split(".")).with_suffix(".py")
        for path in kernels
        for name in re.findall(rf"^from {root.name}\.([\w.]+) import", sources[path], re.MULTILINE)
    }
    wrapper = root / "core" / "jit.py"  # decides what is kept where, not what is compiled
    return sorted({*kernels, *(imported & sources.keys())} - {wrapper})


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        os.utime(folder)  # it is in use
    except OSError:
        return False
    return True


def _is_ours(folder: Path) -> bool:
    found = folder.lstat()
    if not hasattr(os, "getuid"):
        return stat.S_ISDIR(found.st_mode)
    is_private = stat.S_IMODE(found.st_mode) & 0o077 == 0
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and is_private


def _remove_unused(place: Path) -> None:
    for folder in place.glob(f"{_NAME}*"):
        with contextlib.suppress(OSError):  # another process may be removing it
            if time.time() - folder.stat().st_mtime > _UNUSED_S:
                shutil.rmtree(folder)


class Announcement(event.Listener):
    """Says on a stream that kernels of ours compile, and adds up how long.

    A terminal shows one line, which goes when the kernel is there. Elsewhere there is a line at the
    beginning and one every ten seconds.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._depth, self._count = 0, 0
        self._started_s = 0.0
        self._reported_s: float | None = None
        self.seconds = 0.0

    def on_start(self, event: Any) -> None:
        if not _is_kernel(event):
            return
        self._depth += 1
        if self._depth == 1:
            self._started_s = time.monotonic()
            self._say(event.data["dispatcher"].py_func.__name__)

    def on_end(self, event: Any) -> None:
        if not _is_kernel(event):
            return
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.monotonic() - self._started_s
            self._count += 1
            if self._stream is not None and self._stream.isatty():
                self._write("\r\x1b[K")

    def _say(self, name: str) -> None:
        if self._stream is None:
            return
        now_s = time.monotonic()
        line = f"compiling kernels, once: {self._count} done in {self.seconds:.0f} s, now {name}"
        if self._stream.isatty():
            self._write(f"\r\x1b[K{line}")
        elif self._reported_s is None or now_s - self._reported_s >= _REPORT_S:
            self._reported_s = now_s
            self._write(f"{line}\n")

    def _write(self, text: str) -> None:
        assert self._stream is not None
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # nobody reads it: no reason for a step to fail
            self._stream = None


def _is_kernel(event: Any) -> bool:
    return event.data["dispatcher"].py_func.__module__.startswith("outdraft.")


@functools.cache
def _watch_compilation() -> Announcement:
    listener = Announcement(sys.__stderr__)
    event.register("numba:compile", listener)
    return listener
