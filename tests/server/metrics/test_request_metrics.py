"""What a stream that is read through Metrics.observed adds to the metrics."""

import asyncio
from contextlib import aclosing

import pytest

from outdraft.core.errors import CapacityError, EngineDeadError
from outdraft.core.sampling import SamplingParams
from tests.server.metrics.scripted import (
    PROMPT,
    Exposed,
    Script,
    ScriptedClient,
    metrics,
)


def observed(*entries):
    counted = metrics()
    return counted, ScriptedClient(lambda: list(entries), counted)


async def read(client, params=None, updates: int | None = None) -> list[int]:
    """Tokens of the first sequence after each update; leaves after some updates."""
    seen: list[int] = []
    async with aclosing(client.generate("r", PROMPT, params or SamplingParams())) as stream:
        async for update in stream:
            seen.append(len(update.output.outputs[0].token_ids))
            if len(seen) == updates:
                break
    return seen


def ended(counted) -> dict[str, float]:
    reasons = ("stop", "length", "abort", "error")
    exposed = Exposed(counted)
    counts = {r: exposed.value("request_success_total", finished_reason=r) for r in reasons}
    return {reason: count for reason, count in counts.items() if count}


def test_a_request_is_timed_from_arrival_to_end():
    script = Script(num_cached=3)
    counted, client = observed(
        lambda: script.update(12.0, (1,)),
        lambda: script.update(12.5, (4,)),
        lambda: script.update(14.0, (2,), ("length",)),
    )
    assert asyncio.run(read(client)) == [1, 5, 7]
    exposed = Exposed(counted)
    assert exposed.histogram("time_to_first_token_seconds") == (1, 2.0)
    assert exposed.histogram("inter_token_latency_seconds") == (2, 0.5 + 1.5)
    tpot = exposed.histogram("request_time_per_output_token_seconds")
    assert tpot == (1, pytest.approx(2.0 / 6))
    assert exposed.histogram("e2e_request_latency_seconds") == (1, 4.0)
    assert exposed.histogram("request_queue_time_seconds") == (1, 0.5)
    assert exposed.histogram("request_prompt_tokens") == (1, 4)
    assert exposed.histogram("request_generation_tokens") == (1, 7)
    assert exposed.value("prompt_tokens_total") == 4
    assert exposed.value("prefix_cache_queries_total") == 4
    assert exposed.value("prefix_cache_hits_total") == 3
    assert ended(counted) == {"length": 1}


def test_a_watcher_hears_every_latency_that_the_histograms_count():
    class Listener:
        def __init__(self) -> None:
            self.heard: list[tuple[str, float]] = []

        def first_token(self, ttft_s: float) -> None:
            self.heard.append(("first", ttft_s))

        def more_tokens(self, gap_s: float) -> None:
            self.heard.append(("more", gap_s))

    script = Script()
    counted, client = observed(
        lambda: script.update(12.0, (1,)),
        lambda: script.update(12.5, (4,)),
        lambda: script.update(14.0, (2,), ("length",)),
    )
    listener = Listener()
    counted.watch(listener)
    asyncio.run(read(client))
    assert listener.heard == [("first", 2.0), ("more", 0.5), ("more", 1.5)]


def test_sequences_end_each_for_its_reason():
    script = Script(num_sequences=2)
    counted, client = observed(
        lambda: script.update(11.0, (1, 1), (None, None)),
        lambda: script.update(12.0, (1, 3), ("stop", None)),
        lambda: script.update(13.0, (0, 1), (None, "length")),
    )
    asyncio.run(read(client, SamplingParams(n=2)))
    assert ended(counted) == {"stop": 1, "length": 1}
    exposed = Exposed(counted)
    assert exposed.histogram("request_generation_tokens") == (1, 7)
    # Two seconds for the longest sequence's four tokens behind its first.
    assert exposed.histogram("request_time_per_output_token_seconds") == (1, 2.0 / 4)


def test_one_token_has_no_time_per_token():
    script = Script()
    counted, client = observed(lambda: script.update(11.0, (1,), ("stop",)))
    asyncio.run(read(client))
    exposed = Exposed(counted)
    assert exposed.histogram("request_time_per_output_token_seconds") == (0, 0)
    assert exposed.histogram("inter_token_latency_seconds") == (0, 0)


def test_an_update_without_tokens_is_no_arrival():
    script = Script()
    counted, client = observed(
        lambda: script.update(11.0, (0,)),
        lambda: script.update(12.0, (1,)),
        lambda: script.update(13.0, (0,)),
        lambda: script.update(14.0, (1,), ("stop",)),
    )
    asyncio.run(read(client))
    exposed = Exposed(counted)
    assert exposed.histogram("time_to_first_token_seconds") == (1, 2.0)
    assert exposed.histogram("inter_token_latency_seconds") == (1, 2.0)


def test_preemptions_are_counted_once():
    script = Script()
    counted, client = observed(
        lambda: script.update(11.0, (1,), preemptions=1),
        lambda: script.update(12.0, (1,), preemptions=1),
        lambda: script.update(13.0, (1,), ("stop",), preemptions=3),
    )
    asyncio.run(read(client))
    assert Exposed(counted).value("num_preemptions_total") == 3


def test_a_reader_that_leaves_aborts_what_still_runs():
    script = Script(num_sequences=3)
    counted, client = observed(
        lambda: script.update(11.0, (1, 1, 1), ("stop", None, None)),
        lambda: script.update(12.0, (0, 1, 1), (None, "stop", "stop")),
    )
    asyncio.run(read(client, SamplingParams(n=3), updates=1))
    assert ended(counted) == {"stop": 1, "abort": 2}
    assert client.closed == ["r"]
    assert Exposed(counted).histogram("e2e_request_latency_seconds") == (0, 0)


def test_leaving_at_the_last_update_is_no_abort():
    script = Script()
    counted, client = observed(lambda: script.update(11.0, (1,), ("stop",)))
    asyncio.run(read(client, updates=1))
    assert ended(counted) == {"stop": 1}


def test_a_cancelled_reader_aborts_its_request():
    counted = metrics()

    class Silent(ScriptedClient):
        async def replayed(self, _):
            try:
                await asyncio.Event().wait()
                yield
            finally:
                self.closed.append("r")

    client = Silent(list, counted)

    async def main() -> None:
        task = asyncio.create_task(read(client))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    assert ended(counted) == {"abort": 1}
    assert client.closed == ["r"]


def test_a_dead_engine_is_an_error_and_is_passed_on():
    script = Script()
    counted, client = observed(lambda: script.update(11.0, (1,)), EngineDeadError("gone"))
    with pytest.raises(EngineDeadError, match="gone"):
        asyncio.run(read(client))
    assert ended(counted) == {"error": 1}


def test_a_request_that_was_not_accepted_did_not_end():
    counted, client = observed(CapacityError("full"))
    with pytest.raises(CapacityError):
        asyncio.run(read(client))
    assert ended(counted) == {}
