"""How a suffix tree takes up a text, and gives it back: numba kernels of SuffixTree.

Dimension key: C places of the ring of texts, S places of the table, M fields, P branching.
"""

import numpy as np

from outdraft.core.jit import njit
from outdraft.drafting.host.pair_table import find, place_of, put, remove

# Columns of a node; the first two are its key in the table.
PARENT = 0  # -1: the row is free
TOKEN = 1  # first of its label
LENGTH = 2  # of its label
COUNT = 3
FIRST_CHILD = 4  # -1: none
NEXT = 5  # sibling, or the next free row
PREVIOUS = 6  # sibling
BEST_CHILD = 7  # the first of P, the most frequent ones, the latest first among equals; -1: no more

STALE = -2  # as the first of the best children: they are to be found again
ROOT = 0
NONE = -1

# Fields of the trie.
NUM_ROWS = 0  # rows of the node array that were ever used
FREE_ROW = 1  # head of the list of free rows
NUM_FREE = 2
NUM_FIELDS = 3


@njit(cache=True)
def add_windows(
    start: int,
    end: int,
    stop: int,
    max_depth: int,
    ring_C: np.ndarray,
    nodes: np.ndarray,
    label_starts: np.ndarray,
    table_S: np.ndarray,
    fields_M: np.ndarray,
) -> None:
    """Count the windows that start in [start, end) of a text of the ring that stops at `stop`."""
    mask = len(ring_C) - 1
    for first in range(start, end):
        window_stop = min(first + max_depth, stop)
        node, at = ROOT, first
        while at < window_stop:
            child = find(table_S, nodes, node, ring_C[at & mask])
            if child == NONE:
                child = _new_row(nodes, fields_M)
                nodes[child, LENGTH] = window_stop - at
                nodes[child, COUNT] = 0
                nodes[child, FIRST_CHILD] = NONE
                _clear(nodes[child, BEST_CHILD:])
                _hang(child, node, ring_C[at & mask], nodes, table_S)
            shared = 1
            limit = min(nodes[child, LENGTH], window_stop - at)
            label_start = label_starts[child]
            if nodes[child, COUNT] == 0:
                shared = limit
            while shared < limit and (
                ring_C[(label_start + shared) & mask] == ring_C[(at + shared) & mask]
            ):
                shared += 1
            if shared < nodes[child, LENGTH]:
                child = _split(child, shared, ring_C, nodes, label_starts, table_S, fields_M)
            nodes[child, COUNT] += 1
            label_starts[child] = at
            if nodes[node, BEST_CHILD] != STALE:
                _promote(nodes[node, BEST_CHILD:], child, nodes)
            node = child
            at += shared


@njit(cache=True)
def _clear(best_P: np.ndarray) -> None:
    for place in range(len(best_P)):
        best_P[place] = NONE


@njit(cache=True)
def _promote(best_P: np.ndarray, child: int, nodes: np.ndarray) -> None:
    """Move the child that was counted just now before all that do not count more."""
    place = 0
    while place < len(best_P) and best_P[place] != NONE and best_P[place] != child:
        if nodes[best_P[place], COUNT] <= nodes[child, COUNT]:
            break
        place += 1
    moved = child
    while place < len(best_P) and moved != NONE:
        moved, best_P[place] = best_P[place], moved
        if moved == child:
            break
        place += 1


@njit(cache=True)
def _replace(best_P: np.ndarray, old: int, new: int) -> None:
    """Put a child in the place of another one that counts as much."""
    for place in range(len(best_P)):
        if best_P[place] == old:
            best_P[place] = new


@njit(cache=True)
def find_best_children(node: int, nodes: np.ndarray, label_starts: np.ndarray) -> None:
    """Find the best children again where a removal has touched them."""
    if nodes[node, BEST_CHILD] != STALE:
        return
    best_P = nodes[node, BEST_CHILD:]
    _clear(best_P)
    child = nodes[node, FIRST_CHILD]
    while child != NONE:
        moved = child
        for place in range(len(best_P)):
            other = best_P[place]
            if moved != NONE and (
                other == NONE
                or nodes[moved, COUNT] > nodes[other, COUNT]
                or (
                    nodes[moved, COUNT] == nodes[other, COUNT]
                    and label_starts[moved] > label_starts[other]
                )
            ):
                moved, best_P[place] = other, moved
        child = nodes[child, NEXT]


@njit(cache=True)
def _new_row(nodes: np.ndarray, fields_M: np.ndarray) -> int:
    row = fields_M[FREE_ROW]
    if row == NONE:
        row = fields_M[NUM_ROWS]
        fields_M[NUM_ROWS] += 1
    else:
        fields_M[FREE_ROW] = nodes[row, NEXT]
        fields_M[NUM_FREE] -= 1
    return row


