"""Prompt lookup: what followed when the text ended like this before?

The longest n in [prompt_lookup_min, prompt_lookup_max] whose last n tokens have occurred before
decides. What followed its newest occurrences, as many as `branching` says, is drafted: where they
go on alike, once; where they part, as branches. With a `branching` of 1 that is a copy from the
newest place. (Saxena 2023, "prompt lookup decoding".)
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

    A token that follows the path of some occurrences has the probability of that path, times the
    share of these occurrences that it follows, times a: the chance that one of them all is right.
    a is measured, per request and match length n: of the tokens that were looked up and that the
    text has reached since, the share that came true. Drafts hold the most probable tokens, and the
    score is the sum of their probabilities, the expected number of accepted tokens.
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
