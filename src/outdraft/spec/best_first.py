"""Grow the draft of a few rows that is expected to be accepted furthest.

A row's probability is that of its whole path. Rows are taken in the order of their probability
out of all that continue the root or a row taken before: the first K of them are the best tree of
K rows, for every K. Among equals the deepest is taken, then that of the earlier parent, then the
one offered first: a chain is grown to its end before it branches where that costs nothing.

Kernels offer rows with two or three numbers of their own, which they get back when the row is
taken, and then offer what may follow it. Whoever offers the likeliest of siblings first may offer
each other one when the one before it is taken.

Dimension key: K drafted tokens, F rows that wait, M fields, C columns, B requests.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from outdraft.core.draft import MAX_DRAFTS, Draft

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
        waiting_FC: int64 [F, 6]; waiting_probs_F: float64 [F].
        fields_M: int64 [M].
    """

    rows_K1C: np.ndarray
    probs_K1: np.ndarray
    waiting_FC: np.ndarray
    waiting_probs_F: np.ndarray
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
def clear(tree: GrowingTree) -> None:
    """Back to the root."""
    tree.fields_M[NUM_ROWS] = 0
    tree.fields_M[NUM_WAITING] = 0


@njit(cache=True)
def offer(
    tree: GrowingTree, prob: float, parent: int, token: int, first: int, second: int, third: int
) -> None:
    """Let a row wait, with the probability of its path and the caller's own numbers."""
    waiting_FC, at = tree.waiting_FC, tree.fields_M[NUM_WAITING]
    tree.fields_M[NUM_WAITING] += 1
    tree.waiting_probs_F[at] = prob
    waiting_FC[at, TOKEN] = token
    waiting_FC[at, PARENT] = parent
    waiting_FC[at, DEPTH] = tree.rows_K1C[parent, DEPTH] + 1
    waiting_FC[at, OWN] = first
    waiting_FC[at, OWN + 1] = second
    waiting_FC[at, OWN + 2] = third


@njit(cache=True)
def take(tree: GrowingTree) -> tuple[int, int, int, int, int]:
    """Add the best of the waiting rows: its number, its parent's, and the caller's own numbers."""
    rows_K1C, waiting_FC, probs_F = tree.rows_K1C, tree.waiting_FC, tree.waiting_probs_F
    num_waiting = tree.fields_M[NUM_WAITING]
    best = 0
    for at in range(1, num_waiting):
        if probs_F[at] > probs_F[best] or (
            probs_F[at] == probs_F[best] and _goes_before(waiting_FC, at, best)
        ):
            best = at
    tree.fields_M[NUM_WAITING] -= 1
    tree.fields_M[NUM_ROWS] += 1
    row = tree.fields_M[NUM_ROWS]
    tree.probs_K1[row] = probs_F[best]
    for column in range(OWN):
        rows_K1C[row, column] = waiting_FC[best, column]
    first, second, third = (
        waiting_FC[best, OWN],
        waiting_FC[best, OWN + 1],
        waiting_FC[best, OWN + 2],
    )
    for at in range(best + 1, num_waiting):  # the others stay in the order of their offers
        probs_F[at - 1] = probs_F[at]
        for column in range(COLUMNS):
            waiting_FC[at - 1, column] = waiting_FC[at, column]
    return row, rows_K1C[row, PARENT], first, second, third


@njit(cache=True)
def _goes_before(waiting_FC: np.ndarray, at: int, other: int) -> bool:
    """Of equals: whether a row that was offered later is taken first."""
    if waiting_FC[at, DEPTH] != waiting_FC[other, DEPTH]:
        return waiting_FC[at, DEPTH] > waiting_FC[other, DEPTH]
    return waiting_FC[at, PARENT] < waiting_FC[other, PARENT]


@njit(cache=True)
def can_take(tree: GrowingTree, max_rows: int) -> bool:
    """Whether there is room for one more row, and one that waits."""
    return tree.fields_M[NUM_ROWS] < max_rows and tree.fields_M[NUM_WAITING] > 0


@njit(cache=True)
def write(tree: GrowingTree, draft_2K: np.ndarray) -> int:
    """Write token ids and parents to a row of a batch; return how many."""
    num_rows = tree.fields_M[NUM_ROWS]
    for row in range(num_rows):
        draft_2K[0, row] = tree.rows_K1C[row + 1, TOKEN]
        draft_2K[1, row] = tree.rows_K1C[row + 1, PARENT]
    return num_rows


class DraftBatch:
    """What a kernel writes: drafts int32 [B, 2, K], token ids and parents, filled from the left;
    their sizes int64 [B], and their scores float64 [B]."""

    def __init__(self, max_tokens_B: np.ndarray) -> None:
        num_requests = len(max_tokens_B)
        self.drafts_B2K = np.empty((num_requests, 2, max(max_tokens_B.tolist())), np.int32)
        self.sizes_B = np.empty(num_requests, np.int64)
        self.scores_B = np.empty(num_requests, np.float64)

    def to_drafts(self) -> list[Draft]:
        """One draft per request, in order."""
        sizes, scores = self.sizes_B.tolist(), self.scores_B.tolist()
        largest = max(sizes)
        return [
            Draft(tuple(token_ids[:size]), tuple(parents[:size]), score) if size else Draft()
            for (token_ids, parents), size, score in zip(
                self.drafts_B2K[:, :, :largest].tolist(), sizes, scores, strict=True
            )
        ]
