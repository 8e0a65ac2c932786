"""The begin and the end of a process. Its OpenMP threads wait for each other within bounds.

A process that another one starts begins with an assignment, and ends with its stdin.
"""

import os
import pickle
import signal
import sys
import threading
from collections.abc import MutableMapping
from typing import Any, BinaryIO

SPIN_COUNT = "2000"  # turns; about 0.1 ms
STOOD_STILL = 76  # code of a process that ended itself, since a step of it did not go on
_HINTS = {signal.SIGKILL: ", as the kernel does when memory runs out"}


def prepare_openmp(environ: MutableMapping[str, str]) -> None:
    """Bound how long idle threads spin; without effect once torch is imported.

    GNU's OpenMP lets them spin for several milliseconds. With a busy neighbour on the same cores
    that stalls every matrix product for as long: 12 ms instead of 1 ms was measured. Not to spin
    at all costs a wake-up for each of the hundreds of products of a step, so they spin a little.
    """
    if environ.keys().isdisjoint({"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}):
        environ["GOMP_SPINCOUNT"] = SPIN_COUNT


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
