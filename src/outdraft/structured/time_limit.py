"""Runs calls that may take too long in a thread of its own, and gives up waiting for them."""

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

MAX_WALL_S = 20.0  # on a machine that is busy with other things
Result = TypeVar("Result")
_Answer = tuple[Any, BaseException | None]


class TimeLimit:
    """Runs one call at a time; for the use of one thread.

    A call that takes too long cannot be stopped: it is left to its thread, and the next call gets
    another one. So it must hold no lock that others wait for.
    """

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: CPU time where the system reports it, so that other load does not count."""
        self.limit_s = limit_s
        self._thread: _Thread | None = None

    def run(self, function: Callable[[], Result]) -> Result:
        """Call the function; return its result, or raise its error.

        Raises:
            TimeoutError: it takes longer than the limit; it may still run.
        """
        if self._thread is None:
            self._thread = _Thread()
        thread, limit_s = self._thread, self.limit_s
        started_s, started_cpu_s = time.monotonic(), thread.cpu_s()
        thread.calls.put(function)
        while True:
            try:
                result, error = thread.answers.get(timeout=limit_s)
                break
            except Empty:
                is_late = time.monotonic() - started_s > MAX_WALL_S
                if is_late or thread.cpu_s() - started_cpu_s >= limit_s:
                    self._leave()
                    raise TimeoutError(f"it takes more than {limit_s:g} s") from None
        if error is not None:
            raise error
        return result

    def __enter__(self) -> "TimeLimit":
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        """Let the thread end when it has done what it does."""
        if self._thread is not None:
            self._thread.calls.put(None)
            self._thread = None


class _Thread:
    """Takes calls from a queue until None comes."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self.answers: SimpleQueue[_Answer] = SimpleQueue()
        # A daemon: the process does not wait for calls that took too long. (An executor would.)
        self._thread = threading.Thread(target=self._work, name="outdraft-masks", daemon=True)
        self._thread.start()
        self._clock: int | None = None
        if hasattr(time, "pthread_getcpuclockid") and self._thread.ident is not None:
            self._clock = time.pthread_getcpuclockid(self._thread.ident)

    def cpu_s(self) -> float:
        """Its CPU time; the monotonic clock where the system reports none."""
        return time.monotonic() if self._clock is None else time.clock_gettime(self._clock)

    def _work(self) -> None:
        while (function := self.calls.get()) is not None:
            try:
                self.answers.put((function(), None))
            except BaseException as error:
                self.answers.put((None, error))
