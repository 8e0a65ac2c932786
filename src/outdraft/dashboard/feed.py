"""The last minutes of the engine, second by second, for any number of browsers.

The history is one ring that all browsers share. A browser's stream keeps no queue, only the number
of the last second it has sent, so one that reads slowly costs nothing: it gets what it missed in
one piece, or loses what has left the ring.
"""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from outdraft.core.plan import StepStats
from outdraft.engine.stats import StatsTotal

DIGITS = 6  # of a time or a ratio: microseconds
SMALLEST_S = 1e-5  # shorter ones count as this long
GROWTH = 1.02  # of a bucket over the one before it
MOST_BUCKETS = 1000  # past 3,000 s
PHASES = ("draft_s", "verify_s", "sample_s", "host_s")  # of a step's time


class Latencies(Counter[int]):
    """Latencies of any number of requests in little room: counts by bucket.

    Each bucket is a little above the last. A quantile is exact to within half a bucket, about 1 per
    cent.
    """

    def add(self, seconds: float) -> None:
        """Count one."""
        bucket = math.floor(math.log(max(seconds, SMALLEST_S) / SMALLEST_S, GROWTH))
        self[min(bucket, MOST_BUCKETS)] += 1

    def quantile(self, share: float) -> float | None:
        """Seconds that at least this share of all took at most; None before the first."""
        rank = max(1, math.ceil(share * self.total()))
        seen = 0
        for bucket in sorted(self):
            seen += self[bucket]
            if seen >= rank:
                return SMALLEST_S * GROWTH ** (bucket + 0.5)
        return None


@dataclass(slots=True)
class Second:
    """Sums over all steps that were reported within one second.

    Attributes:
        second: of the feed's clock, rounded down.
        num_running, num_waiting, kv_usage: the newest that are known.
        plain_tokens_per_s: the newest estimate without speculation; None before the first token.
        ttft, itl: times to first token, and times between arrivals of a request's later tokens.
        reasons: steps by the reason of their decision.
        granted: requests that were granted drafts, by their number of tokens.
        num_predicted, predicted_s, measured_s: steps with a prediction, and their time.
        num_priced, price: steps with a price, and the sum of the prices.
        reached, accepted: drafts that were as deep, and accepted as deep, by position from 0.
    """

    second: int
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    plain_tokens_per_s: float | None = None
    total: StatsTotal = field(default_factory=StatsTotal)
    ttft: Latencies = field(default_factory=Latencies)
    itl: Latencies = field(default_factory=Latencies)
    reasons: Counter[str] = field(default_factory=Counter[str])
    granted: Counter[int] = field(default_factory=Counter[int])
    num_predicted: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    num_priced: int = 0
    price: float = 0.0
    reached: Counter[int] = field(default_factory=Counter[int])
    accepted: Counter[int] = field(default_factory=Counter[int])

    def add(self, step: StepStats) -> None:
        """Count a step."""
        self.total.add(step)
        self.granted.update(filter(None, step.granted_lengths))
        for _, levels, accepted in step.draft_levels:
            self.reached.update(range(levels))
            self.accepted.update(range(accepted))
        if (decision := step.decision) is None:
            return
        self.reasons[decision.reason] += 1
        if decision.price is not None:
            self.num_priced += 1
            self.price += decision.price
        if decision.is_predicted:
            self.num_predicted += 1
            self.predicted_s += decision.step_s
            self.measured_s += step.step_s

    def followed_by(self, second: int) -> "Second":
        """A later second in which nothing happened yet."""
        return Second(
            second, self.num_running, self.num_waiting, self.kv_usage, self.plain_tokens_per_s
        )

    def to_json(self) -> dict[str, Any]:
        """JSON for the page; accepted are tokens by source, lengths are by the first one to draft.

        An acceptance length has the bonus or recovered token in it. step_tokens_per_s is per second
        of step time, as the estimate is. Means are None where there was nothing.
        """
        total = self.total
        lengths = total.acceptance_length_by_source
        step_s = sum(getattr(total, name) for name in PHASES)
        granted = sum(length * number for length, number in self.granted.items())
        return {
            "second": self.second,
            "tokens_per_s": total.num_emitted,
            "step_tokens_per_s": _mean(total.num_emitted, step_s),
            "plain_tokens_per_s": _rounded(self.plain_tokens_per_s),
            "ttft_p50_s": _rounded(self.ttft.quantile(0.5)),
            "ttft_p95_s": _rounded(self.ttft.quantile(0.95)),
            "itl_p50_s": _rounded(self.itl.quantile(0.5)),
            "itl_p95_s": _rounded(self.itl.quantile(0.95)),
            "steps": total.num_steps,
            "drafts": total.num_drafts,
            "acceptance_length": _rounded(total.acceptance_length if total.num_drafts else None),
            "acceptance_length_by_source": {str(s): round(n, DIGITS) for s, n in lengths.items()},
            "mean_draft_length": _mean(total.num_draft_tokens, total.num_drafts),
            "accepted": {str(source): n for source, n in total.accepted_by_source.items()},
            **{name: round(getattr(total, name), DIGITS) for name in PHASES},
            "kv_usage": round(self.kv_usage, DIGITS),
            "running": self.num_running,
            "waiting": self.num_waiting,
            "reasons": dict(self.reasons),
            "mean_granted_length": _mean(granted, self.granted.total()),
            "predicted_step_s": _mean(self.predicted_s, self.num_predicted),
            "measured_step_s": _mean(self.measured_s, self.num_predicted),
            "price": _mean(self.price, self.num_priced),
            "acceptance_by_position": [
                _mean(self.accepted[position], self.reached[position])
                for position in range(max(self.reached, default=-1) + 1)
            ],
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)


