"""Runs that take turns of a moment, so that a machine whose speed drifts treats them alike."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

TURN_S = 0.1  # that one runs before the others do


class Run(Protocol):
    """Work that can be done bit by bit."""

    @property
    def is_over(self) -> bool: ...

    def advance(self, seconds: float) -> None:
        """Take steps for so long, or until it is over."""
        ...


def take_turns(
    runs: Mapping[str, Run], number: int, on_over: Callable[[str], object] = lambda name: None
) -> None:
    """Advance all runs in turn until each is over; `on_over` is told which one is.

    number: of the round; everybody is first in turn, so nobody always runs behind the same one.
    """
    turns = deque(runs)
    turns.rotate(-number)
    while turns:
        name = turns.popleft()
        runs[name].advance(TURN_S)
        if runs[name].is_over:
            on_over(name)
        else:
            turns.append(name)
