"""Runs calls that may take too long in a thread of its own, and gives up waiting for them."""

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

MAX_WALL_S = 20.0  # on a machine that is busy with other things
Result = TypeVar("Result")


class Outcome(NamedTuple):
    """What a call returned, or what it raised."""

    result: Any
    error: BaseException | None


class TimeLimit:
    """Runs one call at a time; for the use of one thread.

    A call that takes too long cannot be stopped: it is left to its thread, and the next call gets
    another one. So it must hold nothing that others wait for.
    """

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: of the CPU's time, where the system tells it; how busy the machine is with
        other things does not count."""
        self.limit_s = limit_s
        self._thread: _Thread | None = None

    def run(self, function: Callable[[], Result]) -> Result:
        """What the function returns, or raises.

        Raises:
            TimeoutError: it takes longer than the limit; it may still run.
        """
        [(result, error)] = self.run_all([function])
        if error is not None:
            raise error
        return result

    def run_all(self, functions: Sequence[Callable[[], Any]]) -> list[Outcome]:
        """Run one function after the other; to hand them over takes as long as for one.

        Returns:
            Their outcomes, up to the first that takes longer than the limit: its error is a
            TimeoutError, it may still run, and those behind it do not.
        """
        if self._thread is None:
            self._thread = _Thread()
        thread, calls = self._thread, _Calls(functions, self._thread.cpu_s)
        thread.calls.put(calls)
        while True:
            try:
                thread.answers.get(timeout=self.limit_s)
                return calls.outcomes
            except Empty:
                if calls.is_late(self.limit_s):
                    break
        self._leave()
        outcomes = calls.leave()
        if len(outcomes) < len(functions):
            late = TimeoutError(f"it takes more than {self.limit_s:g} s")
            outcomes.append(Outcome(None, late))
        return outcomes

    def __enter__(self) -> "TimeLimit":
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        """Let the thread end when it has done what it does."""
        if self._thread is not None:
            self._thread.calls.put(None)
            self._thread = None


class _Calls:
    """What a thread is to do, and what came of it so far."""

    def __init__(self, functions: Sequence[Callable[[], Any]], cpu_s: Callable[[], float]) -> None:
        self.outcomes: list[Outcome] = []
        self._functions, self._cpu_s = functions, cpu_s
        self._started_s, self._started_cpu_s = time.monotonic(), cpu_s()  # of the newest call
        self._lock = threading.Lock()
        self._is_left = False

    def run(self) -> None:
        """All functions, unless somebody leaves them."""
        for function in self._functions:
            with self._lock:
                if self._is_left:
                    return
                self._started_s, self._started_cpu_s = time.monotonic(), self._cpu_s()
            try:
                outcome = Outcome(function(), None)
            except BaseException as error:
                outcome = Outcome(None, error)
            with self._lock:
                if not self._is_left:
                    self.outcomes.append(outcome)

    def is_late(self, limit_s: float) -> bool:
        """Whether the newest call takes longer than that."""
        with self._lock:
            is_late = time.monotonic() - self._started_s > MAX_WALL_S
            return is_late or self._cpu_s() - self._started_cpu_s >= limit_s

    def leave(self) -> list[Outcome]:
        """The outcomes up to now; there will be no more."""
        with self._lock:
            self._is_left = True
            return self.outcomes


class _Thread:
    """Takes calls from a queue until None comes."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[_Calls | None] = SimpleQueue()
        self.answers: SimpleQueue[None] = SimpleQueue()  # one for all calls that came together
        # A daemon: the process does not wait for what was given up. (An executor would.)
        self._thread = threading.Thread(target=self._work, name="outdraft-masks", daemon=True)
        self._thread.start()
        self._clock: int | None = None
        if hasattr(time, "pthread_getcpuclockid") and self._thread.ident is not None:
            self._clock = time.pthread_getcpuclockid(self._thread.ident)

    def cpu_s(self) -> float:
        """What it has computed so far; seconds that go by, where the system does not tell."""
        return time.monotonic() if self._clock is None else time.clock_gettime(self._clock)

    def _work(self) -> None:
        while (calls := self.calls.get()) is not None:
            calls.run()
            self.answers.put(None)
