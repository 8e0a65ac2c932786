"""The plan of a step is the best one: against all combinations of lengths."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from outdraft.control.decision import best_of_many, best_plan
from outdraft.control.few import best_of_few
from outdraft.control.plans import Option, Prices


def falling(rng, count):
    return np.cumprod(rng.uniform(0.2, 1, count)).tolist()


def random_prices(rng, max_rows, *, stairs):
    steps = rng.uniform(0, 0.3, max_rows + 1)
    if stairs:
        steps *= rng.random(max_rows + 1) < 0.3
    pass_N = np.concatenate([[0.0], np.full(4 * max_rows, rng.uniform(0, 0.4))])
    max_passes, rate = int(rng.choice([1, 63])), rng.uniform(0.5, 2)
    return Prices(1 + steps.cumsum(), pass_N, max_passes, rate, rng.uniform(0, 0.3))


def objective(picks, prices):
    """Tokens less the price of their time; picks: (option, levels), one for each request."""
    taken = [(option, levels) for option, levels in picks if levels]
    tokens = sum(sum(option.survivals[:levels]) for option, levels in taken)
    rows = sum(option.num_rows(levels) for option, levels in taken)
    if rows > prices.max_rows:
        return -np.inf
    passes: dict[int, int] = {}
    for option, levels in taken:
        if option.is_network:
            for level in range(min(levels, prices.max_passes)):
                passes[level] = passes.get(level, 0) + option.pass_rows(level)
    draft_s = sum(prices.pass_N[count] for count in passes.values())
    draft_s += prices.start_s if passes else 0.0
    draft_s += sum(option.fixed_s for option, _ in taken)
    return tokens - prices.rate * (prices.target_N[rows] - prices.target_N[0] + draft_s)


def best_by_brute_force(options, prices):
    ways = [
        [(None, 0), *((one, n) for one in own for n in range(1, len(one.survivals) + 1))]
        for own in options
    ]
    return max(objective(picks, prices) for picks in itertools.product(*ways))


@pytest.mark.parametrize("seed", range(60))
def test_lengths_of_networks_are_the_best_of_all(seed: int):
    rng = np.random.default_rng(seed)
    prices = random_prices(rng, int(rng.integers(1, 12)), stairs=seed % 2 == 0)
    options = [
        [Option("eagle3", falling(rng, int(rng.integers(1, 5))), is_network=True)]
        for _ in range(int(rng.integers(1, 4)))
    ]
    plan = best_plan(options, prices)
    best = max(0.0, best_by_brute_force(options, prices))
    assert plan.objective == pytest.approx(best, abs=1e-12)
    assert plan.objective == pytest.approx(
        objective([(pick.option, pick.levels) for pick in plan.picks], prices), abs=1e-12
    )


@pytest.mark.parametrize("seed", range(40))
def test_one_requests_source_shape_and_length_are_the_best_of_all(seed: int):
    rng = np.random.default_rng(seed)
    prices = random_prices(rng, 14, stairs=seed % 2 == 0)
    options = [
        [
            Option("suffix", falling(rng, 4), match_length=3),
            Option("eagle3", falling(rng, 4), is_network=True, fixed_s=rng.uniform(0, 0.2)),
            Option("eagle3", falling(rng, 3), (3, 4, 2), is_network=True),
        ]
    ]
    plan = best_plan(options, prices)
    assert plan.objective == pytest.approx(max(0.0, best_by_brute_force(options, prices)))


@pytest.mark.parametrize("seed", range(40))
def test_sources_of_several_requests_are_nearly_the_best_of_all(seed: int):
    rng = np.random.default_rng(seed)
    prices = random_prices(rng, 12, stairs=False)
    options = [
        [Option("suffix", falling(rng, 3)), Option("eagle3", falling(rng, 3), is_network=True)]
        for _ in range(3)
    ]
    plan = best_plan(options, prices)
    best = max(0.0, best_by_brute_force(options, prices))
    assert best - 0.15 <= plan.objective <= best + 1e-12
    host_only = [[own[0]] for own in options]
    network_only = [[own[1]] for own in options]
    assert plan.objective >= best_plan(host_only, prices).objective - 1e-12
    assert plan.objective >= best_plan(network_only, prices).objective - 0.15


def test_free_rows_behind_a_stair_are_filled():
    target_N = np.array([1.0, 1.5, 1.5, 1.5, 1.5, 3.0])
    options = [[Option("suffix", [0.5, 0.1])] for _ in range(3)]
    plan = best_plan(options, Prices(target_N, np.zeros(2), 0, 1.0))
    assert plan.rows == 4
    assert sorted(pick.levels for pick in plan.picks) == [1, 1, 2]


def test_nothing_is_trimmed_where_all_levels_pay():
    prices = Prices(np.linspace(1, 1.01, 13), np.full(20, 0.001), 63, 1.0)
    options = [[Option("eagle3", [0.9, 0.8, 0.7, 0.6], is_network=True)] for _ in range(3)]
    plan = best_plan(options, prices)
    assert plan.price == 0.0
    assert [pick.levels for pick in plan.picks] == [4, 4, 4]


def test_the_price_is_the_smallest_survival_that_is_taken():
    prices = Prices(1 + 0.25 * np.arange(9.0), np.full(9, 0.0), 63, 1.0)
    options = [
        [Option("eagle3", survivals, is_network=True)]
        for survivals in ([0.9, 0.8, 0.3, 0.1], [0.5, 0.2, 0.1, 0.1])
    ]
    plan = best_plan(options, prices)
    assert [pick.levels for pick in plan.picks] == [3, 1]
    assert plan.price == 0.3


def test_rows_that_prompts_take_raise_what_one_more_costs():
    # Rows are free up to the eighth: behind a prompt that fills them, drafts no longer pay.
    rows = np.arange(20.0)
    target = 1 + 0.6 * np.maximum(0, rows - 8)
    options = [[Option("eagle3", [0.5], is_network=True)]]
    alone = Prices(target[1:3], np.array([0, 0.1]), 63, 1.0)
    beside = Prices(target[9:11], np.array([0, 0.1]), 63, 1.0)
    assert best_plan(options, alone).rows == 1
    assert best_plan(options, beside).rows == 0


def test_a_tree_level_that_is_poor_by_itself_is_taken_for_the_one_behind_it():
    # Four rows of the second level bring little; the third one pays for them.
    tree = Option("eagle3", [0.9, 0.85, 0.8], (1, 4, 1), is_network=True)
    prices = Prices(1 + 0.25 * np.arange(13.0), np.zeros(20), 1, 1.0)
    plan = best_plan([[tree], [tree]], prices)
    assert [pick.levels for pick in plan.picks] == [3, 3]
    assert plan.objective == pytest.approx(2 * (0.9 + 0.85 + 0.8 - 6 * 0.25))


def random_option(rng, max_levels):
    """A draft of the host or the network, chain or tree, with something to catch up or without."""
    survivals = falling(rng, int(rng.integers(1, max_levels + 1)))
    shape = tuple(rng.integers(1, 4, len(survivals)).tolist()) if rng.random() < 0.3 else ()
    is_network = bool(rng.random() < 0.7)
    fixed_s = rng.uniform(0, 0.5) if is_network and rng.random() < 0.4 else 0.0
    return Option("any", survivals, shape, is_network, fixed_s)


@pytest.mark.parametrize("seed", range(0, 400, 50))
def test_loops_for_few_requests_find_the_plan_of_arrays_to_the_last_bit(seed: int):
    num_drafting = 0
    for own in range(seed, seed + 50):
        rng = np.random.default_rng(own)
        prices = random_prices(rng, int(rng.integers(1, 24)), stairs=own % 2 == 0)
        prices = replace(prices, drafting_s=rng.uniform(0, 0.2))
        chosen = [(place, random_option(rng, 8)) for place in range(2, 2 + int(rng.integers(1, 6)))]
        few, many = best_of_few(chosen, prices), best_of_many(chosen, prices)
        if many.objective > 0:
            num_drafting += 1
            assert few == many
        else:
            assert few.picks == ()
    assert num_drafting > 10


@pytest.mark.parametrize("seed", range(40))
def test_levels_that_no_plan_has_change_nothing(seed: int):
    """Options are cut before they are looked at; the twin that looks at all of them is not."""
    rng = np.random.default_rng(seed)
    prices = random_prices(rng, 150, stairs=seed % 2 == 0)
    chosen = [
        (index, Option("eagle3", falling(rng, 63), is_network=True, fixed_s=fixed_s))
        for index, fixed_s in enumerate(rng.choice([0.0, 0.0, 0.3, 2.0], int(rng.integers(2, 9))))
    ]
    whole = best_of_many(chosen, prices)
    plan = best_plan([[option] for _, option in chosen], prices)
    assert plan.objective == pytest.approx(max(0.0, whole.objective))
    if whole.objective > 1e-9:
        assert (plan.depth, plan.rows, plan.price) == (whole.depth, whole.rows, whole.price)
        assert [(pick.request, pick.levels) for pick in plan.picks] == [
            (pick.request, pick.levels) for pick in whole.picks
        ]


@pytest.mark.parametrize("num_requests", [1, 2])
def test_levels_without_a_pass_of_their_own_pay_for_the_one_before_them(num_requests: int):
    """As heads, or mask tokens: the first level alone would not pay for the only pass."""
    prices = Prices([1 + 0.01 * rows for rows in range(17)], [0.0, *[1.5] * 60], 1, 1.0)
    option = Option("medusa", [0.9, 0.8, 0.7, 0.6], is_network=True)
    if num_requests == 2:
        prices = replace(prices, pass_N=[0.0, *[2.5] * 60])
    options = [[option]] * num_requests
    plan = best_plan(options, prices)
    assert [pick.levels for pick in plan.picks] == [4] * num_requests
    assert plan.objective == pytest.approx(best_by_brute_force(options, prices))
