"""Prompt lookup: what followed when the text ended like this before?

It looks for the largest n in [prompt_lookup_min, prompt_lookup_max] such that the last n tokens
have occurred before. It drafts what followed their newest `branching` occurrences. Where these
continue alike, that is one chain; where they differ, branches. With a `branching` of 1 the draft is
a copy from the newest place. (Saxena 2023, "prompt lookup decoding".)
"""

from collections.abc import Sequence

import numpy as np

from outdraft.config.speculation import NgramConfig
from outdraft.core.draft import Draft, DraftAsk, DraftSource
from outdraft.drafting.host.best_first import DraftRoom
from outdraft.drafting.host.live_texts import LiveTexts
from outdraft.drafting.host.ngram_index import NgramIndex, step_all


class NgramProposer:
    """Drafts by prompt lookup.

    A row's path matches some of the occurrences. The probability of a token behind it is that of
    the path, times the share of these occurrences that continue with the token, times a. a is the
    chance that any of the occurrences is right. It is measured for each request and match length n,
    as the share of tokens that came true among those that were looked up and reached. A draft holds
    the most probable tokens; its score is the sum of their probabilities, which is the expected
    number of accepted tokens.
    """

    source = DraftSource.NGRAM

    def __init__(self, config: NgramConfig) -> None:
        self._min_n = config.prompt_lookup_min
        self._texts = LiveTexts(
            lambda: NgramIndex(config.prompt_lookup_min, config.prompt_lookup_max, config.branching)
        )
        self._room = DraftRoom()

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """One draft per ask; see HostProposer."""
        if len(asks) == 0:
            return []
        room = self._room
        room.reserve(len(asks))
        texts = self._texts.batch(asks)
        num_places = step_all(*texts, self._min_n, room.drafts_F, room.scores_B)
        return room.to_drafts(len(asks), num_places)

    def finish(self, request_id: str, token_ids: np.ndarray | None) -> None:
        """Forget the request; nothing is learned from its text."""
        self._texts.finish(request_id)
