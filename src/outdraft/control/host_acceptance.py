"""How likely the target accepts what a source of the host offers, by the length of its match.

These drafts are chains that nothing was drawn for, so their length may depend on anything that is
known, the match of this very step included. Every offer teaches, verified or not: the text that
comes shows how far it was right.
"""

from outdraft.control.surprise import Surprise
from outdraft.core.draft import MAX_DRAFTS

# Before anything was seen, of the first token by the match: 1, 2-3, 4-7, ... tokens. So it is about
# with the embedded target between temperatures 0 and 1. A token that is accepted makes the match
# longer for those behind it.
PRIOR_CHANCES = 0.25, 0.5, 0.65, 0.75, 0.8, 0.85, 0.9
GIVEN_CHANCE = 0.75  # where the client says what the text will be, whatever matches
MOST_CHANCE = 0.98
LEANING = 10.0  # labels of what a cell leans on, and of what the priors lean on
NEWS_LABELS = 5.0  # what is left of a cell's labels when chances turn out wrong
KEEP = 0.5 ** (1 / 1024)  # of a cell's labels, per label
NUM_BUCKETS = len(PRIOR_CHANCES)


def bucket(match_length: int) -> int:
    """Matches of about one length."""
    return min(max(1, match_length).bit_length() - 1, NUM_BUCKETS - 1)


# By bucket and level: the chance that a token so deep in an offer is accepted if those before it
# are.
_PRIORS = tuple(
    tuple(PRIOR_CHANCES[bucket((1 << group) + level)] for level in range(MAX_DRAFTS))
    for group in range(NUM_BUCKETS)
)
_PRIORS_IF_GIVEN = ((GIVEN_CHANCE,) * MAX_DRAFTS,) * NUM_BUCKETS


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
    """Acceptance of one source: cells by match and level lean on priors, times how much better or
    worse than these the source is altogether."""

    def __init__(self, *, is_given: bool = False) -> None:
        """is_given: the source is a text that the client predicts."""
        self._priors = _PRIORS_IF_GIVEN if is_given else _PRIORS
        self.num_labels = 0
        self._expected, self._right = 0.0, 0.0  # of all labels, faded: by the priors, and in fact
        self._cells: list[list[Cell]] = [[] for _ in range(NUM_BUCKETS)]
        self._known: dict[int, list[float]] = {}  # survivals by bucket, as far as asked for
        self._surprise = Surprise()

    def survivals(self, match_length: int, num_levels: int) -> list[float]:
        """By level, of MAX_DRAFTS at most: the chance that an offer is accepted so far."""
        group = bucket(match_length)
        known = self._known.get(group)
        if known is None or len(known) < num_levels:
            survival, known = 1.0, list[float]()
            for chance in self._chances(group, num_levels):
                survival *= chance
                known.append(survival)
            self._known[group] = known
        return known[:num_levels]

    def observe(self, match_length: int, drafted: int, accepted: int) -> None:
        """Learn how far an offer of so many tokens was right."""
        if drafted == 0:
            return
        group, num_labels = bucket(match_length), min(accepted + 1, drafted)
        chances, cells = self._chances(group, num_labels), self._cells[group]
        excess = variance = 0.0
        parts = zip(chances, cells, self._priors[group], strict=False)
        for level, (chance, cell, prior) in enumerate(parts):
            is_right = level < accepted
            excess += is_right - chance
            variance += chance * (1 - chance)
            self._expected = KEEP * self._expected + prior
            self._right = KEEP * self._right + is_right
            cell.observe(is_right)
        self.num_labels += 1
        self._known.clear()
        if self._surprise.observe(excess, variance):
            self._doubt()

    def _chances(self, group: int, num_levels: int) -> list[float]:
        cells = self._cells[group]
        cells.extend(Cell() for _ in range(num_levels - len(cells)))
        times = (self._right + LEANING) / (self._expected + LEANING)
        return [
            cell.chance(min(MOST_CHANCE, times * prior))
            for cell, prior in zip(cells[:num_levels], self._priors[group], strict=False)
        ]

    def _doubt(self) -> None:
        for cell in (one for row in self._cells for one in row):
            cell.doubt()
        if self._expected > NEWS_LABELS:
            self._right *= NEWS_LABELS / self._expected
            self._expected = NEWS_LABELS