@njit(cache=True)
def _free_row(row: int, nodes: np.ndarray, fields_M: np.ndarray) -> None:
    nodes[row, PARENT] = NONE
    nodes[row, NEXT] = fields_M[FREE_ROW]
    fields_M[FREE_ROW] = row
    fields_M[NUM_FREE] += 1


@njit(cache=True)
def _hang(child: int, parent: int, token: int, nodes: np.ndarray, table_S: np.ndarray) -> None:
    """Make a node the first child of another one."""
    nodes[child, PARENT] = parent
    nodes[child, TOKEN] = token
    nodes[child, PREVIOUS] = NONE
    head = nodes[parent, FIRST_CHILD]
    nodes[child, NEXT] = head
    if head != NONE:
        nodes[head, PREVIOUS] = child
    nodes[parent, FIRST_CHILD] = child
    put(table_S, nodes, child)


@njit(cache=True)
def _cut(child: int, nodes: np.ndarray, table_S: np.ndarray) -> None:
    """Take a node away from its parent."""
    remove(table_S, nodes, place_of(table_S, nodes, nodes[child, PARENT], nodes[child, TOKEN]))
    previous, following = nodes[child, PREVIOUS], nodes[child, NEXT]
    if previous == NONE:
        nodes[nodes[child, PARENT], FIRST_CHILD] = following
    else:
        nodes[previous, NEXT] = following
    if following != NONE:
        nodes[following, PREVIOUS] = previous


@njit(cache=True)
def _split(
    lower: int,
    length: int,
    ring_C: np.ndarray,
    nodes: np.ndarray,
    label_starts: np.ndarray,
    table_S: np.ndarray,
    fields_M: np.ndarray,
) -> int:
    """Put a new node, with the first tokens of the label, above an old one."""
    parent, token = nodes[lower, PARENT], nodes[lower, TOKEN]
    upper = _new_row(nodes, fields_M)
    _cut(lower, nodes, table_S)
    nodes[upper, LENGTH] = length
    nodes[upper, COUNT] = nodes[lower, COUNT]
    nodes[upper, FIRST_CHILD] = NONE
    _clear(nodes[upper, BEST_CHILD:])
    nodes[upper, BEST_CHILD] = lower
    label_starts[upper] = label_starts[lower]
    _hang(upper, parent, token, nodes, table_S)
    nodes[lower, LENGTH] -= length
    label_starts[lower] += length
    below = int(ring_C[label_starts[lower] & (len(ring_C) - 1)])
    _hang(lower, upper, below, nodes, table_S)
    _replace(nodes[parent, BEST_CHILD:], lower, upper)
    return upper


@njit(cache=True)
def remove_windows(
    start: int,
    end: int,
    stop: int,
    max_depth: int,
    ring_C: np.ndarray,
    nodes: np.ndarray,
    label_starts: np.ndarray,
    table_S: np.ndarray,
    fields_M: np.ndarray,
) -> None:
    """Take back the oldest windows: [start, end) of the oldest text, which stops at `stop`."""
    mask = len(ring_C) - 1
    for first in range(start, end):
        window_stop = min(first + max_depth, stop)
        node, at = ROOT, first
        while at < window_stop:
            child = find(table_S, nodes, node, ring_C[at & mask])
            at += nodes[child, LENGTH]
            nodes[child, COUNT] -= 1
            for place in range(BEST_CHILD, nodes.shape[1]):
                if nodes[node, place] == child:
                    nodes[node, BEST_CHILD] = STALE
            if nodes[child, COUNT] == 0:  # no window passes: a leaf, and the end of this one
                _cut(child, nodes, table_S)
                _free_row(child, nodes, fields_M)
                child = NONE
            _join(node, nodes, label_starts, table_S, fields_M)
            node = child
        if node != NONE:
            _join(node, nodes, label_starts, table_S, fields_M)


@njit(cache=True)
def _join(
    upper: int,
    nodes: np.ndarray,
    label_starts: np.ndarray,
    table_S: np.ndarray,
    fields_M: np.ndarray,
) -> None:
    """Undo a split that nothing needs any more: every window goes on to the only child."""
    lower = nodes[upper, FIRST_CHILD]
    if upper == ROOT or lower == NONE or nodes[lower, COUNT] != nodes[upper, COUNT]:
        return
    parent, token = nodes[upper, PARENT], nodes[upper, TOKEN]
    _cut(lower, nodes, table_S)
    _cut(upper, nodes, table_S)
    nodes[lower, LENGTH] += nodes[upper, LENGTH]
    label_starts[lower] -= nodes[upper, LENGTH]
    _hang(lower, parent, token, nodes, table_S)
    _replace(nodes[parent, BEST_CHILD:], upper, lower)
    _free_row(upper, nodes, fields_M)
