"""Counts, in one growing text, how often each token has followed each short string.

A suffix automaton (Blumer et al. 1985) of the whole text, grown token by token. A state stands
for strings that end at exactly the same places; its link leads to the class of their longest
suffix that occurs in more places. For strings of up to `max_depth` tokens the automaton also keeps

- the number of occurrences: a new token adds one to the classes of the text's last suffixes, which
  are the link chain from the longest of them, hence at most max_depth steps a token;
- the few most frequent continuations, the latest first among equals, updated on the same walk.

Longer strings are never asked for, and their counts are not maintained. A text of T tokens has at
most 2T states and 3T edges; a token costs amortised constant time, however long the text is.

A text that is about to outgrow its table of edges fills the next, larger one beside it, a little at
each token: no step has to enter all edges again.

Dimension key: T tokens, E edges, S places of a table, M fields, P branching.
"""

from typing import NamedTuple

import numpy as np

from outdraft.core.jit import njit
from outdraft.drafting.host.array_places import array_at
from outdraft.drafting.host.live_texts import is_continued
from outdraft.drafting.host.pair_table import EMPTY, find, put, put_all, table_for

# Columns of a state.
LENGTH = 0  # of its longest string
LINK = 1  # -1: the root has none
COUNT = 2
FIRST_EDGE = 3  # head of the list of its edges, -1: none
BEST_EDGE = 4  # the first of P, to the most frequent continuations; -1: no more

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
NEWEST_TOKEN = 5
NUM_EMPTIED = 6  # places of the next table, at its start
NUM_COMING = 7  # edges in the next table, the first ones
NUM_FIELDS = 8

ROOT = 0

# The last quarter of the room is for the next table: half of it to empty at most 18 places for each
# token of the room, half of it to enter at most three edges for each.
EMPTIED_PER_TOKEN = 144
COMING_PER_TOKEN = 24
NO_TABLE_S = np.empty(0, np.int32)

# States and edges have room for many times more tokens than the table, or they would be copied as
# often. They are written before they are read: pages that are not touched cost no memory.
ROWS_AHEAD = 8


class Automaton(NamedTuple):
    """What a kernel reads and writes: states, edges and fields as above, all int32.

    Attributes:
        table_S: all edges.
        coming_S: the next table, with some of them; no places: not needed yet.
    """

    states: np.ndarray
    edges: np.ndarray
    table_S: np.ndarray
    coming_S: np.ndarray
    fields_M: np.ndarray


class SuffixAutomaton:
    """The arrays of one request's automaton; see TextState."""

    def __init__(self, branching: int) -> None:
        self._states = np.empty((0, BEST_EDGE + branching), np.int32)
        self._edges = np.empty((0, EDGE_COLUMNS), np.int32)
        self._table_S = self._coming_S = NO_TABLE_S
        self._fields_M = np.zeros(NUM_FIELDS, np.int32)
        self._room = 0  # tokens
        self._grow(0)
        _begin(Automaton(self._states, self._edges, self._table_S, self._coming_S, self._fields_M))

    @property
    def capacity(self) -> int:
        return self._room if self._coming_S.size else self._room - self._room // 4

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return (
            self._states,
            self._edges,
            self._table_S[None],
            self._coming_S[None],
            self._fields_M[None],
        )

    @property
    def num_bytes(self) -> int:
        """Memory that is touched."""
        states = self._states[: self._fields_M[NUM_STATES]]
        edges = self._edges[: self._fields_M[NUM_EDGES]]
        return states.nbytes + edges.nbytes + self._table_S.nbytes + self._coming_S.nbytes

    def reserve(self, num_tokens: int) -> None:
        """Make room; a text that fills three quarters of it gets the next table, too."""
        if num_tokens > self._room:
            self._grow(num_tokens)
        if num_tokens > self.capacity:
            self._coming_S = np.empty(2 * len(self._table_S), np.int32)
            self._fields_M[NUM_EMPTIED] = self._fields_M[NUM_COMING] = 0

    def _grow(self, num_tokens: int) -> None:
        """Go on with the next table, or make room for the worst text of twice this length."""
        fields_M = self._fields_M
        if num_tokens <= 2 * self._room and self._coming_S.size:
            self._room *= 2
            self._coming_S[fields_M[NUM_EMPTIED] :] = EMPTY
        else:
            self._room = 2 * num_tokens + 64
            self._coming_S = table_for(3 * self._room)
            fields_M[NUM_COMING] = 0
        if len(self._edges) < 3 * self._room:
            rows = ROWS_AHEAD * self._room
            self._states = _grown(self._states, fields_M[NUM_STATES], 2 * rows + 1)
            self._edges = _grown(self._edges, fields_M[NUM_EDGES], 3 * rows)
        put_all(self._coming_S, self._edges, fields_M[NUM_COMING], fields_M[NUM_EDGES])
        self._table_S, self._coming_S = self._coming_S, NO_TABLE_S


def _grown(rows: np.ndarray, num_used: int, num_rows: int) -> np.ndarray:
    grown = np.empty((num_rows, rows.shape[1]), rows.dtype)
    grown[:num_used] = rows[:num_used]
    return grown


@njit(cache=True)
def automaton_at(places_A3: np.ndarray) -> Automaton:
    """The automaton whose arrays are at the places of a row."""
    return Automaton(
        array_at(places_A3[0]),
        array_at(places_A3[1]),
        array_at(places_A3[2])[0],
        array_at(places_A3[3])[0],
        array_at(places_A3[4])[0],
    )


