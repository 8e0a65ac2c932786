"""Tables that follow from what steps took: right without noise, monotone with any."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.control.costs import CostCurve, CostTable, DrafterCost
from outdraft.control.roofline import ROWS, MachineLimits, PassSize, prior_table
from outdraft.core.weights import RoutedWeights
from outdraft.costs.measurement import (
    LAGS,
    curve,
    drafter_steps,
    fitted_drafter,
    fitted_target,
    measure,
    stretched,
    target_steps,
)
from outdraft.runner.dummy_steps import SHORT, DummyStep, PhaseSeconds

NUM_LONG = 1000
SIZE = PassSize(10**8, 10**8, 10**4, 8)
PRIOR = prior_table(MachineLimits(1e10, 1e12, call_s=1e-4), SIZE, {"eagle3": (SIZE, 63)})
COUNTS = (1, 2, 4, 8)
SECONDS = st.floats(0, 10)


def tokens(step: DummyStep) -> int:
    return NUM_LONG if step.is_long else SHORT * step.num_requests


def measured_as(steps, truth):
    """Every step takes what `truth` says: draft_s, target_s, host_s."""
    return {step: PhaseSeconds(*truth(step)) for step in steps}


def test_a_table_without_noise_is_what_was_true():
    def truth(step):
        target_s = 0.01 + 1e-3 * step.num_rows + 2e-6 * tokens(step)
        return 1e-5, target_s + 3e-4 * (step.num_requests - 1), 1e-4 + 2e-5 * step.num_requests

    table = fitted_target(measured_as(target_steps(COUNTS), truth), COUNTS, NUM_LONG, PRIOR)
    rows = np.array([1, 2, 3, 8, 24, 64])
    assert table.target.at(rows) == pytest.approx(0.01 + 1e-3 * rows)
    assert table.context_s == pytest.approx(2e-6)
    assert table.request_s == pytest.approx(3e-4)
    assert table.host_s == pytest.approx(1e-5 + 1.2e-4)
    assert table.host_request_s == pytest.approx(2e-5)


def test_rows_that_nobody_measured_follow_the_prior():
    prior = CostCurve((1, 8, 64, 128), (1.0, 1.0, 4.0, 8.0))
    assert stretched(prior, {1: 2.0, 8: 3.0}) == CostCurve((1, 8, 64, 128), (2.0, 3.0, 12.0, 24.0))
    assert stretched(prior, {8: 3.0}).seconds == (3.0, 3.0, 12.0, 24.0)
    assert stretched(prior, {}) == prior


def test_few_measured_steps_tell_what_many_rows_of_experts_take():
    """The machine is half as fast as the prior says; only the shape of the curve is known."""
    size = PassSize(10**7, 10**6, 0, 1, RoutedWeights(10**9, num_experts=64, per_row=4))
    prior, truth = size.curve(MachineLimits(1e10, 1e12)), size.curve(MachineLimits(5e9, 5e11))
    points = {rows: float(truth.at(np.array(rows))) for rows in (1, 2)}
    assert stretched(prior, points).seconds == pytest.approx(truth.seconds)


def test_a_networks_costs_without_noise_are_what_was_true():
    def truth(step):
        draft_s = 5e-5  # of the host
        if step.is_network:
            context_s = 1e-7 * (tokens(step) - SHORT * step.num_requests)
            passes = step.num_drafts(0) * (1e-4 * step.num_requests + context_s)
            draft_s += 8e-4 + passes + 1e-5 * step.num_unread
        return draft_s, 1.0, 1.0

    steps = drafter_steps(COUNTS, 4, reads_texts=True)
    cost = fitted_drafter(measured_as(steps, truth), COUNTS, NUM_LONG, 4, PRIOR.drafters["eagle3"])
    rows = np.array(COUNTS)
    assert cost.passes.at(rows) == pytest.approx(1e-4 * rows)
    assert cost.start_s == pytest.approx(8e-4)
    assert cost.context_s == pytest.approx(1e-7)
    assert cost.catch_up.at(np.array([0, 1, *LAGS])) == pytest.approx(
        [0, 1e-5, *(1e-5 * lag for lag in LAGS)]
    )
    assert cost.max_passes == 63


def test_a_look_at_a_long_text_is_no_part_of_its_passes():
    """A pass of a long text reads 100 tokens, a look all of them, and only where they are more."""
    prior = replace(PRIOR.drafters["eagle3"], max_context=100, look_s=2e-7)
    num_more = prior.num_read([NUM_LONG]) - SHORT

    def truth(step):
        if not step.is_network:
            return 5e-5, 1.0, 1.0
        pass_s = 1e-4 * step.num_requests + (1e-6 * num_more if step.is_long else 0.0)
        look_s = 2e-7 * NUM_LONG if step.is_long else 0.0
        return 5e-5 + 8e-4 + look_s + pass_s * step.num_drafts(0), 1.0, 1.0

    steps = drafter_steps(COUNTS, 4, reads_texts=True, shares_cache=True)
    assert {step.num_unread for step in steps} == {0}
    cost = fitted_drafter(measured_as(steps, truth), COUNTS, NUM_LONG, 4, prior)
    assert cost.context_s == pytest.approx(1e-6)
    assert cost.start_s == pytest.approx(8e-4)
    assert cost.look_s == 2e-7


def test_heads_take_one_pass_and_have_nothing_to_catch_up_with():
    def truth(step):
        return (1e-3 if step.is_network else 1e-4), 1.0, 1.0

    steps = drafter_steps(COUNTS, 3, reads_texts=False)
    prior = DrafterCost(PRIOR.target, PRIOR.target, max_passes=1)
    cost = fitted_drafter(measured_as(steps, truth), COUNTS, NUM_LONG, 3, prior)
    assert cost.passes.at(np.array(COUNTS)) == pytest.approx([9e-4] * 4)
    assert (cost.start_s, cost.max_passes) == (0.0, 1)
    assert not any(step.num_unread or step.is_long for step in steps)


class Slow:
    """Steps of a fifth of a second by its own account; the clock hardly moves."""

    ready_s = 0.0

    def __init__(self) -> None:
        self.ran: list[DummyStep] = []

    def fits(self, step: DummyStep) -> bool:
        return step.num_rows < 8

    def run(self, step: DummyStep) -> PhaseSeconds:
        self.ran.append(step)
        return PhaseSeconds(0.01, 0.1 + 0.01 * len(self.ran), 0.08)


def test_the_lower_quartile_of_turns_counts_and_steps_without_room_are_left_out():
    steps, wanted = Slow(), [DummyStep(1, 2), DummyStep(1, 8), DummyStep(1, 4)]
    found = measure(steps, wanted, PRIOR.target, budget_s=100.0)
    assert steps.ran == [wanted[0], wanted[2]] * 5
    assert found[wanted[0]] == pytest.approx((0.01, 0.13, 0.08))  # of runs 1, 3, 5, 7, 9
    assert found[wanted[2]] == pytest.approx((0.01, 0.14, 0.08))
    assert set(found) == {wanted[0], wanted[2]}


def test_a_step_that_takes_longer_than_what_is_left_is_not_run():
    steps = Slow()
    measure(steps, [DummyStep(1, 1)], PRIOR.target, budget_s=0.15)
    assert len(steps.ran) == 1  # the prior said 0.01 s


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_noise_gives_a_table(data):
    """Curves refuse times that fall or are negative, so that building one is the claim."""
    counts = COUNTS[: data.draw(st.integers(1, len(COUNTS)))]
    depth = data.draw(st.sampled_from([1, 4]))
    network = drafter_steps(
        counts, depth, reads_texts=data.draw(st.booleans()), shares_cache=data.draw(st.booleans())
    )
    measured = {
        step: PhaseSeconds(*(data.draw(SECONDS) for _ in range(3)))
        for step in [*target_steps(counts), *network]
        if data.draw(st.booleans())
    }
    table = fitted_target(measured, counts, NUM_LONG, PRIOR)
    prior = replace(PRIOR.drafters["eagle3"], max_passes=data.draw(st.sampled_from([1, 63])))
    cost = fitted_drafter(measured, counts, NUM_LONG, depth, prior)
    numbers = (table.context_s, table.request_s, table.host_s, table.host_request_s, cost.start_s)
    assert min(*numbers, table.host_draft_s, cost.context_s) >= 0
    assert table.target.rows == ROWS
    assert CostTable.from_json(table.to_json()) == table


@given(st.dictionaries(st.integers(1, 10**4), st.floats(-1, 1), min_size=1))
def test_a_curve_is_the_highest_one_below_its_points(points):
    found = curve(points)
    assert found.rows == tuple(sorted(points))
    for rows, seconds in zip(found.rows, found.seconds, strict=True):
        later = [max(0.0, points[count]) for count in points if count >= rows]
        assert seconds == min(later)
