"""Prompt lookup: drafts the continuation of an earlier place that equals the text's end.

It looks for the largest n in [prompt_lookup_min, prompt_lookup_max] such that the last n tokens
have occurred before. It drafts what followed their newest `branching` occurrences. Where these
continue alike, that is one chain; where they differ, branches. With a `branching` of 1 the draft is
a copy from the newest place. (Saxena 2023, "prompt lookup decoding".)
"""

from collections.abc import Sequence

import numpy as np

from outdraft.config.speculation import NgramConfig
from outdraft.core.draft import Draft, DraftAsk, DraftSource
from outdraft.kernels.ops import Kernels


class NgramProposer:
    """Drafts by prompt lookup; see `NgramTexts` of kernels/ops.py."""

    source = DraftSource.NGRAM

    def __init__(self, config: NgramConfig, kernels: Kernels) -> None:
        self._texts = kernels.ngram_texts(
            config.prompt_lookup_min, config.prompt_lookup_max, config.branching
        )

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """One draft per ask; see HostProposer."""
        return self._texts.draft(asks)

    def finish(self, request_id: str, token_ids: np.ndarray | None) -> None:
        """Forget the request; nothing is learned from its text."""
        self._texts.forget(request_id)
