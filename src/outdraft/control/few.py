"""The best plan of a few requests: what decision.py does with arrays, in plain loops.

Between the passes of a small model the caches hold weights, so that each array operation waits for
its code: forty of them took a millisecond there, and these loops take a fifth of that. Each number
is the same to the last bit, so both find the same plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outdraft.control.plans import Option, Pick, Plan, Prices, falling, plain, price_of


@dataclass(slots=True)
class _Level:
    """One level of one request's draft.

    Attributes:
        density: tokens a row.
        depth: of a network's level, from 1 on; 0: it takes no pass.
        owner: the place of its option.
        pass_rows: that its pass reads for it; 0: the network needs no pass for it.
        draft_s: what it adds to the time of its pass, which levels before it may have opened.
    """

    density: float
    tokens: float
    rows: int
    depth: int
    owner: int
    is_chain: bool
    fixed_s: float
    pass_rows: int
    draft_s: float = 0.0


def best_of_few(chosen: Sequence[tuple[int, Option]], prices: Prices) -> Plan:
    """The best plan if each request has one option: every depth with every number of rows."""
    levels = _levels(chosen, prices)
    best, best_at = 0.0, None
    for depth in range(1 + max([level.depth for level in levels])):
        rows, worth = 0, 0.0
        for place, level in enumerate(levels):
            if level.depth > depth:
                continue
            rows += level.rows
            if rows > prices.max_rows:
                break
            worth += level.tokens - prices.rate * (level.draft_s + level.fixed_s)
            beside_s = prices.drafting_s + prices.target_N[rows] - prices.target_N[0]
            objective = worth - prices.rate * beside_s
            if objective > best:
                best, best_at = objective, (depth, place)
    return plain(prices) if best_at is None else _plan(chosen, prices, levels, *best_at, best)


def _levels(chosen: Sequence[tuple[int, Option]], prices: Prices) -> list[_Level]:
    """The most tokens a row first; a draft's stay in order."""
    levels = [
        _Level(
            density,
            option.survivals[index],
            option.rows_at(index),
            index + 1 if option.is_network else 0,
            owner,
            option.is_network and not option.shape,
            0.0 if index else option.fixed_s,
            option.pass_rows(index) if option.is_network and index < prices.max_passes else 0,
        )
        for owner, (_, option) in enumerate(chosen)
        for index, density in enumerate(falling(option, prices.rate))
    ]
    levels.sort(key=lambda level: -level.density)
    rows_by_depth: dict[int, int] = {}
    for level in levels:
        if level.pass_rows:
            before = rows_by_depth.get(level.depth, 0)
            rows = rows_by_depth[level.depth] = before + level.pass_rows
            # What is beyond the prices has too many rows anyway.
            most = len(prices.pass_N) - 1
            level.draft_s = prices.pass_N[min(rows, most)]
            if before:
                level.draft_s -= prices.pass_N[min(before, most)]
            elif level.depth == 1:
                level.draft_s += prices.start_s
    return levels


def _plan(
    chosen: Sequence[tuple[int, Option]],
    prices: Prices,
    levels: Sequence[_Level],
    depth: int,
    last: int,
    objective: float,
) -> Plan:
    """The plan that takes the levels up to place `last` that are no deeper than `depth`."""
    taken = [level for level in levels[: last + 1] if level.depth <= depth]
    counts = [0] * len(chosen)
    for level in taken:
        counts[level.owner] += 1
    rows = sum([level.rows for level in taken])
    is_trimmed = any(level.is_chain and level.depth <= depth for level in levels[last + 1 :])
    live = [level.tokens for level in taken if level.is_chain]
    return Plan(
        tuple(
            Pick(request, option, count)
            for (request, option), count in zip(chosen, counts, strict=True)
            if count
        ),
        depth,
        rows,
        price_of(live, prices, rows, is_trimmed=is_trimmed),
        _sum([level.tokens for level in taken]),
        objective,
        prices.drafting_s + _sum([level.draft_s for level in taken]),
        float(prices.target_N[rows]),
        _sum([level.fixed_s for level in taken]),
    )


def _sum(numbers: list[float]) -> float:
    """As arrays add them, which is in another order from eight numbers on."""
    return float(np.array(numbers).sum())
