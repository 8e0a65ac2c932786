"""A process that another one starts: it begins with an assignment, and ends with its stdin."""

import os
import pickle
import signal
import sys
import threading
from typing import Any, BinaryIO

STOOD_STILL = 76  # code of a process that ended itself, since a step of it did not go on
_HINTS = {signal.SIGKILL: ", as the kernel does when memory runs out"}


def ending(code: int) -> str:
    """A process's exit code, or the signal that ended it, in words; `code` as in subprocess."""
    if code == STOOD_STILL:
        return "its process stood still in a step"
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"its process was ended by signal {-code}"
    return f"its process was ended by {number.name}{_HINTS.get(number, '')}"


def assignment() -> Any:
    """Read the assignment that the parent process pickled. From then on the end of stdin ends this
    process. Signals are ignored: the parent handles them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    assigned = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with, args=(sys.stdin.buffer,), daemon=True).start()
    return assigned


def _end_with(stdin: BinaryIO) -> None:
    stdin.read()
    os._exit(1)  # whatever the main thread is doing
