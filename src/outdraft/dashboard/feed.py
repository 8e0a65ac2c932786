"""The last minutes of the engine, second by second, for any number of browsers.

The history is one ring that all browsers share. A browser's stream keeps no queue, only the number
of the last second it has sent, so one that reads slowly costs nothing: it gets what it missed in
one piece, or loses what has left the ring.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from outdraft.core.plan import StepStats
from outdraft.dashboard.second import Second

WINDOW_S = 300


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the page says about the engine, and offers as settings.

    Attributes:
        speculation_methods: sources that a request may name, most preferred first; empty: the
            engine runs without speculation.
        num_speculative_tokens: most drafts a step.
        lossless: False: the engine was told to accept what is plausible.
    """

    model: str
    dtype: str
    device: str
    speculation_methods: Sequence[str]
    num_speculative_tokens: int
    lossless: bool = True


class LiveFeed:
    """Collects the steps' statistics and streams them; all calls from one event loop.

    Args:
        window_s: seconds that are kept.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        facts: EngineFacts,
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

    def first_token(self, ttft_s: float) -> None:
        """A request got its first token, so long after it came."""
        self._advance().ttft.add(ttft_s)

    def more_tokens(self, gap_s: float) -> None:
        """A request got further tokens, so long after the ones before."""
        self._advance().itl.add(gap_s)

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
            await self._wait(now + 1 - self._clock())

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

    async def _wait(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._closed.wait(), max(seconds, 0.0))
        except TimeoutError:
            return
