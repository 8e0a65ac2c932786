"""Who stands still in a step is told of, and nobody else is."""

import threading
import time

import pytest

from outdraft.server.core_process import StepWatch

TIMEOUT_S = 0.2
LONG_S = 5 * TIMEOUT_S


class Told:
    """What a watch sees and says."""

    def __init__(self) -> None:
        self.num_moves = 0
        self.is_told = threading.Event()
        self.watch = StepWatch(lambda: self.num_moves, TIMEOUT_S, self.is_told.set)
        self.watch.start()


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_step_that_stands_still_is_told(told: Told):
    with told.watch:
        assert told.is_told.wait(60)


def test_a_step_that_stands_still_after_others_is_told(told: Told):
    for _ in range(3):
        with told.watch:
            told.num_moves += 1
    with told.watch:
        told.num_moves += 1
        assert told.is_told.wait(60)


@pytest.mark.slow
def test_a_step_that_goes_on_is_as_long_as_it_likes(told: Told):
    with told.watch:
        until_s = time.monotonic() + LONG_S
        while time.monotonic() < until_s:
            told.num_moves += 1
            time.sleep(0.001)
    assert not told.is_told.is_set()


@pytest.mark.slow
def test_many_short_steps_are_not_one_that_stands_still(told: Told):
    until_s = time.monotonic() + LONG_S
    while time.monotonic() < until_s:
        with told.watch:
            time.sleep(0.001)
    assert not told.is_told.is_set()


@pytest.mark.slow
def test_between_steps_nothing_has_to_happen(told: Told):
    with told.watch:
        pass
    time.sleep(LONG_S)
    assert not told.is_told.is_set()


@pytest.mark.slow
def test_a_step_that_failed_has_ended(told: Told):
    with pytest.raises(RuntimeError), told.watch:
        raise RuntimeError
    time.sleep(LONG_S)
    assert not told.is_told.is_set()
