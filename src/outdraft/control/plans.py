"""Ways to draft, what they cost, and what a step's plan is: plain data for `best_plan`."""

from collections.abc import Sequence
from dataclasses import replace

from outdraft.control.facts import CHAIN, Shape
from outdraft.core.record import record

FREE_ROW = 0.2  # tokens; at low load, where rows cost less, no chain is ended by its confidence


@record
class Option:
    """One way in which a request could draft.

    Attributes:
        survivals: by level, the chance that at least so many levels are accepted; never rising.
        shape: rows of each level; CHAIN: one each.
        is_network: its levels take passes.
        fixed_s: seconds that using it costs at all: its share of catching up.
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

    def pass_rows(self, level: int) -> int:
        """Rows that the pass for a level reads: those of the level above."""
        return self.rows_at(level - 1) if level else 1

    def num_rows(self, num_levels: int) -> int:
        return sum(self.shape[:num_levels]) if self.shape else num_levels


@record
class Prices:
    """What a step's drafts cost.

    Attributes:
        target_N: seconds of the target's pass with 0, 1, ... rows of drafts, up to the most that
            are allowed.
        pass_N: seconds of a network's pass with 0, 1, ... rows.
        max_passes: the network's, for a draft of any depth.
        rate: g, tokens a second.
        start_s: of a step in which the network drafts, beside its passes; what it adds to the
            target's pass included.
        drafting_s: of the host in a step in which anybody drafts, beyond a plain one.
    """

    target_N: Sequence[float]
    pass_N: Sequence[float]
    max_passes: int
    rate: float
    start_s: float = 0.0
    drafting_s: float = 0.0

    @property
    def max_rows(self) -> int:
        return len(self.target_N) - 1

    def times(self, speedup: float) -> "Prices":
        """The same where time is worth so many times more."""
        return replace(self, rate=self.rate * speedup)


@record
class Pick:
    """A request's part of a plan: an option, and how many of its levels."""

    request: int
    option: Option
    levels: int

    @property
    def tokens(self) -> float:
        return float(sum(self.option.survivals[: self.levels]))


@record
class Plan:
    """Drafts of a step.

    Attributes:
        depth: levels that networks may reach.
        rows: of all drafts.
        price: what one more row is worth, in tokens, to networks' chains: the smallest survival
            that was taken, if others were left out; else the cost of the last rows, and 0 if that
            is next to nothing.
        tokens: accepted drafts that are expected.
        objective: J less that of plain decoding, in tokens.
        draft_s, target_s: of the step; shares of catching up are in `fixed_s`.
    """

    picks: tuple[Pick, ...]
    depth: int
    rows: int
    price: float
    tokens: float
    objective: float
    draft_s: float
    target_s: float
    fixed_s: float


def plain(prices: Prices) -> Plan:
    """No drafts."""
    return Plan((), 0, 0, 0.0, 0.0, 0.0, 0.0, float(prices.target_N[0]), 0.0)


def falling(option: Option, rate: float) -> Sequence[float]:
    """Tokens a row by level, averaged where they would rise: slopes of the concave hull.

    What the option costs at all is taken from its first level.
    """
    if not option.shape and option.fixed_s == 0:
        return option.survivals
    blocks: list[tuple[float, int, int]] = []  # tokens, rows, levels
    for level, survival in enumerate(option.survivals):
        tokens = survival - (0 if level else rate * option.fixed_s)
        blocks.append((tokens, option.rows_at(level), 1))
        while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] < blocks[-1][0] * blocks[-2][1]:
            (a, b, c), (d, e, f) = blocks.pop(), blocks.pop()
            blocks.append((a + d, b + e, c + f))
    return [tokens / rows for tokens, rows, levels in blocks for _ in range(levels)]


def price_of(survivals: Sequence[float], prices: Prices, rows: int, *, is_trimmed: bool) -> float:
    """Plan.price, from the survivals of networks' chain levels that were taken."""
    if not survivals:
        return 0.0
    smallest = min(survivals)
    if is_trimmed:
        return smallest
    first = rows // 2
    cost_s = float(prices.target_N[rows] - prices.target_N[first])
    price = min(smallest, prices.rate * cost_s / (rows - first))
    return price if price >= FREE_ROW else 0.0
