"""Tables of costs, and what corrects them."""

from dataclasses import replace

import numpy as np
import pytest

from outdraft.control.corrections import WRONG_STEPS, Costs
from outdraft.control.costs import CostCurve, CostTable, DrafterCost
from outdraft.control.facts import DraftOutcome, RequestFacts, StepFacts, StepOutcome
from outdraft.core.decision import Decision, Grant, Reason
from outdraft.core.errors import ConfigError
from tests.planning.scenarios import monotone

LINE = CostCurve((1, 4, 8, 16), (1.0, 1.3, 2.0, 4.0))
STAIRS = CostCurve((1, 4, 8, 16), (1.0, 1.3, 2.0, 4.0), has_stairs=True)
TABLE = CostTable(
    LINE,
    context_s=1e-4,
    request_s=0.02,
    drafters={"eagle3": DrafterCost(CostCurve((1, 8), (0.1, 0.2)), CostCurve((1,), (0.05,)), 0.03)},
    host_s=0.1,
    host_request_s=0.01,
)


def test_monotone_times_are_the_best_in_squares():
    rng = np.random.default_rng(0)
    for _ in range(50):
        times = rng.random(7).tolist()
        means = [[np.mean(times[min(a, b) : b + 1]) for b in range(7)] for a in range(7)]
        # The max-min formula of isotonic regression.
        best = [max(min(means[a][b] for b in range(i, 7)) for a in range(i + 1)) for i in range(7)]
        assert monotone(times) == pytest.approx(best)


def test_times_grow_between_measured_numbers_of_rows_and_beyond_them():
    assert LINE.at(np.array([0, 1, 2, 4, 6, 16, 31])) == pytest.approx(
        [0, 1, 1.1, 1.3, 1.65, 4, 4 + 15 * 3 / 15]
    )


def test_stairs_take_the_time_of_their_edge():
    assert STAIRS.at(np.array([0, 1, 2, 4, 5, 16])) == pytest.approx([0, 1, 1.3, 1.3, 2, 4])
    assert [STAIRS.edge(rows) for rows in (1, 2, 8, 9, 17)] == [1, 4, 8, 16, None]
    assert LINE.edge(2) is None


def test_a_table_comes_back_from_json():
    assert CostTable.from_json(TABLE.to_json()) == TABLE


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"target": {"rows": [1], "seconds": [1]}}'])
def test_other_json_is_refused(text: str):
    with pytest.raises(ConfigError, match="no table of costs"):
        CostTable.from_json(text)


@pytest.mark.parametrize(
    ("rows", "seconds"), [((), ()), ((1,), (1, 2)), ((2, 1), (1, 2)), ((1, 2), (2, 1))]
)
def test_curves_that_are_none_are_refused(rows, seconds):
    with pytest.raises(ConfigError):
        CostCurve(rows, seconds)


def at(costs: Costs, rows: int, context: int = 0, num_requests: int = 1) -> float:
    """A pass of the target."""
    [seconds] = costs.target_N(rows, 1, context, num_requests)
    return seconds


def step(
    rows: int, target_s: float, *, network: str = "", passes: int = 0, draft_s: float = 0.0
) -> StepOutcome:
    """A step of one request with a chain of so many levels, of which nothing was accepted."""
    facts = StepFacts((RequestFacts("a", 50, 9, 0, network=network or None),))
    grants = (Grant("a", network, passes, passes),) if network else ()
    decision = Decision(Reason.GAIN, grants)
    drafts = (DraftOutcome("a", passes, 0),) if network else ()
    return StepOutcome(facts, decision, drafts, rows, 1, draft_s, target_s, 0.1)


def test_predictions_follow_the_table():
    costs = Costs(TABLE)
    assert at(costs, 6, 1000) == pytest.approx(1.65 + 0.1)
    assert at(costs, 6, 1000, 4) == pytest.approx(1.65 + 0.1 + 3 * 0.02)
    assert costs.target_N(6, 2, 0, 1) == pytest.approx([1.65, 1.825])
    assert at(costs, 5000) == pytest.approx(LINE.at(np.array([5000])))
    assert costs.pass_N("eagle3", 3, [0]) == pytest.approx([0, 0.1, 0.1 + 0.1 / 7])
    assert costs.start_s("eagle3", [0]) == pytest.approx(0.03)
    assert costs.catch_up_s("eagle3", 0) == 0
    assert costs.catch_up_s("eagle3", 7) == pytest.approx(0.05)
    assert costs.host_s(3) == pytest.approx(0.12)


