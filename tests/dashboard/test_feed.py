"""The feed keeps a bounded window of right sums, however it is read."""

import asyncio
import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from outdraft.core.decision import Decision, Reason
from outdraft.core.draft import DraftSource
from outdraft.core.plan import PhaseTimes, StepStats
from outdraft.dashboard.feed import SMALLEST_S, Latencies, LiveFeed, Second
from tests.dashboard.steps import facts, stats

FACTS = facts("suffix", num_speculative_tokens=8)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def record(feed: LiveFeed, *steps: StepStats, running: int = 1, waiting: int = 0) -> None:
    feed.record(steps, running, waiting, 0.5)


def test_a_second_adds_up_all_steps_that_were_recorded_in_it():
    clock = Clock()
    feed = LiveFeed(FACTS, clock=clock)
    both = {DraftSource.SUFFIX: 4, DraftSource.MODEL: 2}
    kept = {DraftSource.SUFFIX: 3}
    step = stats(
        emitted=5,
        drafts=2,
        drafted=both,
        accepted=kept,
        begun={DraftSource.SUFFIX: 2},
        times=PhaseTimes(0.01, 0.02, 0.003),
        host_s=0.004,
    )
    record(feed, step, stats(emitted=1))
    clock.now += 0.6
    record(feed, step, running=7, waiting=2)
    clock.now += 1

    (second,) = feed.since()

    assert second.total.num_emitted == 11
    assert second.total.num_steps == 3
    assert second.total.drafted_by_source == {"suffix": 8, "draft_model": 4}
    assert second.total.accepted_by_source == {"suffix": 6}
    told = second.to_json()
    assert told["mean_draft_length"] == 12 / 4
    assert told["acceptance_length"] == 1 + 6 / 4
    assert told["acceptance_length_by_source"] == {"suffix": 1 + 6 / 4}
    assert (second.num_running, second.num_waiting, second.kv_usage) == (7, 2, 0.5)
    assert second.total.draft_s == pytest.approx(0.02)
    assert second.total.verify_s == pytest.approx(0.04)
    assert second.total.sample_s == pytest.approx(0.006)
    assert second.total.host_s == pytest.approx(0.008)


def test_a_second_without_drafts_has_no_lengths():
    second = Second(0)
    second.add(stats(emitted=3))
    assert second.to_json()["mean_draft_length"] is None
    assert second.to_json()["acceptance_length"] is None


def test_a_second_compares_its_speed_with_the_estimate_that_is_newest_in_it():
    clock = Clock()
    feed = LiveFeed(FACTS, clock=clock)
    feed.without_speculation(math.nan)
    clock.now += 1
    record(feed, stats(emitted=30, times=PhaseTimes(0.1, 0.2, 0.05), host_s=0.15))
    feed.without_speculation(20.0)
    feed.without_speculation(25.0)
    clock.now += 2

    first, busy, idle = (second.to_json() for second in feed.since())

    assert first["plain_tokens_per_s"] is None
    assert busy["step_tokens_per_s"] == 60
    assert busy["plain_tokens_per_s"] == 25
    assert idle["step_tokens_per_s"] is None
    assert idle["plain_tokens_per_s"] == 25


def test_latencies_belong_to_the_second_in_which_they_were_told():
    clock = Clock()
    feed = LiveFeed(FACTS, clock=clock)
    feed.latency(0.2, True)
    clock.now += 1
    feed.latency(0.01, False)
    feed.latency(0.04, False)
    clock.now += 1

    first, second = (each.to_json() for each in feed.since())

    assert first["ttft_p50_s"] == first["ttft_p95_s"] == pytest.approx(0.2, rel=0.011)
    assert first["itl_p50_s"] is None
    assert second["ttft_p50_s"] is None
    assert second["itl_p50_s"] == pytest.approx(0.01, rel=0.011)
    assert second["itl_p95_s"] == pytest.approx(0.04, rel=0.011)


@given(
    st.lists(st.floats(1e-4, 1000), min_size=1, max_size=200),
    st.sampled_from([0.05, 0.5, 0.95, 1.0]),
)
def test_a_quantile_is_within_about_one_per_cent_of_the_sorted_list_s(seconds, share):
    latencies = Latencies()
    for each in seconds:
        latencies.add(each)
    exact = sorted(seconds)[max(0, math.ceil(share * len(seconds)) - 1)]
    assert latencies.quantile(share) == pytest.approx(exact, rel=0.011)


def test_latencies_beyond_all_bounds_take_no_more_room():
    latencies = Latencies()
    for each in (0.0, 1e-9, 1e9, 1e12):
        latencies.add(each)
    assert latencies.quantile(0.5) == pytest.approx(SMALLEST_S, rel=0.011)
    assert latencies.quantile(1.0) > 2000


