"""Requests add to the metrics what they gain when it is reported, and how they end."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import pytest

from outdraft.core.errors import CapacityError, EngineDeadError, GenerationError
from outdraft.core.sampling import SamplingParams
from outdraft.server.messages import Accepted, Refused
from tests.server.metrics.scripted import (
    PROMPT,
    Exposed,
    Script,
    ScriptedLink,
    metrics,
    supervised,
)


def ended(counted) -> dict[str, float]:
    reasons = ("stop", "length", "abort", "error")
    exposed = Exposed(counted)
    counts = {r: exposed.value("request_success_total", finished_reason=r) for r in reasons}
    return {reason: count for reason, count in counts.items() if count}


def test_a_request_is_timed_from_arrival_to_end():
    counted = metrics()
    script = Script(counted, num_cached=3)
    script.gain(12.0, (1,))
    script.gain(12.5, (4,))
    script.gain(14.0, (2,), ("length",))
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
    counted = metrics()
    script, heard = Script(counted), []
    counted.watchers.append(lambda seconds, is_first: heard.append((seconds, is_first)))
    script.gain(12.0, (1,))
    script.gain(12.5, (4,))
    script.gain(14.0, (2,), ("length",))
    assert heard == [(2.0, True), (0.5, False), (1.5, False)]


def test_sequences_end_each_for_its_reason():
    counted = metrics()
    script = Script(counted, num_sequences=2)
    script.gain(11.0, (1, 1), (None, None))
    script.gain(12.0, (1, 3), ("stop", None))
    script.gain(13.0, (0, 1), (None, "length"))
    assert ended(counted) == {"stop": 1, "length": 1}
    exposed = Exposed(counted)
    assert exposed.histogram("request_generation_tokens") == (1, 7)
    # Two seconds for the longest sequence's four tokens behind its first.
    assert exposed.histogram("request_time_per_output_token_seconds") == (1, 2.0 / 4)


def test_one_token_has_no_time_per_token():
    counted = metrics()
    Script(counted).gain(11.0, (1,), ("stop",))
    exposed = Exposed(counted)
    assert exposed.histogram("request_time_per_output_token_seconds") == (0, 0)
    assert exposed.histogram("inter_token_latency_seconds") == (0, 0)


def test_an_update_without_tokens_is_no_arrival():
    counted = metrics()
    script = Script(counted)
    script.gain(11.0, (0,))
    script.gain(12.0, (1,))
    script.gain(13.0, (0,))
    script.gain(14.0, (1,), ("stop",))
    exposed = Exposed(counted)
    assert exposed.histogram("time_to_first_token_seconds") == (1, 2.0)
    assert exposed.histogram("inter_token_latency_seconds") == (1, 2.0)


def test_preemptions_are_counted_once():
    counted = metrics()
    script = Script(counted)
    script.gain(11.0, (1,), preemptions=1)
    script.gain(12.0, (1,), preemptions=1)
    script.gain(13.0, (1,), ("stop",), preemptions=3)
    assert Exposed(counted).value("num_preemptions_total") == 3


def read(
    happens: Callable[[ScriptedLink], None],
    params: SamplingParams | None = None,
    updates: int | None = None,
):
    """Metrics of a request to which something happens, and the error that its reader got.

    `updates`: after as many, the acceptance included, the reader leaves.
    """
    counted = metrics()

    async def main() -> Exception | None:
        async with supervised(counted) as (client, link):

            async def reading() -> None:
                stream = client.generate("r", PROMPT, params or SamplingParams())
                async with aclosing(stream) as each:
                    number = 0
                    async for _ in each:
                        number += 1
                        if number == updates:
                            break

            task = asyncio.create_task(reading())
            while not link.commands:
                await asyncio.sleep(0)
            happens(link)
            [result] = await asyncio.gather(task, return_exceptions=True)
            assert client.num_unfinished == 0
            return result

    return counted, asyncio.run(main())


def test_a_reader_that_leaves_aborts_what_still_runs():
    counted, error = read(
        lambda link: link.gain((1, 1, 1), ("stop", None, None)), SamplingParams(n=3), updates=1
    )
    assert error is None
    assert ended(counted) == {"stop": 1, "abort": 2}
    assert Exposed(counted).histogram("e2e_request_latency_seconds") == (0, 0)


def test_leaving_at_the_last_update_is_no_abort():
    counted, _ = read(lambda link: link.gain((1,), ("stop",)), updates=1)
    assert ended(counted) == {"stop": 1}


def test_a_reader_that_comes_late_changes_no_times():
    def happens(link: ScriptedLink) -> None:
        for reason in (None, None, "stop"):
            link.gain((1,), (reason,))

    counted, _ = read(happens)
    assert Exposed(counted).histogram("inter_token_latency_seconds")[0] == 2
    assert ended(counted) == {"stop": 1}


def test_a_cancelled_reader_aborts_its_request():
    counted = metrics()

    async def main() -> None:
        async with supervised(counted) as (client, link):
            task = asyncio.ensure_future(anext(client.generate("r", PROMPT, SamplingParams())))
            while not link.commands:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert len(link.commands) == 2  # the second one aborts

    asyncio.run(main())
    assert ended(counted) == {"abort": 1}


def test_a_dead_engine_is_an_error_and_is_passed_on():
    def happens(link: ScriptedLink) -> None:
        link.reports.put_nowait([Accepted(link.request_id)])
        link.has_died.set()

    counted, error = read(happens)
    assert isinstance(error, EngineDeadError)
    assert ended(counted) == {"error": 1}


def test_a_request_to_a_dead_engine_is_an_error():
    counted = metrics()

    async def main() -> None:
        async with supervised(counted) as (client, _):
            client.close("it was closed")
            with pytest.raises(EngineDeadError, match="it was closed"):
                await anext(client.generate("r", PROMPT, SamplingParams(n=2)))

    asyncio.run(main())
    assert ended(counted) == {"error": 2}


@pytest.mark.slow
def test_a_sequence_that_fails_ends_its_request():
    counted, error = read(
        lambda link: link.gain((1, 0), (None, "error")), SamplingParams(n=2, detokenize=False)
    )
    assert isinstance(error, GenerationError)
    assert ended(counted) == {"error": 2}
    assert Exposed(counted).histogram("e2e_request_latency_seconds") == (0, 0)


def test_a_request_that_was_not_accepted_did_not_end():
    counted, error = read(
        lambda link: link.reports.put_nowait([Refused(link.request_id, "capacity", "full")])
    )
    assert isinstance(error, CapacityError)
    assert ended(counted) == {}
