"""When plain steps are timed, and when they are tried while drafts pay."""

import pytest

from outdraft.control.outlook import Regime
from outdraft.control.plain_steps import (
    FIRST_PLAIN,
    LARGE,
    RARER,
    TIMED_PLAIN,
    WARM_PLAIN,
    WARM_S,
    PlainSteps,
)
from outdraft.control.probes import plain_interval

LONG_S, SHORT_S = WARM_S, WARM_S / 100  # steps that are warm at once, and as late as any


def timed(steps: PlainSteps, num_plain: int, routine: int = 8) -> list[int]:
    """Which of so many plain steps in a row are timed; the first is 1."""
    numbers = list[int]()
    for number in range(1, num_plain + 1):
        steps.pass_by()
        if steps.wants_time(routine):
            numbers.append(number)
    return numbers


def after_drafts(num_drafting: int, step_s: float = LONG_S) -> PlainSteps:
    steps = PlainSteps()
    steps.warm_up(step_s)
    for _ in range(num_drafting):
        steps.draft()
    return steps


@pytest.mark.parametrize(("step_s", "warm"), [(LONG_S, WARM_PLAIN[0]), (SHORT_S, WARM_PLAIN[1])])
@pytest.mark.parametrize("routine", [8, 32])
def test_a_burst_is_timed_once_it_is_warm_then_one_step_of_a_routine(
    step_s: float, warm: int, routine: int
):
    steps = after_drafts(3, step_s)
    burst = list(range(warm, warm + TIMED_PLAIN + 1))
    later = [number for number in range(routine, 65, routine) if number > burst[-1]]
    assert timed(steps, 64, routine) == burst + later


def test_a_step_that_drafts_ends_a_row():
    steps = after_drafts(0)
    first = timed(steps, 20)
    steps.draft()
    assert timed(steps, 20) == first


def first_interval(gain: float) -> int:
    return round(FIRST_PLAIN * (1 + gain / LARGE))


@pytest.mark.parametrize("num_bursts", [0, 1, 2])
def test_plain_decoding_is_tried_first_soon_then_at_the_interval_of_its_gain(num_bursts: int):
    gain, regime = 0.02, Regime(num_plain_bursts=num_bursts)
    usual = plain_interval(gain, after_drafts(0).burst)
    interval = min(usual, first_interval(gain)) if num_bursts == 0 else usual
    assert not after_drafts(interval - 1).is_due(gain, regime)
    assert after_drafts(interval).is_due(gain, regime)


def test_where_steps_are_short_first_intervals_grow():
    gain, steps = 0.5, after_drafts(0, SHORT_S)
    for num_bursts in range(4):
        usual = plain_interval(gain, steps.burst)
        interval = min(usual, first_interval(gain) * RARER**num_bursts)
        regime = Regime(num_plain_bursts=num_bursts)
        assert not after_drafts(interval - 1, SHORT_S).is_due(gain, regime)
        assert after_drafts(interval, SHORT_S).is_due(gain, regime)


def test_where_steps_are_long_a_plain_step_begins_the_count_anew():
    steps = after_drafts(first_interval(0.5))
    assert steps.is_due(0.5, Regime())
    steps.pass_by()
    assert not steps.is_due(0.5, Regime())


def test_where_steps_are_short_a_burst_does_and_a_plain_step_alone_does_not():
    steps = after_drafts(first_interval(0.5), SHORT_S)
    for _ in range(steps.burst - 1):
        steps.pass_by()
        assert steps.is_due(0.5, Regime())
    steps.pass_by()
    assert not steps.is_due(0.5, Regime())


def test_a_burst_that_is_cut_short_is_not_begun_again_at_once():
    steps = after_drafts(first_interval(0.5), SHORT_S)
    steps.begin_burst()
    steps.pass_by()
    steps.draft()
    assert not steps.is_due(0.5, Regime())


def test_there_plain_decoding_is_tried_also_where_each_second_step_is_plain():
    gain, regime, steps = 0.5, Regime(num_plain_bursts=8), after_drafts(0, SHORT_S)
    for _ in range(-(-plain_interval(gain, steps.burst) // 2)):
        assert not steps.is_due(gain, regime)
        steps.pass_by()
        steps.draft()
    assert steps.is_due(gain, regime)