def test_idle_seconds_are_there_and_keep_the_last_gauges():
    clock = Clock()
    feed = LiveFeed(FACTS, clock=clock)
    record(feed, stats(emitted=4), running=3)
    clock.now += 4

    seconds = feed.since()

    assert [second.second for second in seconds] == [100, 101, 102, 103]
    assert [second.total.num_emitted for second in seconds] == [4, 0, 0, 0]
    assert all(second.num_running == 3 for second in seconds)


def test_the_running_second_is_not_shown_before_it_is_over():
    clock = Clock()
    feed = LiveFeed(FACTS, clock=clock)
    record(feed, stats())
    clock.now += 0.99
    assert feed.since() == []


@pytest.mark.parametrize("idle_s", [1, 10_000])
def test_the_history_is_bounded_and_without_gaps(idle_s):
    clock = Clock()
    feed = LiveFeed(FACTS, window_s=5, clock=clock)
    for _ in range(20):
        record(feed, stats(emitted=1))
        clock.now += idle_s

    seconds = feed.since()

    assert len(seconds) == 5
    assert seconds[-1].second == int(clock.now) - 1
    assert all(right.second == left.second + 1 for left, right in pairwise(seconds))


def test_ten_thousand_steps_take_no_more_room_than_one():
    sizes: list[int] = []
    for num_steps in (1, 10_000):
        clock = Clock()
        feed = LiveFeed(FACTS, clock=clock)
        record(feed, *[stats(drafts=1, drafted={DraftSource.NGRAM: 1})] * num_steps)
        clock.now += 1
        sizes.append(len(json.dumps([second.to_json() for second in feed.since()])))
    assert sizes[1] <= sizes[0] + 40  # longer numbers, no more of them


def test_a_stream_gives_the_history_then_every_second_once():
    async def read() -> list[list[int]]:
        clock = Clock()
        feed = LiveFeed(FACTS, clock=clock)
        clock.now += 3
        stream = feed.stream()
        heard = [await anext(stream)]
        for passed in (1.0, 1.0, 5.0):
            clock.now += passed
            record(feed, stats())  # the ring moves while the browser is not listening
            heard.append(await anext(stream))
        return [[second.second for second in seconds] for seconds in heard]

    assert asyncio.run(read()) == [
        [100, 101, 102],
        [103],
        [104],
        [105, 106, 107, 108, 109],
    ]


def test_a_reader_that_fell_far_behind_loses_what_left_the_window_and_no_more():
    async def read() -> list[int]:
        clock = Clock()
        feed = LiveFeed(FACTS, window_s=4, clock=clock)
        clock.now += 1
        stream = feed.stream()
        await anext(stream)
        for _ in range(1000):
            clock.now += 1
            record(feed, stats())
        return [second.second for second in await anext(stream)]

    assert asyncio.run(read()) == [1097, 1098, 1099, 1100]


def test_every_reader_gets_everything():
    async def read() -> list[list[int]]:
        clock = Clock()
        feed = LiveFeed(FACTS, clock=clock)
        clock.now += 1
        streams = [feed.stream() for _ in range(3)]
        for stream in streams:
            await anext(stream)
        clock.now += 2
        return [[second.second for second in await anext(stream)] for stream in streams]

    assert asyncio.run(read()) == [[101, 102]] * 3


def test_closing_the_feed_ends_a_waiting_stream_at_once():
    async def read() -> list[list[Second]]:
        feed = LiveFeed(
            FACTS, clock=Clock()
        )  # a clock that stands still: nothing else wakes the stream
        stream = feed.stream()
        heard = [await anext(stream)]
        asyncio.get_running_loop().call_soon(feed.close)
        async with asyncio.timeout(0.5):
            heard += [seconds async for seconds in stream]
        return heard

    assert asyncio.run(read()) == [[]]


def test_a_second_adds_up_what_was_decided():
    drafting = structs.replace(
        stats(times=PhaseTimes(0.1, 0.3, 0.1), host_s=0.2),
        granted_lengths=(3, 0, 5),
        draft_levels=((DraftSource.SUFFIX, 3, 1), (DraftSource.MODEL, 2, 2)),
        decision=Decision(Reason.GAIN, (), 0.5, 0.1, 0.2, 0.3, 0.5, 4.0, 0.2),
    )
    cheaper = structs.replace(drafting, decision=Decision(Reason.GAIN, (), 0.25))
    held = structs.replace(stats(), granted_lengths=(0, 0), decision=Decision(Reason.NO_GAIN))
    second = Second(0)
    for step in (drafting, cheaper, held, stats()):
        second.add(step)
    told = second.to_json()
    assert told["reasons"] == {"gain": 2, "no_gain": 1}
    assert told["mean_granted_length"] == 16 / 4
    assert told["predicted_step_s"] == pytest.approx(0.6)
    assert told["measured_step_s"] == pytest.approx(0.7)
    assert told["price"] == 0.375
    assert told["acceptance_by_position"] == [1.0, 0.5, 0.0]