def _mean(total: float, count: float) -> float | None:
    return _rounded(total / count) if count else None


WINDOW_S = 300


class LiveFeed:
    """Collects the steps' statistics and streams them; all calls from one event loop.

    Args:
        facts: about the engine, which the page shows or offers as settings: model, dtype, device,
            speculation_methods, num_speculative_tokens, lossless; see EngineInfo.
        window_s: seconds that are kept.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        facts: Mapping[str, Any],
        *,
        window_s: int = WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.facts = facts
        self._clock = clock
        self._seconds = deque([Second(math.floor(clock()))], maxlen=window_s + 1)
        self._closed = asyncio.Event()

    def record(
        self, steps: Sequence[StepStats], num_running: int, num_waiting: int, kv_usage: float
    ) -> None:
        """Count steps as of now; the numbers of requests and the share of KV blocks are of now."""
        newest = self._advance()
        for step in steps:
            newest.add(step)
        newest.num_running = num_running
        newest.num_waiting = num_waiting
        newest.kv_usage = kv_usage

    def without_speculation(self, tokens_per_s: float) -> None:
        """The estimate as of now, per second of step time; NaN: there is none yet."""
        newest = self._advance()
        newest.plain_tokens_per_s = None if math.isnan(tokens_per_s) else tokens_per_s

    def latency(self, seconds: float, is_first: bool) -> None:
        """A request got its first token, in seconds after it came; or others, after its last."""
        newest = self._advance()
        (newest.ttft if is_first else newest.itl).add(seconds)

    def since(self, second: int | None = None) -> list[Second]:
        """The seconds that are over and come after `second`, oldest first; None: all of them."""
        now = self._advance().second
        return [
            each
            for each in self._seconds
            if each.second < now and (second is None or each.second > second)
        ]

    async def stream(self) -> AsyncIterator[list[Second]]:
        """The whole history at once, then every second as it ends, until the feed is closed."""
        sent: int | None = None
        while not self._closed.is_set():
            seconds = self.since(sent)
            now = self._seconds[-1].second
            if seconds or sent is None:
                yield seconds  # however long this takes, `now` stays
            sent = now - 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), max(now + 1 - self._clock(), 0.0))

    def close(self) -> None:
        """End all streams: a server that waits for its connections would wait for them forever."""
        self._closed.set()

    def _advance(self) -> Second:
        """The current second; those in which nothing was reported are in the ring too."""
        now = math.floor(self._clock())
        newest = self._seconds[-1]
        first_missing = max(newest.second + 1, now - (self._seconds.maxlen or 0))
        for second in range(first_missing, now + 1):
            self._seconds.append(newest.followed_by(second))
        return self._seconds[-1]
