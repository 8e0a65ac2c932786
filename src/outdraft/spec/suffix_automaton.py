"""How often was each short string followed by what, in one growing text?

A suffix automaton (Blumer et al. 1985) of the whole text, grown token by token. A state stands
for strings that end at exactly the same places; its link leads to the class of their longest
suffix that occurs in more places. For strings of up to `max_depth` tokens the automaton also keeps

- the number of occurrences: a new token adds one to the classes of the text's last suffixes, which
  are the link chain from the longest of them, hence at most max_depth steps a token;
- the most frequent continuation, the latest one among equals, updated on the same walk.

Longer strings are never asked for, and their counts are not maintained. A text of T tokens has at
most 2T states and 3T edges; a token costs amortised constant time, however long the text is.

Dimension key: T tokens, E edges, S places of the table, M fields.
"""

import numpy as np
from numba import njit

from outdraft.core.draft import MAX_DRAFTS
from outdraft.spec.pair_table import find, put, put_all, table_for

# Columns of a state.
LENGTH = 0  # of its longest string
LINK = 1  # -1: the root has none
COUNT = 2
FIRST_EDGE = 3  # head of the list of its edges, -1: none
BEST_EDGE = 4  # to the most frequent continuation, -1: none yet
STATE_COLUMNS = 5

# Columns of an edge; the first two are its key in the table.
SOURCE = 0
TOKEN = 1
TARGET = 2
NEXT_EDGE = 3
EDGE_COLUMNS = 4

# Fields of the automaton.
NUM_TOKENS = 0
NUM_STATES = 1
NUM_EDGES = 2
WHOLE = 3  # the state of the whole text
CONTEXT = 4  # the state of the text's longest suffix of at most max_depth - 1 tokens
NUM_FIELDS = 5

ROOT = 0


class SuffixAutomaton:
    """Counts of one text's substrings of up to `max_depth` tokens, and drafts from them."""

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._states = np.empty((0, STATE_COLUMNS), np.int32)
        self._edges = np.empty((0, EDGE_COLUMNS), np.int32)
        self._table_S = table_for(0)
        self._fields_M = np.zeros(NUM_FIELDS, np.int64)
        self._draft = np.empty(MAX_DRAFTS, np.int32)
        self._reserve(0)
        self._states[ROOT] = (0, -1, 0, -1, -1)
        self._fields_M[NUM_STATES] = 1

    def __len__(self) -> int:
        return int(self._fields_M[NUM_TOKENS])

    @property
    def num_bytes(self) -> int:
        return self._states.nbytes + self._edges.nbytes + self._table_S.nbytes

    def append(self, token_ids_T: np.ndarray) -> None:
        """Continue the text; int32 [T]."""
        total = len(self) + len(token_ids_T)
        if 2 * total + 1 > len(self._states):
            self._reserve(total)
        _append(
            token_ids_T, self._max_depth, self._states, self._edges, self._table_S, self._fields_M
        )

    def draft(
        self, max_tokens: int, max_spec_factor: float, min_token_prob: float
    ) -> tuple[list[int], float]:
        """The likeliest continuation of the text and its score: see `speculate`."""
        length, score = speculate(
            self._max_depth,
            min(max_tokens, MAX_DRAFTS),
            max_spec_factor,
            min_token_prob,
            self._states,
            self._edges,
            self._fields_M,
            self._draft,
        )
        return self._draft[:length].tolist(), score

    def _reserve(self, num_tokens: int) -> None:
        """Room for the worst text of this length, and a quarter more to grow into."""
        num_tokens += num_tokens // 4 + 64
        self._states = _grown(self._states, 2 * num_tokens + 1)
        self._edges = _grown(self._edges, 3 * num_tokens)
        self._table_S = table_for(3 * num_tokens)
        put_all(self._table_S, self._edges, 0, int(self._fields_M[NUM_EDGES]))


def _grown(rows: np.ndarray, num_rows: int) -> np.ndarray:
    # Rows are written before they are read: untouched pages of the reserve cost no memory.
    grown = np.empty((num_rows, rows.shape[1]), rows.dtype)
    grown[: len(rows)] = rows
    return grown


@njit(cache=True)
def draft_limit(match_len: int, max_depth: int, max_tokens: int, max_spec_factor: float) -> int:
    """How much a match of this length may draft: match and draft together fit in max_depth."""
    return min(max_tokens, int(max_spec_factor * match_len), max_depth - match_len)


@njit(cache=True)
def _append(
    token_ids_T: np.ndarray,
    max_depth: int,
    states: np.ndarray,
    edges: np.ndarray,
    table_S: np.ndarray,
    fields_M: np.ndarray,
) -> None:
    for token in token_ids_T:
        _extend(token, states, edges, table_S, fields_M)
        _count(token, max_depth, states, edges, table_S, fields_M)


