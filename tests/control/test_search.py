"""The plan of a step is the best one: against all combinations of lengths."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from outdraft.control.search import FREE_ROW, DraftPlan, Option, Prices, best_plan


def falling(rng, count):
    return np.cumprod(rng.uniform(0.2, 1, count)).tolist()


def prices_of(target_N, pass_N=(0.0, 0.0), max_passes=63, num_requests=1, plain_s=None, **others):
    plain_s = target_N[0] if plain_s is None else plain_s
    return Prices(num_requests, plain_s, list(target_N), list(pass_N), max_passes, **others)


def random_prices(rng, max_rows, num_requests, *, stairs):
    steps = rng.uniform(0, 0.3, max_rows + 1)
    if stairs:
        steps *= rng.random(max_rows + 1) < 0.3
    pass_N = np.concatenate([[0.0], np.full(4 * max_rows, rng.uniform(0, 0.4))])
    return prices_of(
        1 + steps.cumsum(),
        pass_N,
        int(rng.choice([1, 63])),
        num_requests,
        start_s=rng.uniform(0, 0.3),
        drafting_s=rng.uniform(0, 0.1),
    )


@dataclass
class Way:
    """A combination of lengths: tokens, and seconds beyond plain decoding."""

    tokens: float
    added_s: float

    def worth(self, prices: Prices, long_run: float | None) -> float:
        if long_run is None:
            return (prices.num_requests + self.tokens) / (prices.plain_s + self.added_s)
        return self.tokens - long_run * self.added_s


def way_of(picks, prices: Prices) -> Way | None:
    """What picks (option, levels), one for each request, bring; None: they have too many rows."""
    taken = [(option, levels) for option, levels in picks if levels]
    if not taken:
        return Way(0.0, 0.0)
    tokens = sum(sum(option.survivals[:levels]) for option, levels in taken)
    rows = sum(option.num_rows(levels) for option, levels in taken)
    if rows > prices.max_rows:
        return None
    passes: dict[int, int] = {}
    for option, levels in taken:
        for level in range(min(levels, prices.max_passes) if option.is_network else 0):
            above = option.rows_at(level - 1) if level else 1
            passes[level] = passes.get(level, 0) + above
    draft_s = sum(prices.pass_N[count] for count in passes.values())
    draft_s += prices.start_s if passes else 0.0
    fixed_s = sum(option.fixed_s for option, _ in taken)
    target_s = prices.target_N[rows] - prices.target_N[0]
    return Way(tokens, draft_s + fixed_s + target_s + prices.drafting_s)


def best_by_brute_force(options, prices, long_run):
    ways = [
        [(None, 0), *((one, n) for one in own for n in range(1, len(one.survivals) + 1))]
        for own in options
    ]
    found = [way_of(picks, prices) for picks in itertools.product(*ways)]
    return max(way.worth(prices, long_run) for way in found if way is not None)


def worth(plan: DraftPlan, prices: Prices, long_run: float | None) -> float:
    """That of a plan; what it says of itself is true."""
    way = way_of([(pick.option, pick.levels) for pick in plan.picks], prices)
    assert way is not None
    assert (plan.tokens, plan.added_s) == pytest.approx((way.tokens, way.added_s))
    assert plan.rows == sum(pick.option.num_rows(pick.levels) for pick in plan.picks)
    return way.worth(prices, long_run)


@pytest.mark.parametrize("long_run", [None, 1.3])
@pytest.mark.parametrize("seed", range(60))
def test_lengths_of_networks_are_the_best_of_all(seed: int, long_run):
    """Levels are taken by their tokens a row, so that all plans with less for a row are worse."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 4))
    prices = random_prices(rng, int(rng.integers(1, 12)), count, stairs=seed % 2 == 0)
    options = [
        [Option("eagle3", falling(rng, int(rng.integers(1, 5))), is_network=True)]
        for _ in range(count)
    ]
    found = worth(best_plan(options, prices, long_run), prices, long_run)
    assert found == pytest.approx(best_by_brute_force(options, prices, long_run), abs=1e-12)


@pytest.mark.parametrize("long_run", [None, 1.3])
@pytest.mark.parametrize("seed", range(40))
def test_one_requests_source_shape_and_length_are_nearly_the_best_of_all(seed: int, long_run):
    rng = np.random.default_rng(seed)
    prices = random_prices(rng, 14, 1, stairs=seed % 2 == 0)
    options = [
        [
            Option("suffix", falling(rng, 4), match_length=3),
            Option("eagle3", falling(rng, 4), is_network=True, fixed_s=rng.uniform(0, 0.2)),
            Option("eagle3", falling(rng, 3), (3, 4, 2), is_network=True),
        ]
    ]
    best = best_by_brute_force(options, prices, long_run)
    found = worth(best_plan(options, prices, long_run), prices, long_run)
    assert best - 0.03 <= found <= best + 1e-12


