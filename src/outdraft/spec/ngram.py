"""Prompt lookup: what followed the last time that the text ended like this?

The longest n in [prompt_lookup_min, prompt_lookup_max] whose last n tokens have occurred before
decides; of several occurrences the newest one is copied. (Saxena 2023, "prompt lookup decoding".)

Each request keeps an index from its n-grams to their newest place, so a step costs a few hash
look-ups, however long the text is. N-grams are compared by 64-bit hashes and a hit is checked
against the text, so a collision can only lose a match.

Dimension key: T tokens, S places of the table, N = prompt_lookup_max + 1, M fields.
"""

from collections.abc import Sequence

import numpy as np
from numba import njit

from outdraft.config.speculation import NgramConfig
from outdraft.core.draft import MAX_DRAFTS, Draft, DraftAsk, DraftSource

# Every match length starts from one accepted and one refused token: half of its guesses hold.
PRIOR_ACCEPTED = 1.0
PRIOR_JUDGED = 2.0

# Fields of an index.
NUM_INDEXED = 0  # n-grams that end in the first NUM_INDEXED tokens are in the table
NUM_ENTRIES = 1
NUM_SEEN = 2  # tokens of the text at the last step
COPIED_FROM = 3  # where the last draft started in the text
COPIED_LEN = 4  # its length, 0: no draft
COPIED_N = 5  # its match length
NUM_FIELDS = 6

NO_KEY = 0


class NgramProposer:
    """Drafts by prompt lookup.

    The score of a draft of k tokens is a + a^2 + ... + a^k, its expected number of accepted tokens
    if each is right with probability a. a is measured, per request and match length n: of the
    draft tokens that the text has reached since, the share that came true.
    """

    source = DraftSource.NGRAM

    def __init__(self, config: NgramConfig) -> None:
        self._config = config
        self._indexes: dict[str, _NgramIndex] = {}

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """One draft per ask; see HostProposer."""
        return [self._propose_one(ask) for ask in asks]

    def finish(self, request_id: str, token_ids: np.ndarray | None) -> None:
        """Forget the request; nothing is learned from its text."""
        self._indexes.pop(request_id, None)

    def _propose_one(self, ask: DraftAsk) -> Draft:
        index = self._indexes.get(ask.request_id)
        if index is None or not index.is_continued_by(ask.token_ids):
            index = _NgramIndex(self._config.prompt_lookup_min, self._config.prompt_lookup_max)
            self._indexes[ask.request_id] = index
        start, stop, score = index.step(ask.token_ids, min(ask.max_tokens, MAX_DRAFTS))
        if start == stop:
            return Draft()
        return Draft.chain(ask.token_ids[start:stop].tolist(), score)


class _NgramIndex:
    """One request's n-grams, and how well copying after them has worked."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n = min_n
        self._max_n = max_n
        self._keys_S = np.zeros(64, np.int64)
        self._places_S = np.zeros(64, np.int32)
        self._fields_M = np.zeros(NUM_FIELDS, np.int64)
        self._accepted_N = np.full(max_n + 1, PRIOR_ACCEPTED)
        self._judged_N = np.full(max_n + 1, PRIOR_JUDGED)
        self._newest_token = -1

    def is_continued_by(self, token_ids_T: np.ndarray) -> bool:
        """Whether this text can be the one of the last step, grown (judged by one token)."""
        seen = int(self._fields_M[NUM_SEEN])
        if seen == 0:
            return True
        return seen <= len(token_ids_T) and token_ids_T[seen - 1] == self._newest_token

    def step(self, token_ids_T: np.ndarray, max_tokens: int) -> tuple[int, int, float]:
        """Read the new tokens; the draft is the text's [start, stop), and its score."""
        if len(token_ids_T) == 0:
            return 0, 0, 0.0
        new = len(token_ids_T) - int(self._fields_M[NUM_INDEXED])
        self._reserve(int(self._fields_M[NUM_ENTRIES]) + new * (self._max_n - self._min_n + 1))
        self._newest_token = int(token_ids_T[-1])
        return _step(
            token_ids_T,
            self._min_n,
            max_tokens,
            self._keys_S,
            self._places_S,
            self._fields_M,
            self._accepted_N,
            self._judged_N,
        )

    def _reserve(self, num_entries: int) -> None:
        places = len(self._keys_S)
        if 3 * num_entries <= 2 * places:
            return
        while 3 * num_entries > 2 * places:
            places *= 2
        keys_S, places_S = np.zeros(places, np.int64), np.zeros(places, np.int32)
        _move(self._keys_S, self._places_S, keys_S, places_S)
        self._keys_S, self._places_S = keys_S, places_S


