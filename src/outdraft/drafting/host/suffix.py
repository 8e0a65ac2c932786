"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975): repeat what usually followed.

The newest tokens of a request are looked up in its own text and in the texts of finished requests.
The most frequent continuations are drafted; a longer match gives a longer draft. Agents, editors
and pipelines send similar requests again and again: they accept such drafts by the dozen, and
finding one takes microseconds.

Dimension key: T tokens.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from outdraft.config.speculation import SuffixConfig
from outdraft.core.draft import Draft, DraftAsk, DraftSource
from outdraft.drafting.host.best_first import DraftRoom
from outdraft.drafting.host.live_texts import LiveTexts
from outdraft.drafting.host.suffix_automaton import SuffixAutomaton
from outdraft.drafting.host.suffix_draft import Rule, draft_all
from outdraft.drafting.host.suffix_tree import SuffixTree, compile_kernels

MAX_CACHED_TOKENS = 2_000_000  # of finished requests: at most some 200 MB

# A finished text is learned a few tokens at a time, some microseconds each: a long text at once
# would delay every request. When many tokens wait, more of them are learned at each call.
LEARNED_PER_CALL = 256
LEARNED_SHARE = 64


class SuffixProposer:
    """Drafts from one automaton per live request and one tree of finished ones.

    The draft with the better score is taken; if both are equal, the request's own. A score is the
    sum of the probabilities of all rows: the expected number of accepted tokens. A draft holds
    the most probable rows, with at most `branching` children each. A branch replaces less probable
    rows, so a draft branches only where that pays.

    Finished texts are learned in order, some tokens at each call of `propose`. Drafts use what has
    been counted so far. The texts that wait, and those that are learned, are at most
    suffix_decoding_max_cached_requests texts and max_cached_tokens tokens each; the oldest are
    dropped first.
    """

    source = DraftSource.SUFFIX

    def __init__(self, config: SuffixConfig, max_cached_tokens: int = MAX_CACHED_TOKENS) -> None:
        self._config = config
        self._max_cached_tokens = max_cached_tokens
        self._rule = Rule(
            config.suffix_decoding_max_tree_depth,
            float(config.suffix_decoding_max_spec_factor),
            float(config.suffix_decoding_min_token_prob),
        )
        self._room = DraftRoom()
        self._texts = LiveTexts(lambda: SuffixAutomaton(config.branching))
        self._finished = SuffixTree(config.suffix_decoding_max_tree_depth, config.branching)
        self._waiting: deque[np.ndarray] = deque()  # finished, not in the tree yet
        self._num_waiting = 0  # their tokens
        compile_kernels()

    @property
    def num_to_learn(self) -> int:
        """Tokens of finished requests that are still to be learned."""
        return self._num_waiting + self._finished.num_coming

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """One draft per ask; see HostProposer."""
        num_to_learn = self.num_to_learn
        if num_to_learn > 0:
            self._learn(max(LEARNED_PER_CALL, num_to_learn // LEARNED_SHARE))
        if len(asks) == 0:
            return []
        room = self._room
        room.reserve(len(asks))
        texts = self._texts.batch(asks)
        arrays = self._finished.arrays
        num_places = draft_all(*texts, *self._rule, *arrays, room.drafts_F, room.scores_B)
        return room.to_drafts(len(asks), num_places)

    def finish(self, request_id: str, token_ids: np.ndarray | None) -> None:
        """Forget the request; its text is learned during later calls.

        A text of more than max_cached_tokens is not learned.
        """
        self._texts.finish(request_id)
        max_requests = self._config.suffix_decoding_max_cached_requests
        if token_ids is None or max_requests == 0:
            return
        if not 0 < len(token_ids) <= self._max_cached_tokens:
            return
        while len(self._waiting) >= max_requests or (
            self._num_waiting + len(token_ids) > self._max_cached_tokens
        ):
            self._num_waiting -= len(self._waiting.popleft())  # newer ones would drive it out
        self._waiting.append(token_ids.copy())
        self._num_waiting += len(token_ids)

    def _learn(self, budget: int) -> None:
        """Learn more of the oldest waiting text; removing a token takes as long as adding one."""
        max_requests = self._config.suffix_decoding_max_cached_requests
        while budget > 0 and self.num_to_learn > 0:
            if self._finished.num_coming > 0:
                budget -= self._finished.count(budget)
                continue
            is_full = len(self._finished) >= max_requests or (
                self._finished.num_tokens + len(self._waiting[0]) > self._max_cached_tokens
            )
            if is_full:
                budget -= self._finished.remove_oldest(budget)
            else:
                text = self._waiting.popleft()
                self._num_waiting -= len(text)
                self._finished.add(text)