@njit(cache=True)
def _extend(
    token: int, states: np.ndarray, edges: np.ndarray, table_S: np.ndarray, fields_M: np.ndarray
) -> None:
    """Add the suffixes that end with a new token: the textbook construction."""
    whole = fields_M[NUM_STATES]
    fields_M[NUM_STATES] += 1
    fields_M[NUM_TOKENS] += 1
    states[whole, LENGTH] = fields_M[NUM_TOKENS]
    states[whole, LINK] = ROOT
    states[whole, COUNT] = 0
    states[whole, FIRST_EDGE] = -1
    states[whole, BEST_EDGE] = -1
    state = fields_M[WHOLE]
    fields_M[WHOLE] = whole
    edge = -1
    while state != -1:
        edge = find(table_S, edges, state, token)
        if edge != -1:
            break
        _add_edge(state, token, whole, states, edges, table_S, fields_M)
        state = states[state, LINK]
    if state == -1:
        return
    target = edges[edge, TARGET]
    if states[target, LENGTH] == states[state, LENGTH] + 1:
        states[whole, LINK] = target
        return
    clone = _clone(target, states[state, LENGTH] + 1, states, edges, table_S, fields_M)
    states[target, LINK] = clone
    states[whole, LINK] = clone
    while state != -1:
        edge = find(table_S, edges, state, token)
        if edges[edge, TARGET] != target:
            break
        edges[edge, TARGET] = clone
        state = states[state, LINK]


@njit(cache=True)
def _add_edge(
    source: int,
    token: int,
    target: int,
    states: np.ndarray,
    edges: np.ndarray,
    table_S: np.ndarray,
    fields_M: np.ndarray,
) -> int:
    edge = fields_M[NUM_EDGES]
    fields_M[NUM_EDGES] += 1
    edges[edge, SOURCE] = source
    edges[edge, TOKEN] = token
    edges[edge, TARGET] = target
    edges[edge, NEXT_EDGE] = states[source, FIRST_EDGE]
    states[source, FIRST_EDGE] = edge
    put(table_S, edges, edge)
    return edge


@njit(cache=True)
def _clone(
    state: int,
    length: int,
    states: np.ndarray,
    edges: np.ndarray,
    table_S: np.ndarray,
    fields_M: np.ndarray,
) -> int:
    """A new class for the shorter strings of a state: same past, but a different future."""
    clone = fields_M[NUM_STATES]
    fields_M[NUM_STATES] += 1
    states[clone, LENGTH] = length
    states[clone, LINK] = states[state, LINK]
    states[clone, COUNT] = states[state, COUNT]
    states[clone, FIRST_EDGE] = -1
    states[clone, BEST_EDGE] = -1
    edge = states[state, FIRST_EDGE]
    while edge != -1:
        copy = _add_edge(
            clone, edges[edge, TOKEN], edges[edge, TARGET], states, edges, table_S, fields_M
        )
        if edge == states[state, BEST_EDGE]:
            states[clone, BEST_EDGE] = copy
        edge = edges[edge, NEXT_EDGE]
    return clone


@njit(cache=True)
def _count(
    token: int,
    max_depth: int,
    states: np.ndarray,
    edges: np.ndarray,
    table_S: np.ndarray,
    fields_M: np.ndarray,
) -> None:
    """Count the new suffixes of at most max_depth tokens, each a continuation of an old one."""
    old_len = min(fields_M[NUM_TOKENS] - 1, max_depth - 1)
    old = fields_M[CONTEXT]
    # Where the token has split this class, the token follows both halves: start with the longer.
    longest = edges[find(table_S, edges, old, token), TARGET]
    state = longest
    while state != ROOT:
        states[state, COUNT] += 1
        state = states[state, LINK]
    while old != ROOT:
        edge = find(table_S, edges, old, token)
        best = states[old, BEST_EDGE]
        if best == -1 or states[edges[edge, TARGET], COUNT] >= states[edges[best, TARGET], COUNT]:
            states[old, BEST_EDGE] = edge
        old = states[old, LINK]
    if old_len + 1 > max_depth - 1 and states[states[longest, LINK], LENGTH] >= max_depth - 1:
        longest = states[longest, LINK]
    fields_M[CONTEXT] = longest


@njit(cache=True)
def speculate(
    max_depth: int,
    max_tokens: int,
    max_spec_factor: float,
    min_token_prob: float,
    states: np.ndarray,
    edges: np.ndarray,
    fields_M: np.ndarray,
    draft: np.ndarray,
) -> tuple[int, float]:
    """Write the draft of the best score, return its length and score.

    For every suffix of the text that occurred before: follow the most frequent continuation, whose
    probability is count(string + token) / count(string), until the product would fall below
    min_token_prob or `draft_limit` is reached. The score is the sum of the products, that is, the
    expected number of accepted tokens; equal scores go to the longest suffix.
    """
    best_score = 0.0
    best_length = 0
    best_state = ROOT
    state = fields_M[CONTEXT]
    longest = min(fields_M[NUM_TOKENS], max_depth - 1)
    while state != ROOT:
        shortest = states[states[state, LINK], LENGTH] + 1
        limit = 0
        for match_len in range(shortest, min(longest, states[state, LENGTH]) + 1):
            limit = max(limit, draft_limit(match_len, max_depth, max_tokens, max_spec_factor))
        length, score = _follow(state, limit, min_token_prob, states, edges, draft)
        if score > best_score:
            best_score, best_length, best_state = score, length, state
        state = states[state, LINK]
    _follow(best_state, best_length, 0.0, states, edges, draft)
    return best_length, best_score


@njit(cache=True)
def _follow(
    state: int,
    limit: int,
    min_prob: float,
    states: np.ndarray,
    edges: np.ndarray,
    draft: np.ndarray,
) -> tuple[int, float]:
    prob = 1.0
    score = 0.0
    length = 0
    while length < limit and states[state, BEST_EDGE] != -1:
        edge = states[state, BEST_EDGE]
        target = edges[edge, TARGET]
        prob *= states[target, COUNT] / states[state, COUNT]
        if prob < min_prob:
            break
        draft[length] = edges[edge, TOKEN]
        score += prob
        length += 1
        state = target
    return length, score
