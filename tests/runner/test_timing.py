"""Phases of a step, by a clock that ticks as it is told."""

import pytest
import torch

from outdraft.core.plan import PhaseTimes
from outdraft.kernels.ops import WarmUps
from outdraft.runner import results as timing
from outdraft.runner.results import PhaseClock
from tests.oracle.engines import engine, greedy, prompts_of, run


def times_of(monkeypatch: pytest.MonkeyPatch, *ticks: float) -> PhaseTimes:
    left = list(ticks)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: left.pop(0))
    clock = PhaseClock(torch.device("cpu"), WarmUps())
    for _ in ticks:
        clock.mark()
    return clock.times()


def test_phases_lie_between_marks(monkeypatch):
    assert times_of(monkeypatch, 1.0, 1.5, 3.5, 4.5) == PhaseTimes(0.5, 2.0, 1.0)


def test_keeping_states_is_a_part_of_what_follows_the_pass(monkeypatch):
    times = times_of(monkeypatch, 1.0, 1.5, 3.5, 4.5, 4.75)
    assert times == PhaseTimes(0.5, 2.0, 1.25, 0.25)
    assert times.plain_target_s == 3.0


def test_what_is_done_once_is_told():
    warm_ups, told = WarmUps(), list[bool]()
    for times in (0, 1, 0, 2):
        clock = PhaseClock(torch.device("cpu"), warm_ups)
        for place in range(4):
            clock.mark()
            warm_ups.count += times if place == 1 else 0
        told.append(clock.times().is_first)
    assert told == [False, True, False, True]


@pytest.mark.parametrize(("method", "keeps"), [("eagle3", True), ("draft_model", False)])
def test_steps_tell_what_keeping_states_takes(method, keeps):
    llm, times = engine("qwen3-window", method), list[PhaseTimes]()
    llm.engine.on_step = lambda step: times.append(step.times)
    run(llm, prompts_of([12]), greedy(12))
    assert any(one.keep_s > 0 for one in times) == keeps
    assert all(0 <= one.keep_s <= one.sample_s for one in times)
