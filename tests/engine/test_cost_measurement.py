"""Tables that follow from what steps took: right without noise, monotone with any."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.control.costs import CostCurve, CostTable, DrafterCost
from outdraft.control.roofline import ROWS, Machine, PassSize, prior_table
from outdraft.core.routed_weights import RoutedWeights
from outdraft.engine.cost_measurement import (
    LAGS,
    TURNS,
    DrafterSteps,
    Measured,
    TargetSteps,
    curve,
    stretched,
)
from outdraft.engine.cost_steps import SHORT, Samples, Step

NUM_LONG = 1000
SIZE = PassSize(10**8, 10**8, 10**4, 8)
PRIOR = prior_table(Machine(1e10, 1e12, call_s=1e-4), SIZE, {"eagle3": (SIZE, 63)})
COUNTS = (1, 2, 4, 8)
SECONDS = st.floats(0, 10)


def tokens(step: Step) -> int:
    return NUM_LONG if step.is_long else SHORT * step.num_requests


def measured_as(steps, truth) -> Measured:
    """Every turn takes what `truth` says: draft_s, target_s, host_s of a step."""
    return Measured({step: Samples(*([one] * TURNS for one in truth(step))) for step in steps})


def test_a_table_without_noise_is_what_was_true():
    def truth(step):
        target_s = 0.01 + 1e-3 * step.num_rows + 2e-6 * tokens(step)
        return 1e-5, target_s + 3e-4 * (step.num_requests - 1), 1e-4 + 2e-5 * step.num_requests

    steps = TargetSteps(COUNTS, NUM_LONG)
    table = steps.fitted(measured_as(steps.wanted, truth), PRIOR)
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
    prior, truth = size.curve(Machine(1e10, 1e12)), size.curve(Machine(5e9, 5e11))
    points = {rows: float(truth.at(np.array(rows))) for rows in (1, 2)}
    assert stretched(prior, points).seconds == pytest.approx(truth.seconds)


@pytest.mark.parametrize("tree", [(), (3, 5, 2)])
def test_a_networks_costs_without_noise_are_what_was_true(tree):
    def truth(step):
        draft_s = 5e-5  # of the host
        if step.is_network:
            context_s = 1e-7 * (tokens(step) - SHORT * step.num_requests)
            further = [0] * (step.num_drafts(0) - 1)  # rows beyond one for each request
            if step.is_tree:
                further = [rows - 1 for rows in tree[:-1]]
            passes = [1e-4 * step.num_requests * (1 + more) for more in (0, *further)]
            draft_s += 8e-4 + sum(passes) + context_s * len(passes) + 1e-5 * step.lag
        return draft_s, 1.25 if step.is_network else 1.0, 1.0

    steps = DrafterSteps(COUNTS, NUM_LONG, depth=4, tree=tree, max_passes=63, reads_texts=True)
    cost = steps.fitted(measured_as(steps.wanted, truth), PRIOR.drafters["eagle3"])
    rows = np.array([*COUNTS, *(4 * count for count in COUNTS if tree)])  # 4: the mean of 3 and 5
    assert cost.passes.at(rows) == pytest.approx(1e-4 * rows)
    assert cost.start_s == pytest.approx(8e-4)
    assert cost.beside_s == pytest.approx(0.25)
    assert cost.catch_up.at(np.array([0, 1, *LAGS])) == pytest.approx(
        [0, 1e-5, *(1e-5 * lag for lag in LAGS)]
    )
    assert cost.max_passes == 63


def test_lags_that_were_not_measured_take_longer_as_the_prior_says():
    """Most of what is measured of few tokens may not grow with them."""
    steps = DrafterSteps(COUNTS, NUM_LONG, depth=4, tree=(), max_passes=63, reads_texts=True)
    first, *others = LAGS
    wanted = [step for step in steps.wanted if step.lag <= first]

    def truth(step):
        return (1e-3 + (9e-4 if step.lag else 0) if step.is_network else 1e-4), 1.0, 1.0

    prior = PRIOR.drafters["eagle3"]
    cost = steps.fitted(measured_as(wanted, truth), prior)
    assert cost.catch_up.at(np.array(first)) == pytest.approx(9e-4)
    prior_s = prior.catch_up.at(np.array([first, *others]))
    assert prior_s[-1] > prior_s[0]
    assert cost.catch_up.at(np.array(others)) == pytest.approx(9e-4 + prior_s[1:] - prior_s[0])


def test_what_a_look_takes_is_told_from_passes_over_a_part_of_the_text():
    """A pass of a long text reads 100 tokens, a look all of them, and only where they are more."""
    steps = DrafterSteps(
        COUNTS, NUM_LONG, depth=4, tree=(), max_passes=63, reads_texts=True, lags=False, looks=True
    )
    prior = replace(PRIOR.drafters["eagle3"], max_context=100, look_s=1.0)
    num_more = prior.num_read([NUM_LONG]) - SHORT

    def truth(step):
        if not step.is_network:
            return 5e-5, 1.0, 1.0
        pass_s = 1e-4 * step.num_requests + (1e-6 * num_more if step.is_long else 0.0)
        look_s = 2e-7 * NUM_LONG if step.is_long else 0.0
        return 5e-5 + 8e-4 + look_s + pass_s * step.num_drafts(0), 1.0, 1.0

    cost = steps.fitted(measured_as(steps.wanted, truth), prior)
    assert cost.look_s == pytest.approx(2e-7)
    assert cost.context_s == pytest.approx(1e-6)
    assert cost.start_s == pytest.approx(8e-4)
    unmeasured = DrafterSteps(
        COUNTS, 90, depth=4, tree=(), max_passes=63, reads_texts=True, lags=False, looks=True
    )
    assert unmeasured.fitted(measured_as(unmeasured.wanted, truth), prior).look_s == 1.0


def test_heads_take_one_pass_and_have_nothing_to_catch_up_with():
    steps = DrafterSteps(COUNTS, NUM_LONG, depth=3, tree=(2, 1), max_passes=1, reads_texts=False)

    def truth(step):
        return (1e-3 if step.is_network else 1e-4), 1.0, 1.0

    prior = DrafterCost(PRIOR.target, PRIOR.target, max_passes=1)
    cost = steps.fitted(measured_as(steps.wanted, truth), prior)
    assert cost.passes.at(np.array(COUNTS)) == pytest.approx([9e-4] * 4)
    assert (cost.start_s, cost.max_passes) == (0.0, 1)
    assert {step.lag for step in steps.wanted} == {0}


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_noise_gives_a_table(data):
    """Curves refuse times that fall or are negative, so that building one is the claim."""
    counts = COUNTS[: data.draw(st.integers(1, len(COUNTS)))]
    target = TargetSteps(counts, NUM_LONG)
    network = DrafterSteps(
        counts,
        NUM_LONG,
        depth=data.draw(st.sampled_from([1, 4])),
        tree=data.draw(st.sampled_from([(), (3,), (2, 3, 1)])),
        max_passes=data.draw(st.sampled_from([1, 63])),
        reads_texts=data.draw(st.booleans()),
    )
    samples: dict[Step, Samples] = {}
    for step in {*target.wanted, *network.wanted}:
        turns = data.draw(st.integers(0, 2))
        times = st.lists(SECONDS, min_size=turns, max_size=turns)
        samples[step] = Samples(data.draw(times), data.draw(times), data.draw(times))
    measured = Measured(samples)
    table = target.fitted(measured, PRIOR)
    cost = network.fitted(measured, PRIOR.drafters["eagle3"])
    numbers = (table.context_s, table.request_s, table.host_s, table.host_request_s, cost.start_s)
    assert min(*numbers, cost.context_s, cost.beside_s) >= 0
    assert table.target.rows == ROWS
    assert CostTable.from_json(table.to_json()) == table


@given(st.dictionaries(st.integers(1, 10**4), st.floats(-1, 1), min_size=1))
def test_a_curve_is_the_highest_one_below_its_points(points):
    found = curve(points)
    assert found.rows == tuple(sorted(points))
    for rows, seconds in zip(found.rows, found.seconds, strict=True):
        later = [max(0.0, points[count]) for count in points if count >= rows]
        assert seconds == min(later)
