"""Runs calls that may take too long in a thread of its own, and gives up waiting for them."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

MAX_WALL_S = 20.0  # on a machine that is busy with other things
Result = TypeVar("Result")
_Call = tuple[Callable[[], Any], Future[Any]]


class TimeLimit:
    """Runs one call at a time; for the use of one thread.

    A call that takes too long cannot be stopped: it is left to its thread, and the next call gets
    another one. So it must hold no lock that others wait for.
    """

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: of CPU time, so that other load does not count."""
        self.limit_s = limit_s
        self._calls: SimpleQueue[_Call | None] | None = None  # of the thread; None: there is none
        self._clock = 0  # of its CPU time

    def run(self, function: Callable[[], Result]) -> Result:
        """Call the function; return its result, or raise its error.

        Raises:
            TimeoutError: it takes longer than the limit; it may still run.
        """
        calls = self._calls or self._start()
        started_s, started_cpu_s = time.monotonic(), time.clock_gettime(self._clock)
        answer: Future[Result] = Future()
        calls.put((function, answer))
        while True:
            try:
                return answer.result(timeout=self.limit_s)
            except TimeoutError:
                if answer.done():
                    raise  # the function's own
                is_late = time.monotonic() - started_s > MAX_WALL_S
                if is_late or time.clock_gettime(self._clock) - started_cpu_s >= self.limit_s:
                    self.close()
                    raise TimeoutError(f"it takes more than {self.limit_s:g} s") from None

    def _start(self) -> SimpleQueue[_Call | None]:
        self._calls = calls = SimpleQueue[_Call | None]()
        # A daemon: the process does not wait for calls that took too long. (An executor would.)
        name = "outdraft-masks"
        thread = threading.Thread(target=_work, args=(calls,), name=name, daemon=True)
        thread.start()
        assert thread.ident is not None
        self._clock = time.pthread_getcpuclockid(thread.ident)
        return calls

    def close(self) -> None:
        """Let the thread end when it has done what it does."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


def _work(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        function, answer = call
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)
