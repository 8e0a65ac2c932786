"""Loops over a prediction, compiled."""

import numpy as np

from outdraft.core.jit import njit


@njit(cache=True)
def num_equal(token_ids: np.ndarray, prediction: np.ndarray, place: int) -> int:
    """How many tokens in a row are those of the prediction from a place on."""
    count = 0
    while (
        count < len(token_ids)
        and place + count < len(prediction)
        and token_ids[count] == prediction[place + count]
    ):
        count += 1
    return count


@njit(cache=True)
def find_end(
    prediction: np.ndarray, output: np.ndarray, expected: int, max_match: int
) -> tuple[int, int]:
    """The place behind the longest match of the output's end, and the length of the match.

    Only places that something follows count. Matches are compared up to `max_match` tokens; if
    several are the longest, the one nearest to the expected place wins. The result is (-1, 0) if
    the newest token does not occur in the prediction.
    """
    found, longest = -1, 0
    for place in range(1, len(prediction)):
        length = 0
        while (
            length < max_match
            and length < place
            and length < len(output)
            and prediction[place - 1 - length] == output[len(output) - 1 - length]
        ):
            length += 1
        is_nearer = abs(place - expected) < abs(found - expected)
        if length > longest or (length == longest and length > 0 and is_nearer):
            found, longest = place, length
    return found, longest
