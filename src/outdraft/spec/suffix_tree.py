"""How often was each short string followed by what, in the texts of finished requests?

A path-compressed trie of every window of max_depth tokens (the windows at the end of a text are
shorter), with the number of windows that pass through each node. All prefixes of windows are all
substrings of up to max_depth tokens, so the counts are exact numbers of occurrences.

A node's label points into some text, and always into the newest window that passed: texts leave in
the order they came, so a node that still counts something never points into a text that has left.
Removing a text walks its windows again and takes back what adding it did, down to the shape: after
each removal the trie is the one that the remaining texts alone would have built.

Dimension key: T tokens, C places of the ring of texts, S places of the table, M fields,
B requests, D max_depth - 1, K drafted tokens.
"""

from collections import deque

import numpy as np
from numba import njit

from outdraft.core.draft import MAX_DRAFTS
from outdraft.spec.pair_table import find, place_of, put, put_all, remove, table_for
from outdraft.spec.suffix_automaton import draft_limit

# Columns of a node; the first two are its key in the table.
PARENT = 0  # -1: the row is free
TOKEN = 1  # first of its label
LENGTH = 2  # of its label
COUNT = 3
FIRST_CHILD = 4  # -1: none
NEXT = 5  # sibling, or the next free row
PREVIOUS = 6  # sibling
BEST_CHILD = 7  # the most frequent one, the latest among equals; -1: none; STALE: to be found
NODE_COLUMNS = 8

STALE = -2
ROOT = 0
NONE = -1

# Fields of the trie.
NUM_ROWS = 0  # rows of the node array that were ever used
FREE_ROW = 1  # head of the list of free rows
NUM_FREE = 2
NUM_FIELDS = 3