@njit(cache=True)
def _begin(automaton: Automaton) -> None:
    """The empty text: a root alone."""
    states, _, table_S, _, fields_M = automaton
    table_S[:] = EMPTY
    fields_M[:] = 0
    fields_M[NUM_STATES] = 1
    states[ROOT] = -1
    states[ROOT, LENGTH] = 0
    states[ROOT, COUNT] = 0


@njit(cache=True)
def read(automaton: Automaton, text_T: np.ndarray, max_depth: int) -> None:
    """Continue with the tokens that are new; the caller sees to it that there is room.

    A text that is no continuation is read from its start.
    """
    fields_M = automaton.fields_M
    if not is_continued(text_T, fields_M[NUM_TOKENS], fields_M[NEWEST_TOKEN]):
        _begin(automaton)
    num_new = len(text_T) - fields_M[NUM_TOKENS]
    for token in text_T[fields_M[NUM_TOKENS] :]:
        _extend(token, automaton)
        _count(token, max_depth, automaton)
        fields_M[NEWEST_TOKEN] = token
    if automaton.coming_S.size > 0:
        _fill_coming(num_new, automaton)


@njit(cache=True)
def _fill_coming(num_new: int, automaton: Automaton) -> None:
    """Go on with the next table, in step with the text: empty it, then enter the edges."""
    _, edges, _, coming_S, fields_M = automaton
    if fields_M[NUM_EMPTIED] < len(coming_S):
        start = fields_M[NUM_EMPTIED]
        stop = min(start + EMPTIED_PER_TOKEN * num_new, len(coming_S))
        coming_S[start:stop] = EMPTY
        fields_M[NUM_EMPTIED] = stop
    else:
        start = fields_M[NUM_COMING]
        stop = min(start + COMING_PER_TOKEN * num_new, fields_M[NUM_EDGES])
        put_all(coming_S, edges, start, stop)
        fields_M[NUM_COMING] = stop


@njit(cache=True)
def _extend(token: int, automaton: Automaton) -> None:
    """Add the suffixes that end with a new token: the textbook construction."""
    states, edges, table_S, _, fields_M = automaton
    whole = fields_M[NUM_STATES]
    fields_M[NUM_STATES] += 1
    fields_M[NUM_TOKENS] += 1
    for column in range(FIRST_EDGE, states.shape[1]):
        states[whole, column] = -1
    states[whole, LENGTH] = fields_M[NUM_TOKENS]
    states[whole, LINK] = ROOT
    states[whole, COUNT] = 0
    state = fields_M[WHOLE]
    fields_M[WHOLE] = whole
    edge = -1
    while state != -1:
        edge = find(table_S, edges, state, token)
        if edge != -1:
            break
        _add_edge(state, token, whole, automaton)
        state = states[state, LINK]
    if state == -1:
        return
    target = edges[edge, TARGET]
    if states[target, LENGTH] == states[state, LENGTH] + 1:
        states[whole, LINK] = target
        return
    clone = _clone(target, states[state, LENGTH] + 1, automaton)
    states[target, LINK] = clone
    states[whole, LINK] = clone
    while state != -1:
        edge = find(table_S, edges, state, token)
        if edges[edge, TARGET] != target:
            break
        edges[edge, TARGET] = clone
        state = states[state, LINK]


@njit(cache=True)
def _add_edge(source: int, token: int, target: int, automaton: Automaton) -> int:
    states, edges, table_S, _, fields_M = automaton
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
def _clone(state: int, length: int, automaton: Automaton) -> int:
    """A new class for the shorter strings of a state: same past, but a different future."""
    states, edges, _, _, fields_M = automaton
    clone = fields_M[NUM_STATES]
    fields_M[NUM_STATES] += 1
    for column in range(FIRST_EDGE, states.shape[1]):
        states[clone, column] = -1
    states[clone, LENGTH] = length
    states[clone, LINK] = states[state, LINK]
    states[clone, COUNT] = states[state, COUNT]
    edge = states[state, FIRST_EDGE]
    while edge != -1:
        copy = _add_edge(clone, edges[edge, TOKEN], edges[edge, TARGET], automaton)
        for rank in range(BEST_EDGE, states.shape[1]):
            if edge == states[state, rank]:
                states[clone, rank] = copy
        edge = edges[edge, NEXT_EDGE]
    return clone


@njit(cache=True)
def _count(token: int, max_depth: int, automaton: Automaton) -> None:
    """Count the new suffixes of at most max_depth tokens, each a continuation of an old one."""
    states, edges, table_S, _, fields_M = automaton
    old_len = min(fields_M[NUM_TOKENS] - 1, max_depth - 1)
    old = fields_M[CONTEXT]
    # Where the token has split this class, the token follows both halves: start with the longer.
    longest = edges[find(table_S, edges, old, token), TARGET]
    state = longest
    while state != ROOT:
        states[state, COUNT] += 1
        state = states[state, LINK]
    while old != ROOT:
        _promote(states[old, BEST_EDGE:], find(table_S, edges, old, token), states, edges)
        old = states[old, LINK]
    if old_len + 1 > max_depth - 1 and states[states[longest, LINK], LENGTH] >= max_depth - 1:
        longest = states[longest, LINK]
    fields_M[CONTEXT] = longest


@njit(cache=True)
def _promote(best_P: np.ndarray, edge: int, states: np.ndarray, edges: np.ndarray) -> None:
    """Move the edge that was counted just now before all that do not count more."""
    count = states[edges[edge, TARGET], COUNT]
    place = 0
    while place < len(best_P) and best_P[place] != -1 and best_P[place] != edge:
        if states[edges[best_P[place], TARGET], COUNT] <= count:
            break
        place += 1
    moved = edge
    while place < len(best_P) and moved != -1:
        moved, best_P[place] = best_P[place], moved
        if moved == edge:
            break
        place += 1
