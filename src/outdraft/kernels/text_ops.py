"""What the table of kernels does with texts: it drafts for a request from what was said before.

Dimension key: T tokens.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from outdraft.core.draft import Draft, DraftAsk


class NgramTexts(Protocol):
    """Drafts from the texts of requests by prompt lookup, and remembers what speeds that up.

    The longest end of a text is looked up that has min_n to max_n tokens and occurred before. Its
    newest `branching` occurrences are merged into a tree. A row's path matches some of them; the
    probability of a token behind it is that of the path, times the share of these occurrences that
    go on with the token, times a. a is the chance that any of the occurrences is right. It is
    measured for each text and match length, as the share of tokens that came true among those that
    were looked up and reached, from one of two at first. The most probable paths are drafted; among
    equals the deepest, then the one with the earlier parent, then the token that follows more
    occurrences, then the newer one.
    """

    def draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """One draft per ask, of at most `max_tokens` and MAX_DRAFTS tokens.

        A text that cannot be the one before of its request, grown, starts anew: that is judged by
        its length and by the token where the one before ended. The score is the sum of the
        probabilities of all rows, which is the expected number of accepted tokens. The match length
        is that of the end that was looked up; of ends that occurred at the same places, the
        longest. Token ids are contiguous; a new token costs the same however long the text is.
        """
        ...

    def forget(self, request_id: str) -> None:
        """Drop what is remembered of a text; unknown ids are fine."""
        ...


class SuffixTexts(NgramTexts, Protocol):
    """Drafts what usually followed, in a request's own text and in texts of finished requests.

    For each end of the text of less than max_depth tokens that has occurred, a tree of its
    continuations is grown, as deep as max_spec_factor times the length of that end, and as
    max_depth allows for both together. A row's probability is the product of count(string + token)
    / count(string) along its path, and at least min_token_prob. A string is followed by its
    `branching` most frequent continuations, the latest first among equals. The tree with the
    largest sum of probabilities is drafted, of equals that of the longest end. Finished texts count
    all together, and the text that is drafted for as one occurrence more, without continuation.
    They are taken if their sum is larger than that of the own text.

    Finished texts come and go in order, some tokens at a time, so that no call takes long: a string
    counts as often as it starts at a token that is counted. Texts that are counted in part give the
    draft of the largest sum by these counts; its match length may then be that of a shorter end
    which occurred at the same places.
    """

    def add_finished(self, token_ids_T: np.ndarray) -> None:
        """Keep a text, int32 with T >= 1; the one before must be counted whole."""
        ...

    def count_finished(self, max_tokens: int) -> int:
        """Count what starts at the next tokens of the newest text; returns how many these were."""
        ...

    def remove_finished(self, max_tokens: int) -> int:
        """Take back what starts at the next tokens of the oldest text, at last the text itself.

        All texts must be counted whole. Returns how many tokens these were.
        """
        ...
