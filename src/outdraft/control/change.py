"""Notices that labels no longer fit the chances that were predicted for them."""

import math

FORGETTING = 0.95  # of the past, per step with labels
LIMIT = 3.5  # standard deviations
MIN_VARIANCE = 1.5  # labels that say too little to judge by


class ChangeDetector:
    """A running sum of label minus chance, and its variance if the chances are right."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._variance = 0.0

    def observe(self, excess: float, variance: float) -> bool:
        """Add a step's labels; true if what was learned before should count less.

        excess: the sum of labels minus their chances. variance: the sum of chance * (1 - chance).
        """
        self._sum = FORGETTING * self._sum + excess
        self._variance = FORGETTING**2 * self._variance + variance
        is_change = self._variance > MIN_VARIANCE and abs(self._sum) > LIMIT * math.sqrt(
            self._variance
        )
        if is_change:
            self._sum = self._variance = 0.0
        return is_change
