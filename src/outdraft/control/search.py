"""The drafts of a step that bring the most tokens a second.

A step of R requests brings R + F tokens, F accepted drafts expected, and takes T seconds. The plan
with the largest (R + F) / T is searched. Where offers of the host come and go, time is worth what
it brings in the long run, g tokens a second, and the plan with the largest R + F - g T is searched
instead (Dinkelbach: at the best g both find the same plan).

For example, with R = 1, a plain step of 40 ms, and one draft of chance 0.7 for 5 ms of drafting and
4 ms more of the target: 1.7 / 49 ms = 34.7 tokens a second, against 25.

All drafts of a network have one shape and share its passes. For each number of passes, levels of
all drafts are taken by their tokens a row; after each level the plan is looked at, as T may have
stairs.
"""

from collections.abc import Sequence
from typing import NamedTuple

from outdraft.core.decision import CHAIN, Shape, rows_of

FREE_ROW = 0.2  # tokens; where rows cost less, no chain is ended by its confidence


class Option(NamedTuple):
    """One way in which a request could draft.

    Attributes:
        survivals: by level, the chance that it and all levels above are accepted; never rising.
        shape: rows of each level; CHAIN: one each.
        is_network: its levels take passes.
        fixed_s: fixed cost, seconds: its share of catching up.
    """

    source: str
    survivals: Sequence[float]
    shape: Shape = CHAIN
    is_network: bool = False
    fixed_s: float = 0.0
    match_length: int = 0

    def rows_at(self, level: int) -> int:
        """Rows of a level, the first of which is 0."""
        return self.shape[level] if self.shape else 1

    def num_rows(self, num_levels: int) -> int:
        return rows_of(self.shape, num_levels)


class Prices(NamedTuple):
    """Costs of a step's drafts, in seconds.

    Attributes:
        num_requests: R.
        plain_s: of the step without drafts, its prompts aside.
        target_N: the target's pass with 0, 1, ... rows of drafts, up to the most that are allowed.
        pass_N: a network's pass with 0, 1, ... rows.
        max_passes: the network's, for a draft of any depth.
        start_s: of a step in which the network drafts, beside its passes.
        drafting_s: of the host in a step in which a request drafts, beyond a plain one.
    """

    num_requests: int
    plain_s: float
    target_N: Sequence[float]
    pass_N: Sequence[float]
    max_passes: int
    start_s: float = 0.0
    drafting_s: float = 0.0

    @property
    def max_rows(self) -> int:
        return len(self.target_N) - 1

    @property
    def plain_rate(self) -> float:
        """Tokens a second of plain decoding."""
        return self.num_requests / self.plain_s

    def pass_s(self, num_rows: int) -> float:
        """A network's pass; more rows than any plan may have cost as much as the most."""
        return self.pass_N[min(num_rows, len(self.pass_N) - 1)]


class Pick(NamedTuple):
    """A request's part of a plan: its place in the batch, an option, and a number of levels."""

    request: int
    option: Option
    levels: int

    @property
    def tokens(self) -> float:
        return sum(self.option.survivals[: self.levels])


class DraftPlan(NamedTuple):
    """Drafts of a step.

    Attributes:
        depth: levels that networks may reach.
        rows: of all drafts.
        tokens: F.
        draft_s: passes of the network, and its other time.
        added_s: T minus the plain step's: drafting, more rows of the target, the host, and shares
            of catching up.
        is_trimmed: levels of networks' chains were left out for their survival.
    """

    picks: tuple[Pick, ...] = ()
    depth: int = 0
    rows: int = 0
    tokens: float = 0.0
    draft_s: float = 0.0
    added_s: float = 0.0
    is_trimmed: bool = False

    def rate(self, prices: Prices) -> float:
        """Tokens a second."""
        return (prices.num_requests + self.tokens) / (prices.plain_s + self.added_s)

    def row_price(self, prices: Prices, rate: float) -> float:
        """Tokens that one more row must bring, at `rate` tokens a second.

        The smallest survival that was taken, if others were left out; else the cost of the last
        half of the rows, and 0 if that is next to nothing.
        """
        live = [
            one.option.survivals[one.levels - 1]
            for one in self.picks
            if one.option.is_network and not one.option.shape
        ]
        if not live or self.is_trimmed:
            return min(live, default=0.0)
        half = self.rows // 2
        cost_s = prices.target_N[self.rows] - prices.target_N[half]
        price = min(*live, rate * cost_s / (self.rows - half))
        return price if price >= FREE_ROW else 0.0


PLAIN = DraftPlan()


def best_plan(
    options: Sequence[Sequence[Option]], prices: Prices, long_run: float | None = None
) -> DraftPlan:
    """The best plan, PLAIN if none is better than that.

    options: by request; each takes one of its options or none. long_run: g; None: the plan's own.
    """
    drafting = [(index, own) for index, own in enumerate(options) if own]
    if not drafting or prices.max_rows == 0:
        return PLAIN
    rate, count = long_run or prices.plain_rate, len(drafting)
    rows = min(2 * count, prices.max_rows)  # the first 2 of each request
    row_price = rate * ((prices.target_N[rows] - prices.target_N[0]) / rows)
    pass_price = rate * max(0.0, prices.pass_s(count) - prices.pass_s(1)) / max(1, count - 1)
    shapes = dict.fromkeys(one.shape for _, own in drafting for one in own if one.is_network)
    best, best_worth = PLAIN, prices.plain_rate if long_run is None else 0.0
    for shape in (None, *shapes):  # None: the host alone
        chosen = list[tuple[int, Option]]()
        for index, own in drafting:
            fitting = [one for one in own if not one.is_network or one.shape == shape]
            if len(fitting) > 1:
                fitting.sort(key=lambda one: _value(one, row_price, pass_price, rate))
            if fitting:
                chosen.append((index, fitting[-1]))
        if chosen and (shape is None or any(one.is_network for _, one in chosen)):
            found = _best_of(chosen, prices, rate, long_run)
            if found is not None and found[0] > best_worth:
                best_worth, best = found
    return best


