"""The begin and the end of a process. Its OpenMP threads wait for each other within bounds.

A process that another one starts begins with an assignment, and ends with its stdin.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
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


class ChildProcess(subprocess.Popen[bytes]):
    """A Python process that begins with an assignment, and ends with this one, however that ends.

    `assigned`: as `assignment` reads it; `environ`: the whole environment of the process.
    """

    def __init__(self, module: str, assigned: bytes, environ: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", module]
        super().__init__(command, stdin=subprocess.PIPE, env=dict(environ))
        assert self.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: `wait` returns its exit code
            self.stdin.write(assigned)
            self.stdin.flush()

    @property
    def is_stopped(self) -> bool:
        """True while a signal has it stand still."""
        import psutil  # the commands that start no process do without

        with suppress(psutil.Error):  # it has ended
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    def kill(self) -> None:
        """End it, if it still runs, and close its stdin."""
        super().kill()
        assert self.stdin is not None
        with suppress(BrokenPipeError):
            self.stdin.close()


class Silence:
    """Measures for how long another process or thread has shown no sign of life.

    Time in which this process itself stood hardly counts: it finds the signs when it goes on.
    """

    def __init__(self, period_s: float) -> None:
        """`period_s`: between two looks."""
        self._period_s = period_s
        self._silent_s, self._last_s = 0.0, time.monotonic()

    def look(self, *, is_broken: bool) -> float:
        """Return the seconds of silence. `is_broken`: there was a sign since the last look."""
        now_s = time.monotonic()
        passed_s = min(now_s - self._last_s, 2 * self._period_s)
        self._silent_s = 0.0 if is_broken else self._silent_s + passed_s
        self._last_s = now_s
        return self._silent_s


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
