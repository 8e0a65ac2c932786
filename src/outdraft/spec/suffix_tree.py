"""How often was each short string followed by what, in the texts of finished requests?

A path-compressed trie of every window of max_depth tokens (the windows at the end of a text are
shorter), with the number of windows that pass through each node. All prefixes of windows are all
substrings of up to max_depth tokens, so the counts are exact numbers of occurrences.

A node's label points into some text, and always into the newest window that passed: texts leave in
the order they came, so a node that still counts something never points into a text that has left.
Removing a text walks its windows again and takes back what adding it did, down to the shape: after
each removal the trie is the one that the remaining texts alone would have built.

Windows come and go one by one, so both can be done a few tokens at a time: a long text need not
hold up everybody else.

Dimension key: T tokens, C places of the ring of texts, S places of the table, M fields,
B requests, D max_depth - 1, K drafted tokens.
"""

from collections import deque

import numpy as np
from numba import njit

from outdraft.core.draft import MAX_DRAFTS
from outdraft.spec.pair_table import find, put_all, table_for
from outdraft.spec.suffix_automaton import draft_limit
from outdraft.spec.suffix_tree_update import (
    BEST_CHILD,
    COUNT,
    FIRST_CHILD,
    LENGTH,
    NEXT,
    NODE_COLUMNS,
    NONE,
    NUM_FREE,
    NUM_ROWS,
    ROOT,
    STALE,
    add_windows,
    remove_windows,
)


class SuffixTree:
    """Counts of the substrings of several texts; first in, first out."""

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._ring_C = np.empty(1024, np.int32)
        self._texts: deque[tuple[int, int]] = deque()  # [start, stop) in tokens ever added
        self._num_removed = 0  # windows of the oldest text that were taken back
        self._num_coming = 0
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

    @property
    def num_coming(self) -> int:
        """Tokens of the newest text whose substrings are not counted yet."""
        return self._num_coming

    def add(self, token_ids_T: np.ndarray) -> None:
        """Keep a text, int32 [T], T >= 1; `count` counts its substrings.

        The text before must be counted whole.
        """
        assert self._num_coming == 0
        start = self._texts[-1][1] if self._texts else 0
        stop = start + len(token_ids_T)
        tokens = self.num_tokens + len(token_ids_T)
        if tokens > len(self._ring_C):
            self._grow_ring(tokens)
        self._texts.append((start, stop))
        self._num_coming = len(token_ids_T)
        self._ring_C[np.arange(start, stop) & (len(self._ring_C) - 1)] = token_ids_T

    def count(self, max_tokens: int) -> int:
        """Count substrings of the newest text: those that start at its next tokens.

        Returns how many tokens these were, 0 if the text is counted whole; some microseconds each.
        """
        count = min(max_tokens, self._num_coming)
        if count > 0:
            self._reserve(count)
            stop = self._texts[-1][1]
            start = stop - self._num_coming
            windows = start, start + count, stop, self._max_depth
            add_windows(*windows, *self._arrays(), self._fields_M)
            self._num_coming -= count
        return count

    def remove_oldest(self, max_tokens: int) -> int:
        """Take back substrings of the oldest text, at last the text itself, as `count` adds them.

        The newest text must be counted whole.
        """
        assert self._num_coming == 0
        start, stop = self._texts[0]
        start += self._num_removed
        end = min(start + max_tokens, stop)
        windows = start, end, stop, self._max_depth
        remove_windows(*windows, *self._arrays(), self._fields_M)
        self._num_removed += end - start
        if end == stop:
            self._texts.popleft()
            self._num_removed = 0
        return end - start

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
        """Nodes for some windows: each adds a leaf, and splits one label at most."""
        nodes = self.num_nodes + 2 * num_tokens
        if nodes > len(self._nodes):
            grown = max(nodes, len(self._nodes) * 3 // 2)
            self._nodes = _grown(self._nodes, grown)
            self._label_starts = _grown(self._label_starts, grown)
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


def _grown(rows: np.ndarray, num_rows: int) -> np.ndarray:
    # Rows are written before they are read: untouched pages of the reserve cost no memory.
    grown = np.empty((num_rows, *rows.shape[1:]), rows.dtype)
    grown[: len(rows)] = rows
    return grown


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
