"""Runs that take turns of a moment, so that a machine whose speed drifts treats them alike."""

from collections.abc import Callable, Mapping
from random import Random
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

    A run finds the caches as the one before left them: who always followed the heaviest would look
    slower than it is. So the order is drawn anew each time around.

    number: of the round, from which all of its orders follow.
    """
    order, left = Random(number), list(runs)
    while left:
        order.shuffle(left)
        for name in left:
            runs[name].advance(TURN_S)
            if runs[name].is_over:
                on_over(name)
        left = [name for name in left if not runs[name].is_over]