class SuffixTree:
    """Counts of the substrings of several texts; first in, first out."""

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._ring_C = np.empty(1024, np.int32)
        self._texts: deque[tuple[int, int]] = deque()  # [start, stop) in tokens ever added
        self._nodes = np.full((1, NODE_COLUMNS), NONE, np.int32)
        self._label_starts = np.zeros(1, np.int64)  # of each node, in tokens ever added
        self._table_S = table_for(0)
        self._fields_M = np.array([1, NONE, 0], np.int64)

    def __len__(self) -> int:
        """The number of texts."""
        return len(self._texts)

    @property
    def num_tokens(self) -> int:
        return self._texts[-1][1] - self._texts[0][0] if self._texts else 0

    @property
    def num_nodes(self) -> int:
        return int(self._fields_M[NUM_ROWS] - self._fields_M[NUM_FREE])

    @property
    def num_bytes(self) -> int:
        arrays = (self._ring_C, self._nodes, self._label_starts, self._table_S)
        return sum(array.nbytes for array in arrays)

    def add(self, token_ids_T: np.ndarray) -> None:
        """Count the substrings of a text, int32 [T], T >= 1: some microseconds a token."""
        start = self._texts[-1][1] if self._texts else 0
        stop = start + len(token_ids_T)
        self._reserve(len(token_ids_T))
        self._texts.append((start, stop))
        self._ring_C[np.arange(start, stop) & (len(self._ring_C) - 1)] = token_ids_T
        _add(start, stop, self._max_depth, *self._arrays(), self._fields_M)

    def remove_oldest(self) -> None:
        """Take back the oldest text."""
        start, stop = self._texts.popleft()
        _remove(start, stop, self._max_depth, *self._arrays(), self._fields_M)

    def drafts(
        self,
        contexts_BD: np.ndarray,
        context_lens_B: np.ndarray,
        max_tokens_B: np.ndarray,
        max_spec_factor: float,
        min_token_prob: float,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draft after the newest tokens of several requests, by the automaton's rule.

        The first context_lens_B[b] places of row b of contexts_BD, int32, are a request's newest
        tokens, newest last; context_lens_B and max_tokens_B are int64.

        Returns:
            Drafts int32 [B, K], filled from the left, their lengths int64 [B] and their scores
            float64 [B].
        """
        drafts_BK = np.empty((len(contexts_BD), MAX_DRAFTS), np.int32)
        lengths_B = np.zeros(len(contexts_BD), np.int64)
        scores_B = np.zeros(len(contexts_BD), np.float64)
        _draft_all(
            contexts_BD,
            context_lens_B,
            max_tokens_B,
            self._max_depth,
            max_spec_factor,
            min_token_prob,
            *self._arrays(),
            drafts_BK,
            lengths_B,
            scores_B,
        )
        return drafts_BK, lengths_B, scores_B

    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return self._ring_C, self._nodes, self._label_starts, self._table_S

    def _reserve(self, num_tokens: int) -> None:
        """Room for a text: a window adds a leaf, and splits one label at most."""
        tokens = self.num_tokens + num_tokens
        if tokens > len(self._ring_C):
            self._grow_ring(tokens)
        nodes = self.num_nodes + 2 * num_tokens
        if nodes > len(self._nodes):
            grown = max(nodes, len(self._nodes) * 3 // 2)
            old = len(self._nodes)
            self._nodes = np.resize(self._nodes, (grown, NODE_COLUMNS))
            self._nodes[old:] = NONE
            self._label_starts = np.resize(self._label_starts, grown)
        if 3 * nodes > 2 * len(self._table_S):
            self._table_S = table_for(nodes)
            put_all(self._table_S, self._nodes, ROOT + 1, int(self._fields_M[NUM_ROWS]))

    def _grow_ring(self, num_tokens: int) -> None:
        places = len(self._ring_C)
        while places < num_tokens:
            places *= 2
        ring_C = np.empty(places, np.int32)
        if self._texts:
            live = np.arange(self._texts[0][0], self._texts[-1][1])
            ring_C[live & (places - 1)] = self._ring_C[live & (len(self._ring_C) - 1)]
        self._ring_C = ring_C


@njit(cache=True)
def _add(
    start: int,
    stop: int,
    max_depth: int,
    ring_C: np.ndarray,
    nodes: np.ndarray,
    label_starts: np.ndarray,
    table_S: np.ndarray,
    fields_M: np.ndarray,
) -> None:
    mask = len(ring_C) - 1
    for first in range(start, stop):
        window_stop = min(first + max_depth, stop)
        node, at = ROOT, first
        while at < window_stop:
            child = find(table_S, nodes, node, ring_C[at & mask])
            if child == NONE:
                child = _new_row(nodes, fields_M)
                nodes[child, LENGTH] = window_stop - at
                nodes[child, COUNT] = 0
                nodes[child, FIRST_CHILD] = NONE
                nodes[child, BEST_CHILD] = NONE
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
            best = nodes[node, BEST_CHILD]
            if best == NONE or (best >= 0 and nodes[child, COUNT] >= nodes[best, COUNT]):
                nodes[node, BEST_CHILD] = child
            node = child
            at += shared


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
    nodes[upper, BEST_CHILD] = lower
    label_starts[upper] = label_starts[lower]
    _hang(upper, parent, token, nodes, table_S)
    nodes[lower, LENGTH] -= length
    label_starts[lower] += length
    below = int(ring_C[label_starts[lower] & (len(ring_C) - 1)])
    _hang(lower, upper, below, nodes, table_S)
    if nodes[parent, BEST_CHILD] == lower:
        nodes[parent, BEST_CHILD] = upper
    return upper


@njit(cache=True)
def _remove(
    start: int,
    stop: int,
    max_depth: int,
    ring_C: np.ndarray,
    nodes: np.ndarray,
    label_starts: np.ndarray,
    table_S: np.ndarray,
    fields_M: np.ndarray,
) -> None:
    mask = len(ring_C) - 1
    for first in range(start, stop):
        window_stop = min(first + max_depth, stop)
        node, at = ROOT, first
        while at < window_stop:
            child = find(table_S, nodes, node, ring_C[at & mask])
            at += nodes[child, LENGTH]
            nodes[child, COUNT] -= 1
            if nodes[node, BEST_CHILD] == child:
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
    if nodes[parent, BEST_CHILD] == upper:
        nodes[parent, BEST_CHILD] = lower
    _free_row(upper, nodes, fields_M)


@njit(cache=True)
def _best_child(node: int, nodes: np.ndarray, label_starts: np.ndarray) -> int:
    """The most frequent child; looked for again only where a removal has touched the old one."""
    best = nodes[node, BEST_CHILD]
    if best != STALE:
        return best
    best = NONE
    child = nodes[node, FIRST_CHILD]
    while child != NONE:
        if (
            best == NONE
            or nodes[child, COUNT] > nodes[best, COUNT]
            or (
                nodes[child, COUNT] == nodes[best, COUNT]
                and label_starts[child] > label_starts[best]
            )
        ):
            best = child
        child = nodes[child, NEXT]
    nodes[node, BEST_CHILD] = best
    return best


@njit(cache=True)
def _draft_all(
    contexts_BD: np.ndarray,
    context_lens_B: np.ndarray,
    max_tokens_B: np.ndarray,
    max_depth: int,
    max_spec_factor: float,
    min_token_prob: float,
    ring_C: np.ndarray,
    nodes: np.ndarray,
    label_starts: np.ndarray,
    table_S: np.ndarray,
    drafts_BK: np.ndarray,
    lengths_B: np.ndarray,
    scores_B: np.ndarray,
) -> None:
    draft_K = np.empty(drafts_BK.shape[1], np.int32)
    for row in range(len(contexts_BD)):
        context = contexts_BD[row, : context_lens_B[row]]
        shortest = 1
        while shortest <= len(context):
            node, used = _locate(context[-shortest:], ring_C, nodes, label_starts, table_S)
            if node == NONE:
                break  # nor does a longer match exist
            longest = _longest_alike(
                context, shortest, nodes[node, COUNT], ring_C, nodes, label_starts, table_S
            )
            limit = 0
            for match_len in range(shortest, longest + 1):
                limit = max(
                    limit, draft_limit(match_len, max_depth, max_tokens_B[row], max_spec_factor)
                )
            length, score = _follow(
                node, used, limit, min_token_prob, ring_C, nodes, label_starts, draft_K
            )
            if length > 0 and score >= scores_B[row]:
                lengths_B[row], scores_B[row] = length, score
                drafts_BK[row, :length] = draft_K[:length]
            shortest = longest + 1


@njit(cache=True)
def _longest_alike(
    context: np.ndarray,
    match_len: int,
    count: int,
    ring_C: np.ndarray,
    nodes: np.ndarray,
    label_starts: np.ndarray,
    table_S: np.ndarray,
) -> int:
    """The longest match that occurs as often as a shorter one, hence at the same places.

    Matches that occur at the same places are continued alike: one walk serves them all.
    """
    stride = 1
    while match_len < len(context):
        longer = min(match_len + stride, len(context))
        node, _ = _locate(context[-longer:], ring_C, nodes, label_starts, table_S)
        if node != NONE and nodes[node, COUNT] == count:
            match_len = longer
            stride *= 2
        elif stride > 1:
            stride = 1
        else:
            break
    return match_len


@njit(cache=True)
def _locate(
    context: np.ndarray,
    ring_C: np.ndarray,
    nodes: np.ndarray,
    label_starts: np.ndarray,
    table_S: np.ndarray,
) -> tuple[int, int]:
    """The node on whose label a string ends, and how many tokens of the label it uses."""
    mask = len(ring_C) - 1
    node, used = ROOT, 0
    at = 0
    while at < len(context):
        node = find(table_S, nodes, node, context[at])
        if node == NONE:
            return NONE, 0
        used = min(nodes[node, LENGTH], len(context) - at)
        for offset in range(1, used):
            if ring_C[(label_starts[node] + offset) & mask] != context[at + offset]:
                return NONE, 0
        at += used
    return node, used


@njit(cache=True)
def _follow(
    node: int,
    used: int,
    limit: int,
    min_prob: float,
    ring_C: np.ndarray,
    nodes: np.ndarray,
    label_starts: np.ndarray,
    draft_K: np.ndarray,
) -> tuple[int, float]:
    """As the automaton does it; the context's own occurrence counts as one without continuation."""
    mask = len(ring_C) - 1
    occurrences = nodes[node, COUNT] + 1
    prob = 1.0
    score = 0.0
    length = 0
    while length < limit:
        if used == nodes[node, LENGTH]:
            node = _best_child(node, nodes, label_starts)
            used = 0
            if node == NONE:
                break
        prob *= nodes[node, COUNT] / occurrences
        if prob < min_prob:
            break
        draft_K[length] = ring_C[(label_starts[node] + used) & mask]
        score += prob
        length += 1
        used += 1
        occurrences = nodes[node, COUNT]
    return length, score
