"""What the controller promises, in simulated engines that it does not know.

The oracle of speed is the best policy of one fixed length, plain decoding among them, in the same
engine with the same luck. Rates are of expected tokens: drafts are counted before their coins fall.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from msgspec import structs

from outdraft.control.controller import Controller
from outdraft.control.costs import CostCurve, CostTable, DrafterCost
from outdraft.control.policy import FixedLength
from outdraft.core.decision import Reason
from tests.planning.scenarios import controlled, fixed_rates, random_case
from tests.planning.simulator import Simulator
from tests.planning.worlds import NETWORK, Acceptance, HostTruth, Load, Scenario, World

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 128, 512)
SETTLED = 300  # steps after which a state is steady
BLOCK = 12  # random engines of one test
DEAR = 0.1  # that deciding takes, of a plain step


def line(slope: float, pass_s: float = 0.1) -> CostTable:
    """A target whose pass takes 1 s and `slope` more for each row, a network, a host."""
    target = CostCurve(ROWS, tuple(1 + slope * (rows - 1) for rows in ROWS))
    passes = CostCurve((1, 128), (pass_s, pass_s * 1.5))
    catch_up = CostCurve((1, 256), (pass_s / 100, 2.5 * pass_s))
    return CostTable(target, drafters={NETWORK: DrafterCost(passes, catch_up)}, host_s=0.05)


def switching(step: int, before: World, after: World, at: int = 400) -> World:
    return before if step < at else after


def changing(load: Load, before: World, after: World, *, seed: int = 0, at: int = 400) -> Scenario:
    return Scenario(load, lambda step: switching(step, before, after, at), 5, seed)


def steady_shares(seeds, *, mixed=False, prompts=False):
    """The controller's rate against the best fixed length's, by random engine."""
    shares = {}
    for seed in seeds:
        case = random_case(seed, mixed=mixed, prompts=prompts)
        # Which requests run changes what is true, so it takes longer to know them.
        num_steps, settled = (1000, 500) if mixed or prompts else (700, SETTLED)
        steps = controlled(case.scenario, case.table, num_steps)
        if mixed or prompts:
            best = max(fixed_rates(case.scenario, num_steps, settled))
        else:
            best = max(fixed_rates(case.scenario, 60))
        shares[seed] = steps.rate(settled) / best
    return shares


def assert_close_to_the_best(shares):
    assert min(shares.values()) >= 0.97, sorted((share, seed) for seed, share in shares.items())[:5]


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("first", range(0, 96, BLOCK))
def test_never_three_percent_below_plain_or_the_best_fixed_length(first: int):
    assert_close_to_the_best(steady_shares(range(first, first + BLOCK)))


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("first", range(0, 12, 3))
def test_neither_where_requests_differ(first: int):
    assert_close_to_the_best(steady_shares(range(first, first + 3), mixed=True))


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("first", range(0, 8, 4))
def test_neither_beside_prompts(first: int):
    assert_close_to_the_best(steady_shares(range(first, first + 4), prompts=True))


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("first", range(0, 12, 3))
def test_neither_where_deciding_takes_a_tenth_of_a_step(first: int):
    shares = {}
    for seed in range(first, first + 3):
        case = random_case(seed)
        controller = Controller(case.table, case.scenario.max_drafts)
        # Steps between two lessons double, so it takes longer until they are seldom.
        steps = Simulator(case.scenario, controller, DEAR).run(2000)
        shares[seed] = steps.rate(1000) / max(fixed_rates(case.scenario, 60))
    assert_close_to_the_best(shares)


@pytest.mark.full
@pytest.mark.parametrize("first", range(96, 300, BLOCK))
def test_neither_in_many_more_engines(first: int):
    assert_close_to_the_best(steady_shares(range(first, first + BLOCK)))


@pytest.mark.full
@pytest.mark.parametrize("first", range(8, 32, BLOCK))
def test_neither_beside_prompts_in_many_more_engines(first: int):
    assert_close_to_the_best(steady_shares(range(first, first + BLOCK), prompts=True))


def random_host(seed: int) -> tuple[Scenario, CostTable]:
    """A source of the host that is right as often as chance has it, in a random engine."""
    rng = np.random.default_rng([seed, 78])
    table = random_case(seed).table
    chances = tuple(sorted(rng.uniform(0.02, 0.95, 3)))
    world = World(table, None, HostTruth(rng.uniform(0.2, 0.9), chances, (1, 4, 16)))
    load = Load(int(rng.choice([1, 4, 16])), tuple(int(n) for n in rng.integers(60, 300, 16)))
    return Scenario(load, lambda _: world, int(rng.integers(2, 9)), seed), table


def host_shares(seeds):
    shares = {}
    for seed in seeds:
        scenario, table = random_host(seed)
        best = max(fixed_rates(scenario, 1000, SETTLED))
        shares[seed] = controlled(scenario, table, 1000).rate(SETTLED) / best
    return shares


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("first", range(0, 8, 4))
def test_neither_with_offers_of_the_host(first: int):
    assert_close_to_the_best(host_shares(range(first, first + 4)))


@pytest.mark.full
@pytest.mark.parametrize("first", range(8, 56, BLOCK))
def test_neither_with_offers_of_the_host_in_many_more_engines(first: int):
    assert_close_to_the_best(host_shares(range(first, first + BLOCK)))


def drift_shares(seeds):
    """The rate from 400 steps after acceptance became that of another random world, and the machine
    faster or slower. A network that was off has few labels a probe: it is found by several."""
    shares = {}
    for seed in seeds:
        before, after = random_case(seed), random_case(seed + 1000)
        load, max_drafts = before.scenario.load, before.scenario.max_drafts
        worlds = before.scenario.world(0), after.scenario.world(0)
        rng = np.random.default_rng([seed, 79])
        # The same engine, up to twice as fast or slow; the table was measured before.
        later = replace(
            worlds[0],
            network=worlds[1].network,
            target_factor=worlds[0].target_factor * 2 ** rng.uniform(-1, 1),
            draft_factor=worlds[0].draft_factor * 2 ** rng.uniform(-1, 1),
        )
        scenario = Scenario(
            load, partial(switching, before=worlds[0], after=later), max_drafts, seed
        )
        best = max(fixed_rates(Scenario(load, lambda _, w=later: w, max_drafts, seed), 60))
        shares[seed] = controlled(scenario, before.table, 1300).rate(800) / best
    return shares


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("first", range(0, 8, 4))
def test_neither_four_hundred_steps_after_everything_changed(first: int):
    assert_close_to_the_best(drift_shares(range(first, first + 4)))


@pytest.mark.full
@pytest.mark.parametrize("first", range(8, 56, BLOCK))
def test_neither_four_hundred_steps_after_everything_changed_in_many_more(first: int):
    assert_close_to_the_best(drift_shares(range(first, first + BLOCK)))


@pytest.mark.full
@pytest.mark.parametrize("first", range(12, 60, BLOCK))
def test_neither_in_many_more_engines_where_requests_differ(first: int):
    assert_close_to_the_best(steady_shares(range(first, first + BLOCK), mixed=True))


GOOD, POOR = Acceptance((0.85, 0.8, 0.75)), Acceptance((0.1,))
LOSSES = {
    "acceptance falls": (World(line(0.05), GOOD), World(line(0.05), POOR)),
    "drafting slows down": (
        World(line(0.05), Acceptance((0.5, 0.4))),
        World(line(0.05), Acceptance((0.5, 0.4)), draft_factor=3.5),
    ),
    "rows become dear": (
        World(line(0.01), Acceptance((0.4, 0.3))),
        World(CostTable(line(0.2).target, drafters=line(0.01).drafters, host_s=0.05),
              Acceptance((0.4, 0.3))),
    ),
    "the host's matches mislead": (
        World(line(0.1), None, HostTruth(0.6, (0.8,))),
        World(line(0.1), None, HostTruth(0.6, (0.05,))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_end_within_two_hundred_steps(loss: str, concurrency: int):
    before, after = LOSSES[loss]
    scenario = changing(Load(concurrency, (150, 90, 200)), before, after)
    steps = controlled(scenario, before.table, 1000)
    alone = Scenario(scenario.load, lambda _: after, 5)
    assert steps.rate(600) >= 0.97 * max(fixed_rates(alone, 400))


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_end_where_deciding_takes_a_tenth_of_a_step(loss: str, concurrency: int):
    # Fixed lengths decide nothing, so a part of that tenth stays.
    before, after = LOSSES[loss]
    scenario = changing(Load(concurrency, (150, 90, 200)), before, after)
    steps = Simulator(scenario, Controller(before.table, 5), DEAR).run(1400)
    alone = Scenario(scenario.load, lambda _: after, 5)
    assert steps.rate(600) >= 0.95 * max(fixed_rates(alone, 800))


@pytest.mark.slow
def test_a_network_that_slows_down_is_noticed_where_deciding_takes_a_tenth_of_a_step():
    before, after = LOSSES["drafting slows down"]
    for seed in range(8):
        scenario = changing(Load(1, (150, 90, 200)), before, after, seed=seed)
        steps = Simulator(scenario, Controller(before.table, 5), DEAR).run(1400)
        alone = Scenario(scenario.load, lambda _: after, 5, seed)
        assert steps.rate(600) >= 0.97 * max(fixed_rates(alone, 800))


@pytest.mark.slow
def test_lengths_suit_one_request_after_the_other_where_deciding_takes_a_fiftieth_of_a_step():
    """Requests of 50 to 100 tokens that differ much, so that the best fixed length suits few."""
    shares = []
    for seed in range(12):
        rng = np.random.default_rng([seed, 9])
        acceptance = Acceptance((0.63, 0.66), tuple(rng.normal(0, 1, 64).tolist()))
        world = World(line(0.1), acceptance)
        load = Load(1, tuple(rng.integers(50, 100, 64).tolist()))
        scenario = Scenario(load, lambda _, world=world: world, 7, seed)
        steps = Simulator(scenario, Controller(world.table, 7), 0.02).run(1500)
        shares.append(steps.rate(300) / max(fixed_rates(scenario, 1500, 300)))
    assert np.mean(shares) >= 0.99
    assert min(shares) >= 0.97


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_gain_of_the_host_that_returns_is_found_where_deciding_takes_a_tenth(concurrency: int):
    # Each step with an offer is decided.
    before = World(line(0.1), None, HostTruth(0.5, (0.02,)))
    after = World(line(0.1), None, HostTruth(0.5, (0.9,)))
    scenario = changing(Load(concurrency), before, after)
    steps = Simulator(scenario, Controller(line(0.1), 5), DEAR).run(1400)
    assert sum(steps.drafted[300:400]) < 0.1 * sum(steps.drafted[600:700])
    best = max(fixed_rates(Scenario(Load(concurrency), lambda _: after, 5), 800))
    assert steps.rate(600) >= 0.9 * best


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_gain_of_the_host_that_returns_is_found_within_two_hundred_steps(concurrency: int):
    for seed in range(3):
        before = World(line(0.1), None, HostTruth(0.5, (0.02,)))
        after = World(line(0.1), None, HostTruth(0.5, (0.9,)))
        steps = controlled(changing(Load(concurrency), before, after, seed=seed), line(0.1), 800)
        assert sum(steps.drafted[300:400]) < 0.1 * sum(steps.drafted[600:700])
        best = max(fixed_rates(Scenario(Load(concurrency), lambda _, w=after: w, 5, seed), 200))
        assert steps.rate(600) >= 0.97 * best


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_gain_of_a_network_that_returns_is_found_within_one_interval(concurrency):
    for seed in range(3):
        load = Load(concurrency, (400, 300, 500))
        before, after = World(line(0.02), POOR), World(line(0.02), GOOD)
        scenario = changing(load, before, after, seed=seed, at=700)
        controller = Controller(line(0.02), 5)
        simulator = Simulator(scenario, controller)
        simulator.run(700)
        interval = controller.probe.interval
        assert interval is not None
        assert interval <= 512
        reasons = [d.reason for d in simulator.run(interval + 40).decisions[700:]]
        assert Reason.GAIN in reasons[-20:]
        assert reasons.count(Reason.GAIN) > 10


@pytest.mark.slow
def test_probes_of_a_network_that_never_pays_take_one_percent_of_the_time():
    for seed in range(6):
        load, world = Load(1 + 3 * seed, (300, 200)), World(line(0.05, 0.3), Acceptance((0.05,)))
        scenario = Scenario(load, lambda _, w=world: w, 5, seed)
        steps = controlled(scenario, line(0.05, 0.3), 2500)
        probes = [d.reason is Reason.NETWORK_PROBE for d in steps.decisions]
        plain_s = sum(s for s, p in zip(steps.seconds[500:], probes[500:], strict=True) if not p)
        plain_s *= (len(probes) - 500) / probes[500:].count(False)
        assert 0 < sum(steps.seconds[500:]) / plain_s - 1 < 0.0125
        assert all(not d.grants for d, p in zip(steps.decisions[500:], probes[500:], strict=True)
                   if not p)  # fmt: skip


@pytest.mark.parametrize("chances", [(0.9,), (0.8, 0.75, 0.7), (0.7,)])
def test_at_low_load_the_longest_length_is_kept_where_it_is_best(chances):
    world = World(line(0.002, 0.02), Acceptance(chances))
    scenario = Scenario(Load(1), lambda _: world, 4)
    rates = fixed_rates(scenario, 100)
    assert max(rates) == rates[-1]
    assert controlled(scenario, line(0.002, 0.02), 900).rate(SETTLED) >= 0.99 * rates[-1]


def test_nothing_is_trimmed_at_low_load():
    world = World(line(0.002, 0.02), Acceptance((0.85,)))
    steps = controlled(Scenario(Load(2), lambda _: world, 4), line(0.002, 0.02), 500)
    assert {d.price for d in steps.decisions[100:] if d.grants} == {0.0}


def test_lengths_by_request_beat_one_length_where_requests_differ():
    world = World(line(0.08, 0.05), Acceptance((0.6,), (2.0, -2.0)))
    scenario = Scenario(Load(8), lambda _: world, 6)
    steps = controlled(scenario, line(0.08, 0.05), 800)
    assert steps.rate(SETTLED) >= 1.05 * max(fixed_rates(scenario, 300))
    lengths = {grant.request_id: grant.levels for grant in steps.decisions[-3].grants}
    assert min(lengths.get(f"r{i}", 0) for i in (0, 2, 4, 6)) > max(
        lengths.get(f"r{i}", 0) for i in (1, 3, 5, 7)
    )


class Blind(Controller):
    """The same without live confidence."""

    def observe(self, outcome):
        drafts = tuple(structs.replace(draft, margins=()) for draft in outcome.drafts)
        super().observe(structs.replace(outcome, drafts=drafts))


@pytest.mark.slow
def test_live_confidence_brings_more_where_lengths_are_trimmed():
    world = World(line(0.08, 0.03), Acceptance((0.6,), margin_weight=0.8))
    scenario = Scenario(Load(8), lambda _: world, 6)
    table = line(0.08, 0.03)
    live = Simulator(scenario, Controller(table, 6)).run(800).rate(SETTLED)
    blind = Simulator(scenario, Blind(table, 6)).run(800).rate(SETTLED)
    assert live >= 1.01 * blind


@pytest.mark.slow
def test_drafts_that_cost_far_more_than_the_table_says_end_and_come_back_when_they_pay():
    table = line(0.01, 0.05)
    before = World(table, Acceptance((0.8,)), draft_factor=20.0)
    after = World(table, Acceptance((0.95,)))
    for seed in range(4):
        scenario = changing(Load(4, (300,)), before, after, seed=seed, at=1200)
        decisions = Simulator(scenario, Controller(table, 5)).run(3200).decisions
        assert sum(d.reason is Reason.NO_GAIN for d in decisions[600:1200]) > 0.9 * 600
        first = next(n for n in range(1200, 3200) if decisions[n].reason is Reason.GAIN)
        assert first < 2600
        later = decisions[first : first + 600]
        assert sum(d.reason is Reason.GAIN for d in later) > 0.9 * 600


@pytest.mark.slow
@pytest.mark.parametrize("period", [100, 250])
def test_acceptance_that_keeps_changing_costs_three_percent_at_most(period: int):
    good, poor = World(line(0.05), GOOD), World(line(0.05), Acceptance((0.05,)))
    for concurrency in (1, 8):
        scenario = Scenario(
            Load(concurrency, (150,)),
            lambda step: good if step // period % 2 else poor,
            5,
        )
        steps = controlled(scenario, line(0.05), 2000)
        plain = Simulator(scenario, FixedLength(0)).run(500)
        assert steps.rate() >= 0.97 * plain.rate()
        poor_steps = [s for s in range(period, 2000) if s // period % 2 == 0]
        rate = sum(steps.expected[s] for s in poor_steps) / sum(
            steps.seconds[s] for s in poor_steps
        )
        assert rate >= 0.86 * plain.rate()


def test_one_seed_gives_one_course():
    case = random_case(3, mixed=True)
    runs = [controlled(case.scenario, case.table, 200) for _ in range(2)]
    assert runs[0].seconds == runs[1].seconds
    assert runs[0].decisions == runs[1].decisions


def test_fixed_policies_meet_the_same_luck():
    world = World(line(0.0), Acceptance((0.5,)))
    scenario = Scenario(Load(1), lambda _: world, 3)
    plain = Simulator(scenario, FixedLength(0)).run(50)
    assert plain.tokens == [1] * 50
    drafted = Simulator(scenario, FixedLength(3)).run(2000)
    assert sum(drafted.expected) == pytest.approx(2000 * (1 + 0.5 + 0.25 + 0.125))
    assert sum(drafted.tokens) == pytest.approx(sum(drafted.expected), rel=0.03)
