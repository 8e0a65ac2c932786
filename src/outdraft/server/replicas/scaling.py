"""How many replicas a load asks for."""

import math
from collections.abc import Sequence


def num_wanted(outstanding: Sequence[float], num_replicas: int, target: float) -> int:
    """As many as it takes for `target` outstanding requests each; at least one.

    Args:
        outstanding: requests of each replica that is known to have told.
        num_replicas: that run; those that have not told yet count as the mean of the others.
    """
    if not outstanding:
        return max(1, num_replicas)
    mean = sum(outstanding) / len(outstanding)
    # A sum of means need not be whole where it should be.
    return max(1, math.ceil(round(mean * max(num_replicas, len(outstanding)) / target, 6)))