def _value(option: Option, row_price: float, pass_price: float, rate: float) -> float:
    """Most tokens that the option brings, minus the price of its rows and passes."""
    value = most = 0.0
    for level, survival in enumerate(option.survivals):
        value += survival - row_price * option.rows_at(level)
        value -= pass_price if option.is_network else 0.0
        most = max(most, value)
    return most - rate * option.fixed_s


def _densities(option: Option, rate: float) -> Sequence[float]:
    """Tokens a row by level, averaged where they would rise: slopes of the concave hull.

    The option's fixed cost is taken from its first level.
    """
    if not option.shape and not option.fixed_s:
        return option.survivals
    blocks: list[tuple[float, int, int]] = []  # tokens, rows, levels
    for level, survival in enumerate(option.survivals):
        tokens = survival - (0 if level else rate * option.fixed_s)
        blocks.append((tokens, option.rows_at(level), 1))
        while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] < blocks[-1][0] * blocks[-2][1]:
            (a, b, c), (d, e, f) = blocks.pop(), blocks.pop()
            blocks.append((a + d, b + e, c + f))
    return [tokens / rows for tokens, rows, levels in blocks for _ in range(levels)]


# One level of one request's draft: minus its tokens a row, the owner's place, the level; its pass,
# from 1 on (0: none); its rows, and those that its pass reads, which are the rows of the level
# above (0: the pass is another level's); its tokens, and the fixed cost of the draft.
# Sorted, levels with the most tokens a row come first, and a draft's levels in order.
_Level = tuple[float, int, int, int, int, int, float, float]


def _levels(chosen: Sequence[tuple[int, Option]], prices: Prices, rate: float) -> list[_Level]:
    levels = list[_Level]()
    for owner, (_, option) in enumerate(chosen):
        most = prices.max_passes if option.is_network else 0
        fixed_s, rows, pass_rows = option.fixed_s, 1, 1
        densities = _densities(option, rate)
        for level, survival in enumerate(option.survivals):
            if option.shape:
                rows, pass_rows = option.shape[level], option.shape[level - 1] if level else 1
            depth = level + 1 if level < most else most
            reads = pass_rows if level < most else 0
            levels.append((-densities[level], owner, level, depth, rows, reads, survival, fixed_s))
            fixed_s = 0.0
    levels.sort()
    return levels


def _best_of(
    chosen: Sequence[tuple[int, Option]], prices: Prices, rate: float, long_run: float | None
) -> tuple[float, DraftPlan] | None:
    """The best plan if each request has one option: every number of passes with every number of
    levels."""
    levels = _levels(chosen, prices, rate)
    deepest = max([one[3] for one in levels])
    best = None
    # The levels of one request are in order, so all numbers of passes are looked at in one go.
    first = min(1, deepest) if len(chosen) > 1 else deepest
    for depth in range(first, deepest + 1):
        own = [one for one in levels if one[3] <= depth] if depth < deepest else levels
        if not own:
            continue
        if 0 < depth < prices.max_passes and len(chosen) > 1:
            # What a pass brings must beat the best rate so far; deeper ones bring even less.
            bar = rate if best is None or long_run is not None else max(rate, best[0])
            if sum([one[6] for one in own if one[3] == depth]) <= bar * prices.pass_s(1):
                break
        found = _best_prefix(own, prices, long_run)
        if best is None or found[0] > best[0]:
            best = *found, own
    if best is None or not best[1]:
        return None
    worth, end, draft_s, added_s, own = best
    taken, counts = own[:end], [0] * len(chosen)
    for one in taken:
        counts[one[1]] += 1
    picks = [Pick(*at, count) for at, count in zip(chosen, counts, strict=True) if count]
    depth = max([one.levels for one in picks if one.option.is_network], default=0)
    return worth, DraftPlan(
        tuple(picks),
        depth,
        sum([one[4] for one in taken]),
        sum([one[6] for one in taken]),
        draft_s,
        added_s,
        any(one[3] and one[2] < depth and not chosen[one[1]][1].shape for one in own[end:]),
    )


def _best_prefix(
    levels: Sequence[_Level], prices: Prices, long_run: float | None
) -> tuple[float, int, float, float]:
    """The largest worth of the first levels, how many these are, and seconds: of the network, and
    of all that is added to a plain step."""
    target_N, best = prices.target_N, (0.0, 0, 0.0, 0.0)
    pass_rows = [0] * (1 + max([one[3] for one in levels]))
    rows, tokens, draft_s, beside_s = 0, 0.0, 0.0, prices.drafting_s - target_N[0]
    for number, (_, _, _, depth, own_rows, reads, own, fixed_s) in enumerate(levels, 1):
        rows += own_rows
        if rows > prices.max_rows:
            break
        tokens += own
        if reads:
            before = pass_rows[depth]
            pass_rows[depth] += reads
            draft_s += prices.pass_s(before + reads)
            if before:
                draft_s -= prices.pass_s(before)
            elif depth == 1:
                draft_s += prices.start_s
        beside_s += fixed_s
        added_s = draft_s + beside_s + target_N[rows]
        if long_run is None:
            worth = (prices.num_requests + tokens) / (prices.plain_s + added_s)
        else:
            worth = tokens - long_run * added_s
        if worth > best[0]:
            best = worth, number, draft_s, added_s
    return best
