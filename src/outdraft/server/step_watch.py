"""Notices that a step of rank 0 stands still.

Within a step the other ranks wait for rank 0 only so long, but whoever is stuck in the step itself
does not hear that they have given up. Between two of its messages they wait for ever, since they
cannot tell a step that is being planned from an engine that has nothing to do.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

POLLS = 10  # looks within the time that a step may stand still


class StepWatch:
    """Calls a function, in a thread of its own, when a step has done nothing for too long.

    A step is what happens while the watch is entered, one after the other. Endless loops are seen,
    and devices that never answer; not a call that holds Python's lock for ever.
    """

    def __init__(
        self, num_moves: Callable[[], int], timeout_s: float, on_still: Callable[[], None]
    ) -> None:
        """
        Args:
            num_moves: changes while a step goes on.
            timeout_s: in which it has to change.
        """
        self._num_moves, self._timeout_s, self._on_still = num_moves, timeout_s, on_still
        self._num_steps = 0
        self._is_in_step = False
        self._is_over = threading.Event()

    @contextmanager
    def watching(self) -> Generator[None, None, None]:
        """While it is open, somebody looks."""
        thread = threading.Thread(target=self._look, name="step-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()

    def __enter__(self) -> None:
        self._num_steps += 1
        self._is_in_step = True

    def __exit__(self, *_: object) -> None:
        self._is_in_step = False

    def _look(self) -> None:
        seen, num_still = (0, 0), 0
        while not self._is_over.wait(self._timeout_s / POLLS):
            now = self._num_steps, self._num_moves()
            num_still = num_still + 1 if self._is_in_step and now == seen else 0
            seen = now
            if num_still >= POLLS:
                self._on_still()
                return
