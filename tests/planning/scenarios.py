"""Random engines and loads to try the controller on, and fixed policies beside it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outdraft.control.controller import Controller
from outdraft.control.costs import CostCurve, CostTable, DrafterCost
from outdraft.control.policy import FixedLength
from tests.planning.simulator import Simulator, Steps
from tests.planning.worlds import NETWORK, Acceptance, Load, Scenario, World

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
SHAPES = ("flat", "line", "knee", "convex", "stairs")


def monotone(seconds: Sequence[float]) -> tuple[float, ...]:
    """The nearest sequence in squares that never falls (pool adjacent violators)."""
    means: list[float] = []
    counts: list[int] = []
    for value in seconds:
        means.append(value)
        counts.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            mean, count = means.pop(), counts.pop()
            total = counts[-1] + count
            means[-1] = (means[-1] * counts[-1] + mean * count) / total
            counts[-1] = total
    return tuple(mean for mean, count in zip(means, counts, strict=True) for _ in range(count))


def target_curve(rng, shape: str) -> CostCurve:
    """Times of the target's pass; one row takes 1 s."""
    rows = np.asarray(ROWS, float)
    slope = 10 ** rng.uniform(-2.5, -0.7)
    if shape == "flat":
        times = 1 + 0.001 * rows
    elif shape == "line":
        times = 1 + slope * (rows - 1)
    elif shape == "knee":
        times = 1 + slope * np.maximum(0, rows - rng.choice([4, 8, 16, 32]))
    elif shape == "convex":
        times = 1 + slope * (rows - 1) ** rng.uniform(1.05, 1.5)
    else:
        jumps = rng.random(len(rows)) < 0.6
        times = 1 + slope * np.where(jumps, np.diff(rows, prepend=1), 0).cumsum()
    return CostCurve(ROWS, monotone((times / times[0]).tolist()), shape == "stairs")


def table(rng, shape: str) -> CostTable:
    pass_s, pass_slope = 10 ** rng.uniform(-2, -0.4), 10 ** rng.uniform(-4, -2)
    rows = (1, 8, 32, 128)
    passes = CostCurve(rows, tuple(pass_s + pass_slope * n for n in rows))
    catch_up = CostCurve((1, 16, 64, 256), tuple(pass_slope * n for n in (1, 16, 64, 256)))
    max_passes = 1 if rng.random() < 0.2 else 63
    drafter = DrafterCost(passes, catch_up, max_passes=max_passes)
    return CostTable(
        target_curve(rng, shape),
        drafters={NETWORK: drafter},
        host_s=rng.uniform(0, 0.1),
        host_request_s=0.001,
    )


def acceptance(rng, *, mixed: bool) -> Acceptance:
    first, keep = rng.uniform(0.05, 0.95), rng.uniform(0.7, 1)
    offsets = tuple(rng.normal(0, 1.2, 8).tolist()) if mixed else (0.0,)
    return Acceptance(tuple(max(0.01, first * keep**i) for i in range(8)), offsets)


@dataclass(frozen=True)
class Case:
    """A random engine under a steady load."""

    seed: int
    shape: str
    scenario: Scenario
    table: CostTable


def random_case(seed: int, *, mixed: bool = False, prompts: bool = False) -> Case:
    rng = np.random.default_rng([seed, 77])
    shape = SHAPES[seed % len(SHAPES)]
    true = table(rng, shape)
    world = World(
        true,
        acceptance(rng, mixed=mixed),
        target_factor=rng.uniform(0.85, 1.15),
        draft_factor=rng.uniform(0.85, 1.15),
    )
    concurrency = int(rng.choice([4, 8, 16] if mixed else [1, 2, 4, 8, 16]))
    tokens = tuple(int(n) for n in rng.integers(60, 300, 16))
    load = Load(concurrency, tokens)
    if prompts:
        load = Load(concurrency, tokens, int(rng.integers(20, 200)), 64)
    scenario = Scenario(load, lambda step: world, int(rng.integers(2, 9)), seed)
    return Case(seed, shape, scenario, true)


def controlled(scenario: Scenario, told: CostTable, num_steps: int) -> Steps:
    return Simulator(scenario, Controller(told, scenario.max_drafts)).run(num_steps)


def fixed_rates(scenario: Scenario, num_steps: int, first: int = 0) -> list[float]:
    """Tokens a second of each fixed length, plain decoding first."""
    return [
        Simulator(scenario, FixedLength(k)).run(num_steps).rate(first)
        for k in range(scenario.max_drafts + 1)
    ]
