"""How likely the target accepts what a source of the host offers, by the length of its match.

These drafts are chains that nothing was drawn for, so their length may depend on anything that is
known, the match of this very step included. Every offer teaches, verified or not: the text that
comes shows how far it was right.
"""

from outdraft.control.surprise import Surprise

PRIOR_CHANCE = 0.6
LEANING = 10.0  # labels of what a cell leans on
NEWS_LABELS = 5.0  # what is left of a cell's labels when chances turn out wrong
KEEP = 0.5 ** (1 / 1024)  # of a cell's labels, per label
NUM_BUCKETS = 7  # of matches: 1, 2-3, 4-7, ... tokens


class Cell:
    """Faded counts of one level: labels, and those that said "accepted"."""

    __slots__ = ("labels", "right")

    def __init__(self) -> None:
        self.labels = 0.0
        self.right = 0.0

    def observe(self, is_right: bool) -> None:
        self.labels = KEEP * self.labels + 1
        self.right = KEEP * self.right + is_right

    def chance(self, prior: float) -> float:
        return (self.right + LEANING * prior) / (self.labels + LEANING)

    def doubt(self) -> None:
        if self.labels > NEWS_LABELS:
            self.right *= NEWS_LABELS / self.labels
            self.labels = NEWS_LABELS


class HostCurve:
    """Acceptance of one source: cells by match and level lean on the level's, it on the last."""

    def __init__(self, prior: float = PRIOR_CHANCE) -> None:
        self.prior = prior
        self.num_labels = 0
        self._levels: list[Cell] = []
        self._cells: list[list[Cell]] = [[] for _ in range(NUM_BUCKETS)]
        self._known: dict[int, list[float]] = {}  # survivals by bucket, as far as asked for
        self._surprise = Surprise()

    def survivals(self, match_length: int, num_levels: int) -> list[float]:
        """By level: the chance that an offer is accepted so far."""
        group = bucket(match_length)
        known = self._known.get(group)
        if known is None or len(known) < num_levels:
            self._grow(num_levels)
            survival, known = 1.0, list[float]()
            for chance in self._chances(group):
                survival *= chance
                known.append(survival)
            self._known[group] = known
        return known[:num_levels]

    def observe(self, match_length: int, drafted: int, accepted: int) -> None:
        """Learn how far an offer of so many tokens was right."""
        if drafted == 0:
            return
        self._grow(drafted)
        group = bucket(match_length)
        chances, cells = self._chances(group), self._cells[group]
        excess = variance = 0.0
        for level in range(min(accepted + 1, drafted)):
            is_right = level < accepted
            excess += is_right - chances[level]
            variance += chances[level] * (1 - chances[level])
            self._levels[level].observe(is_right)
            cells[level].observe(is_right)
        self.num_labels += 1
        self._known.clear()
        if self._surprise.observe(excess, variance):
            for cell in (*self._levels, *(one for row in self._cells for one in row)):
                cell.doubt()

    def _chances(self, group: int) -> list[float]:
        above, chances = self.prior, list[float]()
        for level, cell in zip(self._levels, self._cells[group], strict=True):
            above = level.chance(above)
            chances.append(cell.chance(above))
        return chances

    def _grow(self, num_levels: int) -> None:
        for row in (self._levels, *self._cells):
            row.extend(Cell() for _ in range(num_levels - len(row)))


def bucket(match_length: int) -> int:
    """Matches of about one length."""
    return min(max(1, match_length).bit_length() - 1, NUM_BUCKETS - 1)
