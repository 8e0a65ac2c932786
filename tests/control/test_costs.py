"""Tables of costs, and what corrects them."""

from dataclasses import replace

import numpy as np
import pytest

from outdraft.control.costs import CostCurve, CostTable, DrafterCost, monotone
from outdraft.control.decision import Prices
from outdraft.control.drift import HOST_CLIP, LONG, Correction, Costs, LoneCorrection
from outdraft.control.facts import (
    Decision,
    DraftOutcome,
    Grant,
    Reason,
    RequestFacts,
    StepFacts,
    StepOutcome,
)
from outdraft.control.outlook import Outlook
from outdraft.core.errors import ConfigError

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


def test_a_pass_over_a_part_of_each_text_takes_no_longer_for_longer_texts():
    own = replace(TABLE.drafters["eagle3"], context_s=1e-3, max_context=100)
    costs = Costs(replace(TABLE, drafters={"self": own}))

    def prices(lengths: list[int]) -> tuple[float, float]:
        """A pass of the network, and one of the target."""
        requests = tuple(
            RequestFacts(str(i), 50, 4, length, network="self") for i, length in enumerate(lengths)
        )
        facts = StepFacts(requests)
        found = Outlook.of(facts, costs).prices(facts, "self", costs)
        return found.pass_N[2], found.target_N[0]

    short, full, long = prices([10, 60]), prices([100, 100]), prices([100, 100_000])
    assert full[0] - short[0] == pytest.approx(1e-3 * 130)
    assert long[0] == full[0]
    assert long[1] - full[1] == pytest.approx(1e-4 * 99_900)
    assert CostTable.from_json(costs.table.to_json()) == costs.table


def test_looking_at_long_texts_is_a_cost_of_drafting_and_of_nothing_else():
    own = replace(TABLE.drafters["eagle3"], max_context=100, look_s=1e-3)
    costs = Costs(replace(TABLE, drafters={"self": own}))

    def prices(lengths: list[int]) -> Prices:
        requests = tuple(
            RequestFacts(str(i), 50, 4, length, network="self") for i, length in enumerate(lengths)
        )
        facts = StepFacts(requests)
        return Outlook.of(facts, costs).prices(facts, "self", costs)

    short, long = prices([60, 100]), prices([60, 5000])
    assert long.start_s - short.start_s == pytest.approx(1e-3 * 5000)
    assert long.pass_N == short.pass_N
    assert long.target_N[0] - short.target_N[0] == pytest.approx(1e-4 * 4900)


def test_what_looking_takes_is_learned_from_steps_that_draft():
    own = replace(TABLE.drafters["eagle3"], max_context=100, look_s=1e-3)
    costs = Costs(replace(TABLE, drafters={"self": own}))
    plain_s = costs.target_s(1, 5000)
    for _ in range(100):  # all of it takes twice as long
        costs.observe_drafter("self", [1, 1], 0, [5000], 2 * (0.03 + 0.2 + 5.0))
    assert costs.start_s("self", [5000]) == pytest.approx(2 * 5.03, rel=0.01)
    assert costs.target_s(1, 5000) == plain_s


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


def test_predictions_follow_the_table():
    costs = Costs(TABLE)
    assert costs.target_s(6, 1000) == pytest.approx(1.65 + 0.1)
    assert costs.target_s(6, 1000, 4) == pytest.approx(1.65 + 0.1 + 3 * 0.02)
    assert costs.target_N(6, 2, 0) == pytest.approx([1.65, 1.825])
    assert costs.target_N(6, 2, 0, 4) == pytest.approx([1.71, 1.885])
    assert costs.target_N(5000, 1, 0) == pytest.approx(LINE.at(np.array([5000])))
    assert costs.pass_N("eagle3", 3, 0) == pytest.approx([0, 0.1, 0.1 + 0.1 / 7])
    assert costs.start_s("eagle3") == pytest.approx(0.03)
    assert costs.catch_up_s("eagle3", 0) == 0
    assert costs.host_s(3) == pytest.approx(0.12)


