"""Latencies of any number of requests in little room: counts by size, each a little above the last.

A quantile is exact to within half a bucket, about 1 per cent.
"""

import math
from collections import Counter

SMALLEST_S = 1e-5  # shorter ones count as this long
GROWTH = 1.02  # of a bucket over the one before it
MOST_BUCKETS = 1000  # past 3,000 s


class Latencies:
    """Counts by bucket, however many are added."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        """Count one."""
        bucket = math.floor(math.log(max(seconds, SMALLEST_S) / SMALLEST_S, GROWTH))
        self._counts[min(bucket, MOST_BUCKETS)] += 1

    def quantile(self, share: float) -> float | None:
        """Seconds that at least this share of all took at most; None before the first."""
        rank = max(1, math.ceil(share * self._counts.total()))
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= rank:
                return SMALLEST_S * GROWTH ** (bucket + 0.5)
        return None
