# pyright: reportReturnType=false
# numba makes Python's numbers of what the stubs call arrays.
"""An index of the places where each short string of a text has occurred, the newest first.

For each n a hash table leads from an n-gram to the newest place where it ends, and a chain of
links from there to the older ones, as in zlib's search for matches: a new token costs a few hash
look-ups, however long the text is. The tables hold places only; what stands there is compared with
the text itself.

A text that is about to outgrow its tables fills the next, larger ones a few tokens a step beside
them: no step has to enter the whole text again.

Dimension key: B requests, T tokens, P branching, the newest places that count, L tokens there is
room for, S places of a table, N the values of n, M fields, R rows, A arrays of a row, F places of
the drafts.
"""

from typing import NamedTuple

import numpy as np

from outdraft.core.jit import njit
from outdraft.drafting.host.array_places import array_at
from outdraft.drafting.host.best_first import (
    DEPTH,
    GrowingTree,
    can_take,
    clear,
    end_of,
    new_tree,
    offer,
    take,
    write,
)
from outdraft.drafting.host.live_texts import MAX_TOKENS, ROW, is_continued, text_of

# Every match length starts from one token that came true and one that did not.
PRIOR_RIGHT = 1
PRIOR_JUDGED = 2

# Rows of the tallies.
RIGHT = 0
JUDGED = 1

# Fields of an index.
NUM_TOKENS = 0  # of the text at the last step
NEWEST_TOKEN = 1
NUM_INDEXED = 2  # n-grams that end in the first NUM_INDEXED tokens are in the tables
NUM_COMING = 3  # the same of the tables that come next
MATCH_N = 4  # match length of the last draft
NUM_MATCHES = 5  # places that it was looked up at, 0: no draft
MAX_DEPTH = 6  # tokens that it could look ahead
MATCHES = 7  # the first of P: what followed these places starts here, the newest first

# A place is named by the token behind it: that of nothing is 0, which memory holds from the start.
EMPTY = 0
LEAST_PLACES = 1024

# The last quarter of the room is for filling the next tables: 4 tokens for each new one would do.
COMING_PER_TOKEN = 5


class _Tables(NamedTuple):
    """Where n-grams occurred; int32.

    Attributes:
        table_NS: last places of the n-grams of min_n + row tokens; EMPTY: none.
        links_LN: of the place before each place, the one before; no columns where the newest places
            are enough.
    """

    table_NS: np.ndarray
    links_LN: np.ndarray


class _Index(NamedTuple):
    """What a kernel reads and writes; all int32.

    Attributes:
        text_T: the tokens, the caller's own.
        tables: all n-grams.
        coming: some of them; no places: not needed yet.
        tallies_2N: by match length from 0, tokens that came true, and of how many.
        fields_M: see above.
    """

    text_T: np.ndarray
    tables: _Tables
    coming: _Tables
    tallies_2N: np.ndarray
    fields_M: np.ndarray


