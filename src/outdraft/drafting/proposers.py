"""Proposers on the host: prompt lookup and suffix decoding.

Prompt lookup (Saxena 2023) drafts the continuation of an earlier place that equals the text's end.
It looks for the largest n in [prompt_lookup_min, prompt_lookup_max] such that the last n tokens
have occurred before. It drafts what followed their newest `branching` occurrences. Where these
continue alike, that is one chain; where they differ, branches. With a `branching` of 1 the draft is
a copy from the newest place.

Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975) repeats the usual continuation. The newest
tokens of a request are looked up in its own text and in the texts of finished requests. The most
frequent continuations are drafted; a longer match gives a longer draft. Agents, editors and
pipelines send similar requests again and again: they accept such drafts by the dozen, and finding
one takes microseconds.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from outdraft.config.speculation import NgramConfig, SuffixConfig
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


MAX_CACHED_TOKENS = 2_000_000  # of finished requests: at most some 300 MB

# A finished text is learned a few tokens at a time, some microseconds each: a long text at once
# would delay every request. When many tokens wait, more of them are learned at each call.
LEARNED_PER_CALL = 256
LEARNED_SHARE = 64


class SuffixProposer:
    """Drafts from own and finished texts; see `SuffixTexts` of kernels/ops.py.

    Finished texts are learned in order, some tokens at each call of `propose`. Drafts use what has
    been learned. At most suffix_decoding_max_cached_requests texts and max_cached_tokens tokens
    wait, and at most as many are learned; the oldest are dropped first.
    """

    source = DraftSource.SUFFIX

    def __init__(
        self, config: SuffixConfig, kernels: Kernels, max_cached_tokens: int = MAX_CACHED_TOKENS
    ) -> None:
        self._max_requests = config.suffix_decoding_max_cached_requests
        self._max_cached_tokens = max_cached_tokens
        self._texts = kernels.suffix_texts(
            config.suffix_decoding_max_tree_depth,
            float(config.suffix_decoding_max_spec_factor),
            float(config.suffix_decoding_min_token_prob),
            config.branching,
        )
        self._waiting: deque[np.ndarray] = deque()  # finished, nothing of them is learned yet
        self._num_waiting = 0  # their tokens
        self._learned: deque[int] = deque()  # tokens of each text that is learned, the oldest first
        self._num_coming = 0  # tokens of the newest of them that are still to be learned
        self._num_removed = 0  # tokens of the oldest of them that are taken back

    @property
    def num_to_learn(self) -> int:
        """Tokens of finished requests that are still to be learned."""
        return self._num_waiting + self._num_coming

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the finished requests that are learned, wholly or in part."""
        return sum(self._learned)

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """One draft per ask; see HostProposer."""
        num_to_learn = self.num_to_learn
        if num_to_learn > 0:
            self._learn(max(LEARNED_PER_CALL, num_to_learn // LEARNED_SHARE))
        return self._texts.draft(asks)

    def finish(self, request_id: str, token_ids: np.ndarray | None) -> None:
        """Forget the request; its text is learned during later calls.

        A text of more than max_cached_tokens is not learned.
        """
        self._texts.forget(request_id)
        if token_ids is None or self._max_requests == 0:
            return
        if not 0 < len(token_ids) <= self._max_cached_tokens:
            return
        while len(self._waiting) >= self._max_requests or (
            self._num_waiting + len(token_ids) > self._max_cached_tokens
        ):
            self._num_waiting -= len(self._waiting.popleft())  # newer ones would drive it out
        self._waiting.append(token_ids.copy())
        self._num_waiting += len(token_ids)

    def _learn(self, budget: int) -> None:
        """Learn more of the oldest waiting text; removing a token takes as long as adding one."""
        while budget > 0 and self.num_to_learn > 0:
            if self._num_coming > 0:
                counted = self._texts.count_finished(budget)
                self._num_coming -= counted
                budget -= counted
            elif self._has_room(len(self._waiting[0])):
                text = self._waiting.popleft()
                self._num_waiting -= len(text)
                self._num_coming = len(text)
                self._learned.append(len(text))
                self._texts.add_finished(text)
            else:
                removed = self._texts.remove_finished(budget)
                self._num_removed += removed
                budget -= removed
                if self._num_removed == self._learned[0]:
                    self._learned.popleft()
                    self._num_removed = 0

    def _has_room(self, num_tokens: int) -> bool:
        return (
            len(self._learned) < self._max_requests
            and self.num_cached_tokens + num_tokens <= self._max_cached_tokens
        )