def test_a_pass_over_a_part_of_each_text_takes_no_longer_for_longer_texts():
    own = replace(TABLE.drafters["eagle3"], context_s=1e-3, max_context=100, look_s=1e-3)
    costs = Costs(replace(TABLE, drafters={"self": own}))
    short, full, long = ([10, 60], [100, 100], [100, 5000])
    passes = [costs.pass_N("self", 3, lengths)[2] for lengths in (short, full, long)]
    assert passes[1] - passes[0] == pytest.approx(1e-3 * 130)
    assert passes[2] == passes[1]
    starts = [costs.start_s("self", lengths) for lengths in (short, full, long)]
    assert starts == pytest.approx([0.03, 0.03, 0.03 + 1e-3 * 5000])
    assert CostTable.from_json(costs.table.to_json()) == costs.table


def test_a_machine_that_slows_down_while_drafting_is_slower_for_plain_steps_too():
    costs = Costs(TABLE)
    for _ in range(100):
        costs.observe(step(8, 2.0 * 1.2))
    assert at(costs, 8) == pytest.approx(2.4, rel=0.01)
    assert 1.05 < at(costs, 1) < 1.25


def test_a_table_that_is_wrong_in_one_place_is_put_right_there():
    costs = Costs(TABLE)
    for number in range(400):
        costs.observe(step(1, 1.0) if number % 32 == 0 else step(8, 2.0 * 1.2))
    assert at(costs, 8) == pytest.approx(2.4, rel=0.02)
    assert at(costs, 1) == pytest.approx(1.0, rel=0.06)


def test_an_outlier_counts_little():
    costs = Costs(TABLE)
    for _ in range(300):
        costs.observe(step(8, 2.0))
    costs.observe(step(8, 2000.0))
    assert at(costs, 8) < 2.0 * 1.1


@pytest.mark.parametrize("change", [0.5, 2.0])
def test_a_sudden_change_is_learned_in_a_few_steps_for_all_numbers_of_rows(change: float):
    times = {rows: float(LINE.at(np.array(rows))) for rows in (1, 4, 8, 16)}
    costs = Costs(TABLE)
    for number in range(300):
        rows = (1, 8, 16)[number % 3]
        costs.observe(step(rows, times[rows]))
    for _ in range(12):
        costs.observe(step(8, times[8] * change))
    assert at(costs, 8) == pytest.approx(times[8] * change, rel=0.05)
    # Plain decoding looks better than it is rather than worse: then it is tried.
    assert min(1.0, change) < at(costs, 1) < max(1.0, change)
    for number in range(100):
        rows = (16, 4, 8, 1)[number % 4]
        costs.observe(step(rows, times[rows] * change))
    for rows, seconds in times.items():
        assert at(costs, rows) == pytest.approx(seconds * change, rel=0.08)


def test_how_slow_a_network_is_says_nothing_of_the_target():
    costs = Costs(TABLE)
    for _ in range(100):
        costs.observe(step(2, 1.1, network="eagle3", passes=1, draft_s=2 * 0.13))
    assert at(costs, 1) == pytest.approx(1.0, rel=0.01)
    assert costs.pass_N("eagle3", 2, [0])[1] == pytest.approx(0.2, rel=0.05)


def test_a_network_that_is_off_follows_the_machine():
    costs = Costs(TABLE)
    for _ in range(100):
        costs.observe(step(2, 1.1, network="eagle3", passes=1, draft_s=1.5 * 0.13))
    before = costs.pass_N("eagle3", 2, [0])[1]
    assert before == pytest.approx(1.5 * 0.1, rel=0.05)
    for _ in range(300):
        costs.observe(step(1, 1.4))
    assert before * 1.4**0.2 < costs.pass_N("eagle3", 2, [0])[1] < before * 1.45


def test_a_table_is_wrong_if_passes_differ_by_more_than_half_for_long_and_not_for_a_while():
    def costs_after(factor, count):
        costs = Costs(TABLE)
        for _ in range(count):
            costs.observe(step(4, factor * 1.3))
        return costs

    for factor in (2.5, 1 / 2.5):
        assert not costs_after(factor, WRONG_STEPS).are_wrong
        costs = costs_after(factor, WRONG_STEPS + 50)
        assert costs.are_wrong
        for _ in range(50):
            costs.observe(step(4, 1.3))
        assert not costs.are_wrong
    assert not costs_after(1.3, WRONG_STEPS + 50).are_wrong


def test_a_step_with_drafts_takes_the_host_longer_by_the_same_share_for_all_requests():
    table = replace(TABLE, host_s=1e-4, host_request_s=1e-5, host_draft_s=5e-5)
    costs = Costs(table)
    assert costs.host_s(11) == pytest.approx(2e-4)
    assert costs.drafting_s(11) == pytest.approx(1e-4)
    assert CostTable.from_json(table.to_json()) == table


def test_a_step_of_many_more_rows_than_the_table_has_is_no_surprise():
    costs = Costs(TABLE)
    for _ in range(20):
        costs.observe(step(8192, float(LINE.at(np.array(8192)))))
    assert at(costs, 1) == pytest.approx(1.0)