@pytest.mark.parametrize("seed", range(40))
def test_sources_of_several_requests_are_nearly_the_best_of_all(seed: int):
    rng = np.random.default_rng(seed)
    prices = random_prices(rng, 12, 3, stairs=False)
    options = [
        [Option("suffix", falling(rng, 3)), Option("eagle3", falling(rng, 3), is_network=True)]
        for _ in range(3)
    ]
    best = best_by_brute_force(options, prices, None)
    found = worth(best_plan(options, prices), prices, None)
    assert 0.95 * best <= found <= best + 1e-12
    host_only = [[own[0]] for own in options]
    assert found >= worth(best_plan(host_only, prices), prices, None) - 1e-12


def test_free_rows_up_to_the_next_stair_are_filled():
    target_N = [1.0, 1.5, 1.5, 1.5, 1.5, 3.0]
    options = [[Option("suffix", [0.5, 0.1])] for _ in range(3)]
    plan = best_plan(options, prices_of(target_N, max_passes=0, num_requests=3), 1.0)
    assert plan.rows == 4
    assert sorted(pick.levels for pick in plan.picks) == [1, 1, 2]


def test_nothing_is_trimmed_where_all_levels_pay():
    prices = prices_of(np.linspace(1, 1.01, 13), [0.001] * 20, num_requests=3)
    options = [[Option("eagle3", [0.9, 0.8, 0.7, 0.6], is_network=True)] for _ in range(3)]
    plan = best_plan(options, prices)
    assert plan.row_price(prices, plan.rate(prices)) == 0.0
    assert [pick.levels for pick in plan.picks] == [4, 4, 4]


def test_the_price_of_a_row_is_the_smallest_survival_that_is_taken():
    prices = prices_of(1 + 0.25 * np.arange(9.0), [0.0] * 9, num_requests=2)
    options = [
        [Option("eagle3", survivals, is_network=True)]
        for survivals in ([0.9, 0.8, 0.3, 0.1], [0.5, 0.2, 0.1, 0.1])
    ]
    plan = best_plan(options, prices, 1.0)
    assert [pick.levels for pick in plan.picks] == [3, 1]
    assert plan.row_price(prices, 1.0) == 0.3


def test_where_nothing_is_left_out_the_price_is_what_the_last_rows_cost():
    prices = prices_of([1.0, 1.0, 1.3, 1.6, 1.9], [0.0] * 9)
    options = [[Option("eagle3", [0.9, 0.8, 0.7, 0.6], is_network=True)]]
    plan = best_plan(options, prices, 1.0)
    assert plan.rows == 4
    assert plan.row_price(prices, 1.0) == pytest.approx(0.3)
    assert plan.row_price(prices, 0.9 * FREE_ROW / 0.3) == 0.0


def test_rows_that_prompts_take_raise_what_one_more_costs():
    # Rows are free up to the eighth: after a prompt that fills them, drafts no longer pay.
    target = 1 + 0.6 * np.maximum(0, np.arange(20.0) - 8)
    options = [[Option("eagle3", [0.5], is_network=True)]]
    alone = prices_of(target[1:3], [0, 0.1])
    beside = prices_of(target[9:11], [0, 0.1], plain_s=1.0)
    assert best_plan(options, alone).rows == 1
    assert best_plan(options, beside).rows == 0


def test_a_tree_level_that_is_poor_by_itself_is_taken_for_the_one_after_it():
    # Four rows of the second level bring little; the third one pays for them.
    tree = Option("eagle3", [0.9, 0.85, 0.8], (1, 4, 1), is_network=True)
    prices = prices_of(1 + 0.25 * np.arange(13.0), [0.0] * 20, 1, 2)
    plan = best_plan([[tree], [tree]], prices, 1.0)
    assert [pick.levels for pick in plan.picks] == [3, 3]


@pytest.mark.parametrize("num_requests", [1, 2])
def test_levels_without_a_pass_of_their_own_pay_for_the_one_before_them(num_requests: int):
    """As heads, or mask tokens: the first level alone would not pay for the only pass."""
    pass_s = 1.5 if num_requests == 1 else 2.5
    target_N = [1 + 0.01 * rows for rows in range(17)]
    prices = prices_of(target_N, [0.0, *[pass_s] * 60], 1, num_requests)
    options = [[Option("medusa", [0.9, 0.8, 0.7, 0.6], is_network=True)]] * num_requests
    plan = best_plan(options, prices, 1.0)
    assert [pick.levels for pick in plan.picks] == [4] * num_requests


@pytest.mark.parametrize("seed", range(40))
def test_deep_levels_that_are_not_looked_at_change_nothing(seed: int):
    """A pass that costs more than its level brings ends the search; the oracle looks at all."""
    rng = np.random.default_rng(seed)
    prices = random_prices(rng, 8, 2, stairs=seed % 2 == 0)
    options = [[Option("eagle3", falling(rng, 8), is_network=True)] for _ in range(2)]
    found = worth(best_plan(options, prices), prices, None)
    assert found == pytest.approx(best_by_brute_force(options, prices, None))