def test_a_machine_that_slows_down_while_drafting_is_slower_for_plain_steps_too():
    costs = Costs(TABLE)
    for _ in range(100):
        costs.observe_target(8, 0, 2.0 * 1.2)
    assert costs.target_s(8, 0) == pytest.approx(2.4, rel=0.01)
    assert costs.target_s(1, 0) == pytest.approx(1.2, rel=0.03)


def test_a_table_that_is_wrong_in_one_place_is_put_right_there():
    costs = Costs(TABLE)
    for step in range(400):
        rows, actual = (1, 1.0) if step % 32 == 0 else (8, 2.0 * 1.2)
        costs.observe_target(rows, 0, actual)
    assert costs.target_s(8, 0) == pytest.approx(2.4, rel=0.02)
    assert costs.target_s(1, 0) == pytest.approx(1.0, rel=0.03)


def test_corrections_are_bounded_and_outliers_count_little():
    costs = Costs(TABLE)
    for _ in range(300):
        costs.observe_target(8, 0, 0.1)
    assert costs.target_s(8, 0) == pytest.approx(2.0 / 4)
    for _ in range(300):
        costs.observe_target(8, 0, 2.0)
    costs.observe_target(8, 0, 2000.0)
    assert costs.target_s(8, 0) < 2.0 * 1.1


@pytest.mark.parametrize("change", [0.5, 2.0])
def test_a_sudden_change_is_learned_in_a_few_steps_for_all_numbers_of_rows(change: float):
    times = {rows: float(LINE.at(np.array(rows))) for rows in (1, 4, 8, 16)}
    costs = Costs(TABLE)
    for step in range(300):
        rows = (1, 8, 16)[step % 3]
        costs.observe_target(rows, 0, times[rows])
    for _ in range(12):
        costs.observe_target(8, 0, times[8] * change)
    assert costs.target_s(8, 0) == pytest.approx(times[8] * change, rel=0.05)
    # What others show later does not spoil what is known of these.
    for step in range(24):
        rows = (16, 4)[step % 2]
        costs.observe_target(rows, 0, times[rows] * change)
    for rows, rel in ((4, 0.05), (8, 0.05), (16, 0.05), (1, 0.12)):  # one row was not seen since
        assert costs.target_s(rows, 0) == pytest.approx(times[rows] * change, rel=rel)


def test_a_networks_passes_and_its_catching_up_have_their_own_factors():
    costs = Costs(TABLE)
    for _ in range(100):
        costs.observe_drafter("eagle3", [8, 1], 0, [], 1.1 * (0.03 + 0.2 + 0.1))
        costs.observe_drafter("eagle3", [8, 1], 40, [], 1.1 * (0.03 + 0.2 + 0.1) + 2 * 0.05)
    assert costs.pass_N("eagle3", 2, 0)[1] == pytest.approx(0.11, rel=0.01)
    assert costs.start_s("eagle3") == pytest.approx(0.033, rel=0.01)
    assert costs.catch_up_s("eagle3", 40) == pytest.approx(0.1, rel=0.02)


@pytest.mark.parametrize("change", [0.75, 1.4])
def test_a_network_that_is_off_is_as_fast_as_plain_steps_say_of_the_machine(change: float):
    costs = Costs(TABLE)
    for _ in range(100):  # its table is wrong by half
        costs.observe_target(1, 0, 1.0)
        costs.observe_drafter("eagle3", [1], 0, [0], 1.5 * 0.13)
    before = costs.pass_N("eagle3", 2, 0)[1]
    assert before == pytest.approx(1.5 * 0.1, rel=0.05)
    for _ in range(300):
        costs.observe_target(1, 0, change)
    assert costs.target_s(1, 0) == pytest.approx(change, rel=0.02)
    # Half of what one number of rows says, or more, is the machine.
    least, most = sorted((before * change**0.45, before * change))
    assert least <= costs.pass_N("eagle3", 2, 0)[1] <= most