class NgramIndex:
    """The n-grams of one request, and how well looking them up has worked; see TextState."""

    def __init__(self, min_n: int, max_n: int, branching: int) -> None:
        self._num_ns = max_n - min_n + 1
        self._num_links = self._num_ns if branching > 1 else 0
        self._tallies = np.empty((2, max_n + 1), np.int32)
        self._tallies[RIGHT], self._tallies[JUDGED] = PRIOR_RIGHT, PRIOR_JUDGED
        self._fields = np.zeros((1, MATCHES + branching), np.int32)
        self._tables = self._coming = self._new_tables(0)

    @property
    def capacity(self) -> int:
        room = self._tables.links_LN.shape[0]
        return room if self._coming.table_NS.size else room - room // 4

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return *self._tables, *self._coming, self._tallies, self._fields

    def reserve(self, num_tokens: int) -> None:
        """Make room; a text that fills three quarters of it gets the next tables, too."""
        if num_tokens > self._tables.links_LN.shape[0]:
            self._tables = self._coming
            self._fields[0, NUM_INDEXED] = self._fields[0, NUM_COMING]
            self._coming = self._new_tables(0)
        if num_tokens > self._tables.links_LN.shape[0]:
            self._tables = self._new_tables(2 * num_tokens)
            self._fields[0, NUM_INDEXED] = 0
        if num_tokens > self.capacity:
            self._coming = self._new_tables(self._tables.links_LN.shape[0] + 1)
            self._fields[0, NUM_COMING] = 0

    def _new_tables(self, num_tokens: int) -> _Tables:
        """Tables that are two thirds full at most; memory that is never touched costs nothing."""
        places = LEAST_PLACES if num_tokens else 0
        while 2 * places < 3 * num_tokens:
            places *= 2
        table_NS = np.zeros((self._num_ns, places), np.int32)
        return _Tables(table_NS, np.empty((2 * places // 3, self._num_links), np.int32))


@njit(cache=True)
def step_all(
    asks_B4: np.ndarray,
    places_RA3: np.ndarray,
    min_n: int,
    drafts_F: np.ndarray,
    scores_B: np.ndarray,
) -> int:
    """Read the new tokens of every request and draft for it; return how many places drafts take.

    The first arguments are those of TextBatch, the last ones those of DraftRoom.
    """
    tree = new_tree()
    end = 0
    for b in range(len(asks_B4)):
        places_A3 = places_RA3[asks_B4[b, ROW]]
        index = _Index(
            text_of(asks_B4[b]),
            _Tables(array_at(places_A3[0]), array_at(places_A3[1])),
            _Tables(array_at(places_A3[2]), array_at(places_A3[3])),
            array_at(places_A3[4]),
            array_at(places_A3[5])[0],
        )
        scores_B[b] = _step(index, min_n, asks_B4[b, MAX_TOKENS], tree)
        write(tree, drafts_F[end:])
        end += end_of(drafts_F[end:])
    return end


@njit(cache=True)
def _step(index: _Index, min_n: int, max_tokens: int, tree: GrowingTree) -> float:
    """Grow the draft and return its score."""
    text_T, fields_M = index.text_T, index.fields_M
    if not is_continued(text_T, fields_M[NUM_TOKENS], fields_M[NEWEST_TOKEN]):
        _forget(index)
    _judge(index)
    num_new = len(text_T) - fields_M[NUM_TOKENS]
    fields_M[NUM_TOKENS] = len(text_T)
    if len(text_T) > 0:
        fields_M[NEWEST_TOKEN] = text_T[-1]
    fields_M[NUM_INDEXED] = _enter(
        index, index.tables, min_n, fields_M[NUM_INDEXED], len(text_T) - 1
    )
    if index.coming.table_NS.size > 0:
        stop = min(fields_M[NUM_COMING] + COMING_PER_TOKEN * num_new, len(text_T) - 1)
        fields_M[NUM_COMING] = _enter(index, index.coming, min_n, fields_M[NUM_COMING], stop)
    fields_M[MATCH_N], fields_M[NUM_MATCHES] = _look_up(index, min_n)
    fields_M[MAX_DEPTH] = max_tokens
    n = fields_M[MATCH_N]
    rate = float(index.tallies_2N[RIGHT, n] / index.tallies_2N[JUDGED, n])
    return _grow(index, rate, max_tokens, tree)


@njit(cache=True)
def _forget(index: _Index) -> None:
    """Start with another text."""
    index.tables.table_NS[:] = EMPTY
    index.coming.table_NS[:] = EMPTY
    index.tallies_2N[RIGHT] = PRIOR_RIGHT
    index.tallies_2N[JUDGED] = PRIOR_JUDGED
    index.fields_M[:] = 0


@njit(cache=True)
def _judge(index: _Index) -> None:
    """Compare what was looked up with what the text became: behind a wrong token nothing counts.

    A token is right if one of the places that were right so far goes on with it, whether there was
    a row for it or not.
    """
    text_T, fields_M = index.text_T, index.fields_M
    seen = fields_M[NUM_TOKENS]
    n = fields_M[MATCH_N]
    alive = (1 << int(fields_M[NUM_MATCHES])) - 1
    for at in range(seen, min(len(text_T), seen + fields_M[MAX_DEPTH])):
        is_known, right = False, 0
        for i in range(fields_M[NUM_MATCHES]):
            place = fields_M[MATCHES + i] + at - seen
            if alive >> i & 1 and place < seen:
                is_known = True
                if text_T[place] == text_T[at]:
                    right |= 1 << i
        if not is_known:
            break
        index.tallies_2N[JUDGED, n] += 1
        if right == 0:
            break
        index.tallies_2N[RIGHT, n] += 1
        alive = right


@njit(cache=True)
def _enter(index: _Index, tables: _Tables, min_n: int, start: int, stop: int) -> int:
    """Enter the n-grams that end with the tokens from `start` to `stop`; return where it stopped.

    Those that end with the newest token are left out, for nothing follows them yet.
    """
    text_T = index.text_T
    has_links = tables.links_LN.shape[1] > 0
    max_n = index.tallies_2N.shape[1] - 1
    for end in range(start, stop):
        key = 0
        for n in range(1, min(max_n, end + 1) + 1):
            key = _extend_key(key, int(text_T[end - n + 1]))
            if n >= min_n:
                table_S = tables.table_NS[n - min_n]
                place = _place_of(table_S, key, text_T, end, n)
                if has_links:
                    tables.links_LN[end, n - min_n] = table_S[place]
                table_S[place] = end + 1
    return max(start, stop)


@njit(cache=True)
def _look_up(index: _Index, min_n: int) -> tuple[int, int]:
    """Find the newest places of the longest match; return its n and their number."""
    text_T, tables = index.text_T, index.tables
    last = len(text_T) - 1
    key = 0
    match_n, after = 0, EMPTY
    for n in range(1, min(index.tallies_2N.shape[1] - 1, last) + 1):
        key = _extend_key(key, int(text_T[last - n + 1]))
        if n < min_n:
            continue
        table_S = tables.table_NS[n - min_n]
        place = _place_of(table_S, key, text_T, last, n)
        if table_S[place] == EMPTY:
            break  # a longer n-gram cannot have occurred either
        match_n, after = n, table_S[place]
    num_matches = 0
    while after != EMPTY:
        index.fields_M[MATCHES + num_matches] = after
        num_matches += 1
        if MATCHES + num_matches == len(index.fields_M):
            break
        after = tables.links_LN[after - 1, match_n - min_n]
    return match_n, num_matches


@njit(cache=True)
def _grow(index: _Index, rate: float, max_tokens: int, tree: GrowingTree) -> float:
    """Merge what followed the matches into a tree of the most probable tokens."""
    clear(tree)
    score = 0.0
    all_matches = (1 << int(index.fields_M[NUM_MATCHES])) - 1
    _offer_followers(index, all_matches, rate, 0, tree)
    while can_take(tree, max_tokens):
        row, _, matches, _, _ = take(tree)
        score += tree.probs_K1[row]
        _offer_followers(index, matches, rate, row, tree)
    return score


@njit(cache=True, inline="always")
def _offer_followers(index: _Index, matches: int, rate: float, row: int, tree: GrowingTree) -> None:
    """Offer the tokens that follow a row at some of the matches, which are bits.

    Those of most matches first, among equals that of the newest match.
    """
    depth = tree.rows_K1C[row, DEPTH]
    length = len(index.text_T)
    num_matches = index.fields_M[NUM_MATCHES]
    known, num_known = 0, 0
    for i in range(num_matches):
        if matches >> i & 1 and index.fields_M[MATCHES + i] + depth < length:
            known |= 1 << i
            num_known += 1
    while known:
        best, best_count, best_token = 0, 0, 0
        rest = known
        for i in range(num_matches):
            if not rest >> i & 1:
                continue
            token = int(index.text_T[index.fields_M[MATCHES + i] + depth])
            alike, count = 0, 0
            for j in range(i, num_matches):
                if rest >> j & 1 and index.text_T[index.fields_M[MATCHES + j] + depth] == token:
                    alike |= 1 << j
                    count += 1
            rest &= ~alike
            if count > best_count:
                best, best_count, best_token = alike, count, token
        known &= ~best
        prob = tree.probs_K1[row] * (rate * (best_count / num_known))
        offer(tree, prob, row, best_token, best, 0, 0)


@njit(cache=True)
def _extend_key(key: int, token: int) -> int:
    """Hash of an n-gram from the hash of its last n - 1 tokens and the token before them."""
    mixed = (key + token + 1) * 0x1E3779B97F4A7C15
    mixed ^= mixed >> 29
    mixed *= 0x3F58476D1CE4E5B9
    mixed ^= mixed >> 32
    return mixed


@njit(cache=True)
def _place_of(table_S: np.ndarray, key: int, text_T: np.ndarray, end: int, n: int) -> int:
    """The place of the n-gram that ends at `end`, or the empty one where it would stand."""
    mask = len(table_S) - 1
    place = key & mask
    while table_S[place] != EMPTY:
        found = table_S[place] - 1
        same = 0
        while same < n and text_T[found - same] == text_T[end - same]:
            same += 1
        if same == n:
            break
        place = (place + 1) & mask
    return place
