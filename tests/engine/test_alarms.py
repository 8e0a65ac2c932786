"""Alarms are rare while nothing changes, come soon after a change, and are told once."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outdraft.core.decision import Decision, Reason
from outdraft.core.draft import Draft, DraftSource
from outdraft.core.plan import DraftChoice, Work, WorkResult
from outdraft.core.request import BookedWork, Request
from outdraft.core.sampling import SamplingParams
from outdraft.engine.alarms import (
    FRUITLESS_STEPS,
    IDLE_STEPS,
    FallWatch,
    SourceAlarms,
    VerifiedDraft,
)

USUAL, FALLEN = 0.67, 0.52
CONCURRENCY = 8


class Traffic:
    """Requests whose drafts of changing lengths are accepted level by level.

    The further from the text, the less is accepted. `spread`: deviation of requests' chances.
    """

    def __init__(self, seed: int, spread: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.spread = spread
        self.length = 4

    def chance(self, mean: float) -> float:
        if not self.spread:
            return mean
        size = mean * (1 - mean) / self.spread**2 - 1
        return self.rng.betavariate(size * mean, size * (1 - mean))

    def requests(self, watch: FallWatch, mean: float, num: int) -> Iterator[int]:
        """Run so many requests, and yield the number of those that have ended."""
        left: dict[int, list[float]] = {}
        begun = ended = 0
        while ended < num:
            while len(left) < CONCURRENCY and begun < num:
                left[begun] = [self.chance(mean), 5 + self.rng.expovariate(1 / 150)]
                begun += 1
            if self.rng.random() < 0.02:
                self.length = self.rng.randint(1, 7)
            for request in list(left):
                accepted = self.accepted(left[request][0])
                watch.observe(str(request), self.length, accepted)
                left[request][1] -= accepted + 1
                if left[request][1] <= 0:
                    del left[request]
                    watch.finish(str(request))
                    ended += 1
                    yield ended

    def accepted(self, chance: float) -> int:
        accepted = 0
        while accepted < self.length and self.rng.random() < chance * 0.97**accepted:
            accepted += 1
        return accepted


def num_false(seed: int, spread: float, num: int) -> int:
    """Alarms that begin while nothing changes."""
    watch, was_on, begun = FallWatch(), False, 0
    for _ in Traffic(seed, spread).requests(watch, USUAL, num):
        begun += watch.is_on and not was_on
        was_on = watch.is_on
    return begun


def delay(seed: int, spread: float, most: int) -> int:
    """Requests that end after the fall before the alarm; `most` if it does not come."""
    watch, traffic = FallWatch(), Traffic(seed, spread)
    for _ in traffic.requests(watch, USUAL, 300):
        assert not watch.is_on
    for ended in traffic.requests(watch, FALLEN, most):
        if watch.is_on:
            return ended
    return most


@pytest.mark.parametrize("spread", [0.0, 0.13])
def test_six_thousand_requests_of_the_usual_kinds_raise_no_alarm(spread: float):
    assert sum(num_false(seed, spread, 1500) for seed in range(4)) == 0


def test_a_fall_by_fifteen_points_is_told_after_about_twenty_requests():
    delays = sorted(delay(seed, 0.0, 100) for seed in range(10))
    assert delays[5] <= 20
    assert delays[-1] <= 40


def test_where_requests_differ_much_the_same_fall_takes_more_of_them():
    delays = sorted(delay(seed, 0.13, 200) for seed in range(10))
    assert delays[5] <= 60
    assert delays[-1] <= 150


def test_the_alarm_ends_when_acceptance_is_back():
    watch, traffic = FallWatch(), Traffic(1)
    for mean, num, is_on in ((USUAL, 300, False), (FALLEN, 100, True), (USUAL, 200, False)):
        for _ in traffic.requests(watch, mean, num):
            pass
        assert watch.is_on is is_on, mean
    assert watch.evidence == "acceptance is back where it used to be"


def test_what_lasts_becomes_usual():
    watch, traffic = FallWatch(), Traffic(2)
    for mean, num in ((USUAL, 300), (FALLEN, 1000)):
        for _ in traffic.requests(watch, mean, num):
            pass
    assert not watch.is_on
    assert watch.evidence == "what was new has become usual"


def test_a_rise_is_no_alarm():
    watch, traffic = FallWatch(), Traffic(3)
    for mean in (FALLEN, USUAL):
        for _ in traffic.requests(watch, mean, 300):
            assert not watch.is_on


def test_longer_drafts_alone_are_no_fall():
    """A smaller share of drafts of seven is accepted than of drafts of one."""
    watch, rng = FallWatch(), random.Random(0)
    for length in (7, 1, 7) * 3:
        for request in range(100):
            for _ in range(30):
                accepted = 0
                while accepted < length and rng.random() < 0.9 * 0.7**accepted:
                    accepted += 1
                watch.observe(str(request), length, accepted)
            watch.finish(str(request))
            assert not watch.is_on


def draft(accepted: int = 0, source: str = "suffix") -> VerifiedDraft:
    return source, "r", 3, accepted


def test_a_source_that_only_probes_never_drafts():
    alarms = SourceAlarms(["suffix", "eagle3"])
    told = [
        alarm
        for step in range(IDLE_STEPS)
        for alarm in alarms.step(
            [draft(1), *([draft(1, "eagle3")] if step % 64 == 0 else [])] if step % 64 else (),
            is_probe=step % 64 == 0,
        )
    ]
    assert [(a.kind, a.source, a.is_on) for a in told] == [("never_drafts", "eagle3", True)]
    [ends] = alarms.step([draft(1, "eagle3")])
    assert (ends.kind, ends.source, ends.is_on) == ("never_drafts", "eagle3", False)


def test_an_idle_source_is_told_of_once_and_again_after_it_drafted():
    alarms = SourceAlarms(["suffix"])
    begins = [step for step in range(1, 3 * IDLE_STEPS) for _ in alarms.step()]
    assert begins == [IDLE_STEPS]
    alarms.step([draft(1)])
    again = [step for step in range(1, 3 * IDLE_STEPS) for _ in alarms.step()]
    assert again == [IDLE_STEPS]


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 2 * FRUITLESS_STEPS), st.booleans()), max_size=6))
def test_fruitless_steps_are_told_of_when_as_many_followed_one_another(
    runs: list[tuple[int, bool]],
):
    """Each run: so many steps without an accepted draft, ended by one, or by steps of no drafts."""
    alarms, fruitless, is_on = SourceAlarms(["suffix"]), 0, False
    for length, is_ended in runs:
        for _ in range(length):
            fruitless += 1
            told = alarms.step([draft(), draft()])
            assert [alarm.is_on for alarm in told] == [True] * (fruitless == FRUITLESS_STEPS)
            is_on = is_on or fruitless == FRUITLESS_STEPS
        if not is_ended:
            assert not alarms.step()
            continue
        assert [alarm.is_on for alarm in alarms.step([draft(), draft(1)])] == [False] * is_on
        fruitless, is_on = 0, False


ONE = Request("a", [1], SamplingParams(), seed=0, max_model_len=99)


def booked(accepted: int = 0, drafted: int = 2) -> list[BookedWork]:
    """A step of one request with a draft of the suffix source."""
    choice = DraftChoice(DraftSource.SUFFIX, Draft.chain([1] * drafted)) if drafted else None
    result = WorkResult((1,) * (accepted + 1), tuple(range(accepted)), (1,) * drafted)
    return [BookedWork(ONE, Work(0, 0, 1, True, choice), result, result.token_ids)]


def test_an_alarm_is_logged_and_told_once_when_it_begins(caplog):
    alarms = SourceAlarms(["suffix"])
    decision = Decision(Reason.GAIN)
    told = [one for _ in range(FRUITLESS_STEPS + 5) for one in alarms.watch(booked(), decision)]
    assert [(one.kind, one.source, one.is_on) for one in told] == [
        ("none_accepted", "suffix", True)
    ]
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("alarm begins: none accepted of suffix: ")


@pytest.mark.parametrize("decision", [None, Decision(Reason.DISABLED), Decision(Reason.NOT_WANTED)])
def test_steps_in_which_no_source_could_draft_count_for_no_alarm(decision):
    alarms = SourceAlarms(["suffix"])
    assert not any(alarms.watch(booked(drafted=0), decision) for _ in range(IDLE_STEPS + 5))


@pytest.mark.parametrize(("reason", "is_told"), [("network_probe", True), ("gain", False)])
def test_a_source_that_drafts_in_probes_alone_never_drafts(reason, is_told):
    alarms, decision = SourceAlarms(["suffix"]), Decision(Reason(reason))
    told = [one for _ in range(IDLE_STEPS + 5) for one in alarms.watch(booked(1), decision)]
    assert ("never_drafts" in [one.kind for one in told]) == is_told
