"""A network's chains and trees compete: what brings more tokens a second is drafted."""

from dataclasses import replace

import pytest

from outdraft.control.controller import Controller
from outdraft.control.costs import CostCurve, CostTable, DrafterCost
from outdraft.control.policy import FixedLength
from tests.planning.simulator import Simulator
from tests.planning.worlds import NETWORK, Acceptance, Load, Scenario, World

TREE = (2, 2, 1, 1)
SETTLED, STEPS = 1000, 3000


def table(row_s: float) -> CostTable:
    """Plain steps of one request take 1.1; a pass of the network 0.1."""
    rows = (1, 8, 64, 512)
    target = CostCurve(rows, tuple(1 + row_s * (n - 1) for n in rows))
    passes = CostCurve(rows, tuple(0.1 + 0.002 * n for n in rows))
    catch_up = CostCurve((1, 256), (0.001, 0.256))
    return CostTable(target, drafters={NETWORK: DrafterCost(passes, catch_up)}, host_s=0.1)


def scenario(row_s, chain, tree, concurrency=1, **more):
    world = World(table(row_s), Acceptance((chain,)), tree=Acceptance((tree,)))
    return Scenario(Load(concurrency, (200,)), lambda step: world, sum(TREE), tree=TREE, **more)


def controlled(given, steps=STEPS):
    return Simulator(given, Controller(given.world(0).table, given.max_drafts)).run(steps)


def best_fixed(given):
    """The best rate of plain decoding, chains and trees of any fixed length."""
    ways = [given, replace(given, tree=())]
    return max(
        Simulator(way, FixedLength(length)).run(800).rate(0)
        for way in ways
        for length in range(sum(TREE) + 1 if way is not given else len(TREE) + 1)
    )


def share_of_trees(steps, first=SETTLED):
    drafting = [one for one in steps.decisions[first:] if one.grants]
    return sum(bool(one.grants[0].shape) for one in drafting) / max(1, len(drafting))


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize(
    ("row_s", "chain", "tree", "has_trees"),
    [
        (0.01, 0.5, 0.75, True),  # rows are nearly free
        (0.01, 0.7, 0.9, True),
        (0.05, 0.75, 0.75, False),  # the tree brings nothing more for its rows
    ],
)
def test_the_better_shape_is_drafted(row_s, chain, tree, has_trees, concurrency):
    given = scenario(row_s, chain, tree, concurrency)
    steps = controlled(given)
    share = share_of_trees(steps)
    assert share >= 0.9 if has_trees else share <= 0.15
    assert steps.rate(SETTLED) >= 0.97 * best_fixed(given)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [((0.7, 0.7), (0.5, 0.8)), ((0.5, 0.8), (0.75, 0.6)), ((0.8, 0.6), (0.8, 0.95))],
)
def test_a_shape_that_becomes_better_is_found_within_1500_steps(before, after):
    costs, change = table(0.01), 1000

    def world(step):
        chain, tree = before if step < change else after
        return World(costs, Acceptance((chain,)), tree=Acceptance((tree,)))

    for seed in range(3):
        given = Scenario(Load(1, (200,)), world, sum(TREE), seed, tree=TREE)
        share = share_of_trees(controlled(given, change + 2000), change + 1500)
        assert share >= 0.85 if after[1] > after[0] else share <= 0.15
