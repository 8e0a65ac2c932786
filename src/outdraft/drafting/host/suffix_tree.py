"""Counts, in the texts of finished requests, how often each token has followed each short string.

A path-compressed trie of every window of max_depth tokens (the windows at the end of a text are
shorter), with the number of windows that pass through each node. All prefixes of windows are all
substrings of up to max_depth tokens, so the counts are exact numbers of occurrences.

A node's label points into some text, and always into the newest window that passed: texts leave in
the order they came, so a node that still counts something never points into a text that has left.
Removing a text walks its windows again and takes back what adding it did, down to the shape: after
each removal the trie is the one that the remaining texts alone would have built.

Windows are added and removed one by one, so both can be done a few tokens at a time: a long text
does not delay other requests.

Dimension key: T tokens, C places of the ring of texts, S places of the table, M fields.
"""

from collections import deque

import numpy as np

from outdraft.drafting.host.pair_table import put_all, table_for
from outdraft.drafting.host.suffix_tree_update import (
    BEST_CHILD,
    NONE,
    NUM_FREE,
    NUM_ROWS,
    ROOT,
    add_windows,
    remove_windows,
)


class SuffixTree:
    """Counts of the substrings of several texts; first in, first out."""

    def __init__(self, max_depth: int, branching: int = 1) -> None:
        self._max_depth = max_depth
        self._ring_C = np.empty(1024, np.int32)
        self._texts: deque[tuple[int, int]] = deque()  # [start, stop) in tokens ever added
        self._num_removed = 0  # windows of the oldest text that were taken back
        self._num_coming = 0
        self._nodes = np.full((1, BEST_CHILD + branching), NONE, np.int32)
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
        return sum(array.nbytes for array in self.arrays)

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Ring, nodes, where labels start, and table, for kernels; good until texts come or go."""
        return self._ring_C, self._nodes, self._label_starts, self._table_S

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
            add_windows(*windows, *self.arrays, self._fields_M)
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
        remove_windows(*windows, *self.arrays, self._fields_M)
        self._num_removed += end - start
        if end == stop:
            self._texts.popleft()
            self._num_removed = 0
        return end - start

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


def compile_kernels() -> None:
    """Do what the first text that comes, and the first that goes, would otherwise wait for."""
    tree, text_T = SuffixTree(max_depth=2), np.arange(64, dtype=np.int32)
    tree.add(text_T)
    tree.count(len(text_T))
    tree.remove_oldest(len(text_T))


def _grown(rows: np.ndarray, num_rows: int) -> np.ndarray:
    # Rows are written before they are read: untouched pages of the reserve cost no memory.
    grown = np.empty((num_rows, *rows.shape[1:]), rows.dtype)
    grown[: len(rows)] = rows
    return grown
