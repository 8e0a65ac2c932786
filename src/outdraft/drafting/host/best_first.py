"""Grow the draft of a few rows that is expected to be accepted furthest.

A row's probability is that of its whole path. The tree starts as its root. A row may be taken when
its parent has been taken, and the likeliest of these rows is taken next. So the first K rows are
the best tree of K rows, for every K. Among rows of equal probability the deepest is taken, then the
one with the earlier parent, then the one that was offered first. A chain is therefore grown to its
end before it branches, where that costs nothing.

A kernel offers a row together with up to three numbers of its own. It gets these numbers back when
the row is taken, and then offers what may follow that row. Siblings may be offered one by one: the
likeliest first, and each other one when the sibling before it is taken.

The functions are compiled into their callers: a call, which also counts references, would take
longer than the work that it does.

Dimension key: K drafted tokens, W rows that wait, M fields, C columns, B requests, F places.
"""

from typing import NamedTuple

import numpy as np

from outdraft.core.draft import MAX_DRAFTS, Draft
from outdraft.core.jit import njit
from outdraft.drafting.host.array_places import uncounted

# Fields of a tree.
NUM_ROWS = 0  # taken, without the root
NUM_WAITING = 1
NUM_FIELDS = 2

# Columns of a row; a waiting one has more, which are the caller's.
TOKEN = 0
PARENT = 1
DEPTH = 2
OWN = 3
COLUMNS = 6


class GrowingTree(NamedTuple):
    """The rows of a draft, and those that could be the next ones.

    Attributes:
        rows_K1C: int64 [K + 1, 3], the root's first; parents as in core.draft.Draft.
        probs_K1: float64 [K + 1].
        waiting_WC: int64 [W, 6]; waiting_probs_W: float64 [W].
        fields_M: int64 [M].
    """

    rows_K1C: np.ndarray
    probs_K1: np.ndarray
    waiting_WC: np.ndarray
    waiting_probs_W: np.ndarray
    fields_M: np.ndarray


@njit(cache=True)
def new_tree() -> GrowingTree:
    """A tree with room for the largest draft; every row that is taken may offer two."""
    return GrowingTree(
        np.zeros((MAX_DRAFTS + 1, OWN), np.int64),
        np.ones(MAX_DRAFTS + 1),
        np.empty((MAX_DRAFTS + 2, COLUMNS), np.int64),
        np.empty(MAX_DRAFTS + 2),
        np.zeros(NUM_FIELDS, np.int64),
    )


@njit(cache=True)
def uncounted_tree(tree: GrowingTree) -> GrowingTree:
    """The same tree for a kernel whose caller keeps it; see array_places."""
    return GrowingTree(
        uncounted(tree.rows_K1C),
        uncounted(tree.probs_K1),
        uncounted(tree.waiting_WC),
        uncounted(tree.waiting_probs_W),
        uncounted(tree.fields_M),
    )


@njit(cache=True, inline="always")
def clear(tree: GrowingTree) -> None:
    """Back to the root."""
    tree.fields_M[NUM_ROWS] = 0
    tree.fields_M[NUM_WAITING] = 0


@njit(cache=True, inline="always")
def offer(
    tree: GrowingTree, prob: float, parent: int, token: int, first: int, second: int, third: int
) -> None:
    """Let a row wait, with the probability of its path and the caller's own numbers."""
    waiting_WC, at = tree.waiting_WC, tree.fields_M[NUM_WAITING]
    tree.fields_M[NUM_WAITING] += 1
    tree.waiting_probs_W[at] = prob
    waiting_WC[at, TOKEN] = token
    waiting_WC[at, PARENT] = parent
    waiting_WC[at, DEPTH] = tree.rows_K1C[parent, DEPTH] + 1
    waiting_WC[at, OWN] = first
    waiting_WC[at, OWN + 1] = second
    waiting_WC[at, OWN + 2] = third


