"""Which drafts of a step are worth their time: exhaustive over depths and numbers of rows.

A plan brings R + F tokens (R requests, F accepted drafts expected) and takes T seconds. What counts
is J = R + F - g * T with g the tokens a second that decoding reaches in the long run (Dinkelbach:
the plan with the largest J is the one that makes the rate largest). Prompt rows raise T of all
plans, plain decoding included; they change only what one more row costs.

For a given depth, the best drafts of B rows are those with the most accepted tokens a row. F is
concave in B, but T may have stairs, so every B is looked at, none is reached by stopping early.
All inputs come from finished steps, except offers of the host, whose drafts are one-hot.

Dimension key: I levels of all drafts, D depths of networks (0 included), B numbers of rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from outdraft.control.few import best_of_few
from outdraft.control.plans import Option, Pick, Plan, Prices, falling, plain, price_of

FEW = 256  # levels times depths up to which plain loops take less time than arrays


def best_plan(options: Sequence[Sequence[Option]], prices: Prices) -> Plan:
    """The plan with the largest objective; plain decoding if none is above it.

    options: by request; each takes one of its options or none.
    """
    drafting = [(index, own) for index, own in enumerate(options) if own]
    if not drafting or prices.max_rows == 0:
        return plain(prices)
    drafting = _without_vain_levels(drafting, prices)
    if not drafting:
        return plain(prices)
    if len(drafting) == 1:
        plans = [_best_alone(*drafting[0], prices)]
    else:
        slope = _slope(prices, len(drafting))
        host = [
            (index, one)
            for index, own in drafting
            if (one := _most_valuable([o for o in own if not o.is_network], slope, 0.0)) is not None
        ]
        plans = [_best_pooled(host, prices)] if host else []
        share = prices.rate * _pass_share(prices, len(drafting))
        # A network drafts one shape in a step: whoever chooses it shares its passes.
        for shape in dict.fromkeys(o.shape for _, own in drafting for o in own if o.is_network):
            mixed = [
                (index, one)
                for index, own in drafting
                if (fitting := [o for o in own if not o.is_network or o.shape == shape])
                and (one := _most_valuable(fitting, slope, share, prices.rate)) is not None
            ]
            if mixed:
                plans.append(_best_pooled(mixed, prices))
    best = max(plans, key=lambda plan: plan.objective, default=plain(prices))
    return best if best.objective > 0 else plain(prices)


def _without_vain_levels(
    drafting: Sequence[tuple[int, Sequence[Option]]], prices: Prices
) -> Sequence[tuple[int, Sequence[Option]]]:
    """The same without the levels that no plan has: all requests together would get less from one
    than its pass costs, which takes as long as that of one row at least. Deeper ones are no better,
    but for those that take no pass of their own, which count as the level's.

    About six of 63 levels are left, and to decide takes a quarter of the time.
    """
    least = prices.rate * float(prices.pass_N[1])
    lengths = [len(o.survivals) for _, own in drafting for o in own if o.is_network]
    for level in range(min(max(lengths, default=0), prices.max_passes)):
        most = 0.0
        for _, own in drafting:
            most += max(
                [
                    o.survivals[level] + sum(o.survivals[prices.max_passes :])
                    for o in own
                    if o.is_network and level < len(o.survivals)
                ],
                default=0.0,
            )
        if most <= least:
            cut = [(index, _cut(own, level)) for index, own in drafting]
            return [(index, own) for index, own in cut if own]
    return drafting


def _cut(options: Sequence[Option], num_levels: int) -> Sequence[Option]:
    """Options whose networks draft so many levels at most."""
    return [
        replace(option, survivals=option.survivals[:num_levels]) if option.is_network else option
        for option in options
        if num_levels or not option.is_network
    ]


def _best_alone(request: int, options: Sequence[Option], prices: Prices) -> Plan:
    """The best plan if one request alone may draft: each level of each option is tried."""
    target, passes, rate = prices.target_N, prices.pass_N, prices.rate
    target_s = float(target[0])
    best, best_at = 0.0, None
    for option in options:
        tokens, rows = 0.0, 0
        draft_s = option.fixed_s + prices.drafting_s
        draft_s += prices.start_s if option.is_network else 0.0
        for level, survival in enumerate(option.survivals):
            if option.is_network and level < prices.max_passes:
                draft_s += float(passes[option.pass_rows(level)])
            rows += option.rows_at(level)
            if rows > prices.max_rows:
                break
            tokens += survival
            objective = tokens - rate * (draft_s + float(target[rows]) - target_s)
            if objective > best:
                best, best_at = objective, (option, level + 1, rows, tokens, draft_s)
    if best_at is None:
        return plain(prices)
    option, levels, rows, tokens, draft_s = best_at
    return Plan(
        (Pick(request, option, levels),),
        levels if option.is_network else 0,
        rows,
        price_of(option.survivals[:levels], prices, rows, is_trimmed=False),
        tokens,
        best,
        draft_s - option.fixed_s,
        float(target[rows]),
        option.fixed_s,
    )


def _best_pooled(chosen: Sequence[tuple[int, Option]], prices: Prices) -> Plan:
    """The best plan if each request has one option: every depth with every number of rows."""
    num_levels = sum([len(option.survivals) for _, option in chosen])
    depth = max([len(option.survivals) if option.is_network else 0 for _, option in chosen])
    is_few = num_levels * (1 + depth) <= FEW
    return best_of_few(chosen, prices) if is_few else best_of_many(chosen, prices)


def best_of_many(chosen: Sequence[tuple[int, Option]], prices: Prices) -> Plan:
    """As `best_of_few`, whose fast twin it is for larger batches."""
    levels = _Levels(chosen, prices)
    depths_D1 = np.arange(levels.max_depth + 1)[:, None]
    is_in_DI = levels.depth_I[None, :] <= depths_D1
    rows_DI = np.where(is_in_DI, levels.rows_I, 0).cumsum(1)
    worth_I = levels.tokens_I - prices.rate * (levels.draft_I + levels.fixed_I)
    worth_DI = np.where(is_in_DI, worth_I, 0.0).cumsum(1)
    target_N = np.asarray(prices.target_N)
    target_DI = target_N[np.minimum(rows_DI, prices.max_rows)]
    beside_DI = prices.drafting_s + target_DI - target_N[0]
    objective_DI = worth_DI - prices.rate * beside_DI
    objective_DI[rows_DI > prices.max_rows] = -np.inf
    depth, last = np.unravel_index(int(objective_DI.argmax()), objective_DI.shape)
    taken = is_in_DI[depth].copy()
    left_out = taken & (np.arange(len(taken)) > last)
    taken[last + 1 :] = False
    is_trimmed = bool((left_out & levels.is_chain_I).any())
    live = taken & levels.is_chain_I
    counts = np.bincount(levels.owner_I[taken], minlength=len(chosen)).tolist()
    return Plan(
        tuple(
            Pick(request, option, count)
            for (request, option), count in zip(chosen, counts, strict=True)
            if count
        ),
        int(depth),
        int(rows_DI[depth, last]),
        price_of(
            levels.tokens_I[live].tolist(), prices, int(rows_DI[depth, last]), is_trimmed=is_trimmed
        ),
        float(levels.tokens_I[taken].sum()),
        float(objective_DI[depth, last]),
        prices.drafting_s + float(levels.draft_I[taken].sum()),
        float(target_DI[depth, last]),
        float(levels.fixed_I[taken].sum()),
    )


class _Levels:
    """The levels of all drafts as arrays, the most tokens a row first; a draft's stay in order."""

    def __init__(self, chosen: Sequence[tuple[int, Option]], prices: Prices) -> None:
        options = [option for _, option in chosen]
        counts_P = np.array([len(option.survivals) for option in options])
        starts_P = counts_P.cumsum() - counts_P
        owner_I = np.arange(len(options)).repeat(counts_P)
        level_I = np.arange(len(owner_I)) - starts_P[owner_I]
        tokens_I = np.fromiter(
            chain.from_iterable(option.survivals for option in options), float, len(owner_I)
        )
        is_network_I = np.array([option.is_network for option in options])[owner_I]
        fixed_I = np.zeros(len(owner_I))
        fixed_I[starts_P] = [option.fixed_s for option in options]
        has_pass_I = is_network_I & (level_I < prices.max_passes)
        rows_I, pass_rows_I = np.ones(len(owner_I), int), has_pass_I.astype(int)
        is_chain_I, density_I = is_network_I.copy(), tokens_I.copy()
        for option, start in zip(options, starts_P.tolist(), strict=True):
            own = slice(start, start + len(option.survivals))
            if option.shape:
                levels = range(len(option.survivals))
                rows_I[own] = [option.rows_at(level) for level in levels]
                pass_rows_I[own] *= [option.pass_rows(level) for level in levels]
                is_chain_I[own] = False
            if option.shape or option.fixed_s:
                density_I[own] = falling(option, prices.rate)
        order = (-density_I).argsort(kind="stable")
        self.tokens_I = tokens_I[order]
        self.rows_I = rows_I[order]
        self.depth_I = np.where(is_network_I, level_I + 1, 0)[order]
        self.owner_I = owner_I[order]
        self.fixed_I = fixed_I[order]
        self.is_chain_I = is_chain_I[order]
        self.max_depth = int(self.depth_I.max())
        self.draft_I = self._pass_s(pass_rows_I[order], prices)

    def _pass_s(self, pass_rows_I: np.ndarray, prices: Prices) -> np.ndarray:
        """What each level adds to the time of its pass, which levels before it may have opened."""
        draft_I, pass_N = np.zeros(len(pass_rows_I)), np.asarray(prices.pass_N)
        for depth in range(1, min(self.max_depth, prices.max_passes) + 1):
            at = np.flatnonzero((self.depth_I == depth) & (pass_rows_I > 0))
            if len(at) == 0:
                continue
            rows = pass_rows_I[at].cumsum()  # what is beyond the prices has too many rows anyway
            times = pass_N[np.minimum(rows, len(pass_N) - 1)]
            added = times.copy()
            added[1:] -= times[:-1]
            added[0] += prices.start_s if depth == 1 else 0.0
            draft_I[at] = added
        return draft_I


def _slope(prices: Prices, num_requests: int) -> float:
    """Tokens that a row costs, on average over the first rows of all requests."""
    rows = min(2 * num_requests, prices.max_rows)
    return prices.rate * float(prices.target_N[rows] - prices.target_N[0]) / rows


def _pass_share(prices: Prices, num_requests: int) -> float:
    """Seconds that one more request costs in a pass that others take anyway."""
    count = min(num_requests, len(prices.pass_N) - 1)
    return float(prices.pass_N[count] - prices.pass_N[1]) / (count - 1) if count > 1 else 0.0


def _most_valuable(
    options: Sequence[Option], row_tokens: float, pass_tokens: float, rate: float = 0.0
) -> Option | None:
    """The option that brings the most at these prices; None if there is none.

    row_tokens, pass_tokens: what a row, and a part in a pass, cost in tokens.
    """
    if len(options) == 1:
        return options[0]
    best, best_value = None, 0.0
    for option in options:
        value = most = 0.0
        for level, survival in enumerate(option.survivals):
            value += survival - row_tokens * option.rows_at(level)
            value -= pass_tokens if option.is_network else 0.0
            most = max(most, value)
        most -= rate * option.fixed_s
        if best is None or most > best_value:
            best, best_value = option, most
    return best