@njit(cache=True)
def _step(
    token_ids_T: np.ndarray,
    min_n: int,
    max_tokens: int,
    keys_S: np.ndarray,
    places_S: np.ndarray,
    fields_M: np.ndarray,
    accepted_N: np.ndarray,
    judged_N: np.ndarray,
) -> tuple[int, int, float]:
    _judge(token_ids_T, fields_M, accepted_N, judged_N)
    max_n = len(accepted_N) - 1
    _index(token_ids_T, min_n, max_n, keys_S, places_S, fields_M)
    start, n = _look_up(token_ids_T, min_n, max_n, keys_S, places_S)
    stop = min(start + max_tokens, len(token_ids_T)) if n > 0 else start
    fields_M[NUM_SEEN] = len(token_ids_T)
    fields_M[COPIED_FROM] = start
    fields_M[COPIED_LEN] = stop - start
    fields_M[COPIED_N] = n
    score = 0.0
    if n > 0:
        prob = 1.0
        for _ in range(stop - start):
            prob *= accepted_N[n] / judged_N[n]
            score += prob
    return start, stop, score


@njit(cache=True)
def _judge(
    token_ids_T: np.ndarray, fields_M: np.ndarray, accepted_N: np.ndarray, judged_N: np.ndarray
) -> None:
    """Compare the last draft with what the text became; behind a wrong token nothing counts."""
    n = fields_M[COPIED_N]
    seen = fields_M[NUM_SEEN]
    for offset in range(min(fields_M[COPIED_LEN], len(token_ids_T) - seen)):
        judged_N[n] += 1
        if token_ids_T[fields_M[COPIED_FROM] + offset] != token_ids_T[seen + offset]:
            break
        accepted_N[n] += 1


@njit(cache=True)
def _index(
    token_ids_T: np.ndarray,
    min_n: int,
    max_n: int,
    keys_S: np.ndarray,
    places_S: np.ndarray,
    fields_M: np.ndarray,
) -> None:
    """Enter the n-grams that something follows: all but those that end with the newest token."""
    for end in range(fields_M[NUM_INDEXED], len(token_ids_T) - 1):
        key = 0
        for n in range(1, min(max_n, end + 1) + 1):
            key = _extend_key(key, token_ids_T[end - n + 1])
            if n >= min_n:
                place = _place_of(keys_S, key)
                if keys_S[place] == NO_KEY:
                    keys_S[place] = key
                    fields_M[NUM_ENTRIES] += 1
                places_S[place] = end
    fields_M[NUM_INDEXED] = max(fields_M[NUM_INDEXED], len(token_ids_T) - 1)


@njit(cache=True)
def _look_up(
    token_ids_T: np.ndarray, min_n: int, max_n: int, keys_S: np.ndarray, places_S: np.ndarray
) -> tuple[int, int]:
    """Where the continuation of the longest match starts, and the match's n (0: no match)."""
    last = len(token_ids_T) - 1
    key = 0
    found_start, found_n = 0, 0
    for n in range(1, min(max_n, last) + 1):
        key = _extend_key(key, token_ids_T[last - n + 1])
        if n < min_n:
            continue
        place = _place_of(keys_S, key)
        if keys_S[place] == NO_KEY:
            break  # a longer n-gram cannot have occurred either
        end = places_S[place]
        same = True
        for offset in range(n):
            same = same and token_ids_T[end - offset] == token_ids_T[last - offset]
        if same:
            found_start, found_n = end + 1, n
    return found_start, found_n


@njit(cache=True)
def _extend_key(key: int, token: int) -> int:
    """Hash of an n-gram from the hash of its last n - 1 tokens and the token before them."""
    mixed = (key + token + 1) * 0x1E3779B97F4A7C15
    mixed ^= mixed >> 29
    mixed *= 0x3F58476D1CE4E5B9
    mixed ^= mixed >> 32
    return mixed if mixed != NO_KEY else 1


@njit(cache=True)
def _place_of(keys_S: np.ndarray, key: int) -> int:
    """The place that holds the key, or the empty one where it would stand."""
    place = key & (len(keys_S) - 1)
    while keys_S[place] != NO_KEY and keys_S[place] != key:
        place = (place + 1) & (len(keys_S) - 1)
    return place


@njit(cache=True)
def _move(
    old_keys_S: np.ndarray, old_places_S: np.ndarray, keys_S: np.ndarray, places_S: np.ndarray
) -> None:
    for old in range(len(old_keys_S)):
        if old_keys_S[old] != NO_KEY:
            place = _place_of(keys_S, old_keys_S[old])
            keys_S[place] = old_keys_S[old]
            places_S[place] = old_places_S[old]