@njit(cache=True, inline="always")
def take(tree: GrowingTree) -> tuple[int, int, int, int, int]:
    """Add the best of the waiting rows: its number, its parent's, and the caller's own numbers."""
    rows_K1C, waiting_WC, probs_W = tree.rows_K1C, tree.waiting_WC, tree.waiting_probs_W
    num_waiting = tree.fields_M[NUM_WAITING]
    best = 0
    for at in range(1, num_waiting):
        if probs_W[at] > probs_W[best] or (
            probs_W[at] == probs_W[best] and _goes_before(waiting_WC, at, best)
        ):
            best = at
    tree.fields_M[NUM_WAITING] -= 1
    tree.fields_M[NUM_ROWS] += 1
    row = tree.fields_M[NUM_ROWS]
    tree.probs_K1[row] = probs_W[best]
    for column in range(OWN):
        rows_K1C[row, column] = waiting_WC[best, column]
    first, second, third = (
        waiting_WC[best, OWN],
        waiting_WC[best, OWN + 1],
        waiting_WC[best, OWN + 2],
    )
    for at in range(best + 1, num_waiting):  # the others stay in the order of their offers
        probs_W[at - 1] = probs_W[at]
        for column in range(COLUMNS):
            waiting_WC[at - 1, column] = waiting_WC[at, column]
    return row, rows_K1C[row, PARENT], first, second, third


@njit(cache=True, inline="always")
def _goes_before(waiting_WC: np.ndarray, at: int, other: int) -> bool:
    """Whether the later of two rows with equal probabilities is taken first."""
    if waiting_WC[at, DEPTH] != waiting_WC[other, DEPTH]:
        return waiting_WC[at, DEPTH] > waiting_WC[other, DEPTH]
    return waiting_WC[at, PARENT] < waiting_WC[other, PARENT]


@njit(cache=True, inline="always")
def can_take(tree: GrowingTree, max_rows: int) -> bool:
    """Whether there is room for one more row, and one that waits."""
    return tree.fields_M[NUM_ROWS] < max_rows and tree.fields_M[NUM_WAITING] > 0


@njit(cache=True, inline="always")
def write(tree: GrowingTree, draft_F: np.ndarray) -> None:
    """Write the number of rows, their token ids, and their parents, one behind the other."""
    num_rows = tree.fields_M[NUM_ROWS]
    draft_F[0] = num_rows
    for row in range(1, num_rows + 1):
        draft_F[row] = tree.rows_K1C[row, TOKEN]
        draft_F[num_rows + row] = tree.rows_K1C[row, PARENT]


@njit(cache=True, inline="always")
def end_of(draft_F: np.ndarray) -> int:
    """How many places a draft that was written takes."""
    return 1 + 2 * draft_F[0]


class DraftRoom:
    """Where a kernel leaves the drafts of a batch; kept from step to step.

    Attributes:
        drafts_F: int32 [F], what `write` wrote for one request behind that of another.
        scores_B: float64 [B].
    """

    def __init__(self) -> None:
        self.drafts_F = np.empty(0, np.int32)
        self.scores_B = np.empty(0, np.float64)

    def reserve(self, num_requests: int) -> None:
        """Make room for this many requests; what was there may be lost."""
        if num_requests > len(self.scores_B):
            self.drafts_F = np.empty(num_requests * (1 + 2 * MAX_DRAFTS), np.int32)
            self.scores_B = np.empty(num_requests, np.float64)

    def to_drafts(self, num_requests: int, num_places: int) -> list[Draft]:
        """One draft per request, in order, from the first places."""
        numbers: tuple[int, ...] = tuple(self.drafts_F[:num_places].tolist())
        scores: list[float] = self.scores_B[:num_requests].tolist()
        drafts: list[Draft] = []
        start = 1
        for score in scores:
            middle = start + numbers[start - 1]
            stop = 2 * middle - start
            if stop > start:
                drafts.append(Draft(numbers[start:middle], numbers[middle:stop], score))
            else:
                drafts.append(Draft())
            start = stop + 1
        return drafts
