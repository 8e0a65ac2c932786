"""Live rules, one request and one level after the other."""

import math
from collections.abc import Sequence

from outdraft.core.decision import LiveStop


def live_lengths(
    margins: Sequence[Sequence[float]],
    wanted: Sequence[int],
    stops: Sequence[LiveStop | None],
    num_host_rows: int = 0,
) -> tuple[list[int], list[list[float]], float]:
    """How far each request drafts, the margins that its rule looks at, and how near the nearest
    survival is to its price.

    Args:
        margins: of each request and each level that it wants.
    """
    lengths, looked = [0] * len(wanted), [list[float]() for _ in wanted]
    survival, is_drafting = [1.0] * len(wanted), [True] * len(wanted)
    num_rows, nearest = num_host_rows, math.inf
    for level in range(max(wanted)):
        for request, stop in enumerate(stops):
            if not is_drafting[request] or level >= wanted[request]:
                continue
            if stop is not None:
                margin = margins[request][level]
                looked[request].append(margin)
                score = stop.weights[level] * margin + stop.biases[level]
                survival[request] /= 1 + math.exp(-score)
                nearest = min(nearest, abs(survival[request] - stop.price))
                if survival[request] < stop.price or num_rows >= stop.row_cap:
                    is_drafting[request] = False
                    continue
            lengths[request] += 1
            num_rows += 1
    return lengths, looked, nearest