def test_how_slow_a_network_is_says_nothing_of_the_target():
    costs = Costs(TABLE)
    for _ in range(100):
        costs.observe_target(1, 0, 1.0)
        costs.observe_drafter("eagle3", [1], 0, [0], 2 * 0.13)
    assert costs.target_s(1, 0) == pytest.approx(1.0, rel=0.01)
    assert costs.pass_N("eagle3", 2, 0)[1] == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize("change", [0.5, 1.0, 1.6])
def test_lone_steps_take_longer_and_tell_how_the_network_changed(change: float):
    costs, rng = Costs(TABLE), np.random.default_rng(0)

    def drafts(slower: float, *, is_lone: bool):
        noise = float(np.exp(0.05 * rng.standard_normal()))
        actual_s = slower * noise * 0.33
        costs.observe_drafter("eagle3", [8, 1], 0, [], actual_s, is_lone=is_lone)

    for _ in range(100):
        drafts(1.0, is_lone=False)
    for _ in range(60):
        drafts(1.8, is_lone=True)
    assert costs.start_s("eagle3") == pytest.approx(0.03, rel=0.1)
    for _ in range(4000):
        drafts(1.8 * change, is_lone=True)
    assert costs.start_s("eagle3") == pytest.approx(0.03 * change, rel=0.2)


def test_a_table_is_wrong_if_passes_differ_by_more_than_half_for_long_and_not_for_a_while():
    def costs_after(factor, count):
        costs = Costs(TABLE)
        for _ in range(count):
            costs.observe_target(4, 0, factor * float(TABLE.target.at(np.array(4))))
        return costs

    for factor in (1.7, 1 / 1.7):
        assert not costs_after(factor, LONG).are_wrong
        costs = costs_after(factor, LONG + 50)
        assert costs.are_wrong
        for _ in range(50):
            costs.observe_target(4, 0, float(TABLE.target.at(np.array(4))))
        assert not costs.are_wrong
    assert not costs_after(1.3, LONG + 50).are_wrong


def test_a_step_with_drafts_takes_the_host_longer_by_the_same_share_for_all_requests():
    table = replace(TABLE, host_s=1e-4, host_request_s=1e-5, host_draft_s=5e-5)
    costs = Costs(table)
    assert costs.host_s(11) == pytest.approx(2e-4)
    assert costs.drafting_s(11) == pytest.approx(1e-4)
    assert CostTable.from_json(table.to_json()) == table


@pytest.mark.parametrize("slower", [1, 0.5, 2])
def test_what_a_network_adds_to_the_targets_pass_is_no_news_of_plain_steps(slower: float):
    drafter = replace(TABLE.drafters["eagle3"], beside_s=0.5)
    costs = Costs(replace(TABLE, drafters={"eagle3": drafter}))
    before = costs.target_s(1, 0)
    grant = Grant("a", "eagle3", 1, 1, 0.5)
    decision = Decision((grant,), 0, 1, Reason.GAIN, 0, 0, 0, 0, 0, 0)
    facts = StepFacts((RequestFacts("a", 9, 4, 0, network="eagle3"),))
    drafts = (DraftOutcome("a", 1, 1),)
    draft_s, target_s = 0.13 * slower, (float(LINE.at(np.array(2))) + 0.5) * slower
    for _ in range(100):
        costs.observe(StepOutcome(facts, decision, drafts, 2, 2, draft_s, target_s, 0.0))
    assert costs.target_s(1, 0) == pytest.approx(before * slower, rel=0.05)


def test_a_correction_of_one_bucket_is_that_of_many_to_the_last_bit():
    rng = np.random.default_rng(0)
    for clip in (0.2, HOST_CLIP):
        lone, many = LoneCorrection(clip), Correction(1, clip)
        for _ in range(300):
            times = (10 ** rng.uniform(-4, 0, 2)).tolist() if rng.random() < 0.9 else [0.0, 1.0]
            lone.observe(*times)
            many.observe(0, *times)
            assert (lone.factor, lone.num_far) == (many.factor(0), many.num_far)
