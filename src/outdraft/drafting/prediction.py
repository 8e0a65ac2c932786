"""Predicted Outputs: the client sends the output that it expects, and the engine verifies it.

A cursor runs along the prediction while the output follows it. Where the output leaves it, the
output may continue at a few places: the same text may stand elsewhere (found by the longest match
of the output's end), or a token may have been replaced, inserted or left out. All these places are
drafted at once, as branches of one tree; the next tokens show which of them was right.

How far a draft reaches follows from how often tokens of this prediction have been right lately.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outdraft.core.draft import MAX_DRAFTS, Draft, DraftAsk, DraftSource

FIRST_RATE = 0.95  # chance that a token of an untried prediction is right
FOUND_RATE = 0.8  # that chance where the output has come back to the prediction
FORGETTING = 0.95  # weight of the past in that chance, per token
MIN_RATE = 0.4  # below it the prediction is left alone until a long match is found
MIN_REACH = 0.5  # chance to be reached below which a token is not drafted
LONG_MATCH = 8  # tokens that prove a place, also in a prediction that was often wrong
SHORT_MATCH = 3  # tokens that make a found place likelier than one that was hardly followed
BRANCH_TOKENS = 2  # of all branches but the first
SKIP_TOKENS = 8  # most tokens that may have been left out


@dataclass(slots=True)
class _Cursor:
    """The places in its prediction where one request's output may be.

    Attributes:
        num_read: tokens of the text that are accounted for.
        places: of the next token, the likeliest first; several after the output has left the
            prediction, none when nothing is left to propose.
        num_followed: tokens in a row that the output has taken from the prediction.
        rate: share of right tokens among those that were tried lately.
    """

    prediction: np.ndarray  # int32 [num_tokens]
    num_read: int
    places: list[int]
    num_followed: int = 0
    rate: float = FIRST_RATE


class PredictionProposer:
    """Drafts from the client's prediction; see HostProposer.

    `ask.prediction` is int32 [num_tokens], None for a request without one, and the same at every
    ask for a request.
    """

    source = DraftSource.PREDICTION

    def __init__(self) -> None:
        self._cursors: dict[str, _Cursor] = {}

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """One draft per ask; none where there is no prediction or its end is reached."""
        return [self._propose(ask) if ask.prediction is not None else Draft() for ask in asks]

    def finish(self, request_id: str, token_ids: np.ndarray | None) -> None:
        """Forget the request; nothing is learned from its prediction."""
        self._cursors.pop(request_id, None)

    def _propose(self, ask: DraftAsk) -> Draft:
        assert ask.prediction is not None
        cursor = self._cursors.get(ask.request_id)
        if cursor is None or cursor.num_read > len(ask.token_ids):
            places = [0] if len(ask.prediction) else []
            cursor = _Cursor(ask.prediction, ask.num_prompt, places)
            self._cursors[ask.request_id] = cursor
        if cursor.num_read < len(ask.token_ids):
            _follow(cursor, ask.token_ids, ask.num_prompt)
        return _draft(cursor, ask.max_tokens)


def _follow(cursor: _Cursor, token_ids: np.ndarray, num_prompt: int) -> None:
    """Account for the tokens that the output has gained."""
    new_ids, prediction = token_ids[cursor.num_read :], cursor.prediction
    cursor.num_read = len(token_ids)
    expected = None
    if cursor.places:
        matched = [num_equal(new_ids, prediction, place) for place in cursor.places]
        best = int(np.argmax(matched))  # the first of the longest: the likeliest
        num_right, place = matched[best], cursor.places[best]
        num_tried = min(num_right + 1, len(new_ids))
        weight = FORGETTING**num_tried
        cursor.rate = weight * cursor.rate + (1 - weight) * num_right / num_tried
        cursor.num_followed += num_right
        if num_right == len(new_ids):
            place += num_right
            cursor.places = [place] if place < len(prediction) else []
            return
        # The place after them, if wrong tokens only replace predicted ones.
        expected = place + len(new_ids)
    _find(cursor, token_ids[num_prompt:], expected)
    cursor.num_followed = 0


def _find(cursor: _Cursor, output: np.ndarray, expected: int | None) -> None:
    """Find the places where the output may go on after it left the prediction, likeliest first."""
    prediction = cursor.prediction
    # Text that repeats itself matches in many places: then the one where it would stand if nothing
    # had been put in or left out.
    found, length = find_end(prediction, output, len(output), LONG_MATCH)
    if length >= LONG_MATCH:
        cursor.rate = max(cursor.rate, FOUND_RATE)
    elif expected is None or cursor.rate < MIN_RATE:
        cursor.places = []
        return
    places = [found]
    if expected is not None:
        # The newest token was exchanged, put in, or the ones before it were left out.
        guesses = [expected, expected - 1, _next_place(prediction, int(output[-1]), expected)]
        was_right = cursor.num_followed >= SHORT_MATCH
        places = [*guesses, found] if was_right or length < SHORT_MATCH else [found, *guesses]
    cursor.places = [p for p in dict.fromkeys(places) if 0 <= p < len(prediction)]


def _next_place(prediction: np.ndarray, token_id: int, start: int) -> int:
    """The place after the next token of this id, if it is near; -1: it is not."""
    near = np.flatnonzero(prediction[start : start + SKIP_TOKENS] == token_id)
    return start + int(near[0]) + 1 if len(near) else -1


def _draft(cursor: _Cursor, max_tokens: int) -> Draft:
    """The prediction from the first place on, with the other places as short branches."""
    if not cursor.places:
        return Draft()
    first, *others = cursor.places
    reach = _reach(cursor.rate)
    room = min(max_tokens, MAX_DRAFTS)
    main = cursor.prediction[first : first + min(reach, room)].tolist()
    token_ids, parents = list(main), list(range(len(main)))
    heads = {main[0]}
    for place in others:
        branch = cursor.prediction[place : place + BRANCH_TOKENS].tolist()
        branch = branch[: room - len(token_ids)]
        if branch and branch[0] not in heads:
            heads.add(branch[0])
            parents += [0, *range(len(token_ids) + 1, len(token_ids) + len(branch))]
            token_ids += branch
    rate = cursor.rate
    score = sum(rate**depth for depth in range(1, len(main) + 1))
    return Draft(tuple(token_ids), tuple(parents), score, cursor.num_followed)


def _reach(rate: float) -> int:
    """Number of tokens with a chance of at least MIN_REACH, each right with chance `rate`."""
    if rate >= 1:
        return MAX_DRAFTS
    return max(1, int(np.log(MIN_REACH) / np.log(rate)))


def num_equal(token_ids: np.ndarray, prediction: np.ndarray, place: int) -> int:
    """Number of tokens in a row that equal the prediction from a place on."""
    count = min(len(token_ids), len(prediction) - place)
    differs = token_ids[:count] != prediction[place : place + count]
    return int(differs.argmax()) if differs.any() else count


def find_end(
    prediction: np.ndarray, output: np.ndarray, expected: int, max_match: int
) -> tuple[int, int]:
    """The place after the longest match of the output's end, and the length of the match.

    Only places that something follows count. Matches are compared up to `max_match` tokens; if
    several are the longest, the one nearest to the expected place wins, the first of two as near.
    The result is (-1, 0) if the newest token does not occur in the prediction.
    """
    places, length = np.arange(1, len(prediction)), 0
    while length < min(max_match, len(output)):
        more = places[places > length]
        more = more[prediction[more - 1 - length] == output[-1 - length]]
        if len(more) == 0:
            break
        places, length = more, length + 1
    if length == 0:
        return -1, 0
    return int(places[np.abs(places - expected).argmin()]), length
