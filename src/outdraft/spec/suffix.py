"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975): repeat what usually followed.

The newest tokens of a request are looked up in its own text and in the texts of finished requests;
the most frequent continuation is drafted, the further the longer the match. Agents, editors and
pipelines that ask similar things again and again accept such drafts by the dozen; finding one costs
microseconds.

Dimension key: T tokens, B requests, D max_tree_depth - 1, K drafted tokens.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from outdraft.config.speculation import SuffixConfig
from outdraft.core.draft import MAX_DRAFTS, Draft, DraftAsk, DraftSource
from outdraft.spec.suffix_automaton import SuffixAutomaton
from outdraft.spec.suffix_tree import SuffixTree

_Guess = tuple[list[int], float]  # a chain and its score

MAX_CACHED_TOKENS = 2_000_000  # of finished requests: at most some 200 MB

# A finished text is learned a few tokens at a time, some microseconds each, or a long one would
# hold up every request. The share of what is waiting keeps pace with requests that end faster.
LEARNED_PER_CALL = 256
LEARNED_SHARE = 64


class SuffixProposer:
    """Drafts from one automaton per live request and one tree of finished ones.

    The draft of the better score is taken, the request's own one among equals. A score is the sum
    of the probabilities along the draft: the expected number of accepted tokens.

    Finished texts are taken up in order, at each call of `propose` a bounded number of tokens; what
    is counted already is drafted from. Those waiting, and those learned, are at most
    suffix_decoding_max_cached_requests texts and max_cached_tokens tokens each; the oldest go.
    """

    source = DraftSource.SUFFIX

    def __init__(self, config: SuffixConfig, max_cached_tokens: int = MAX_CACHED_TOKENS) -> None:
        self._config = config
        self._max_cached_tokens = max_cached_tokens
        self._texts: dict[str, _LiveText] = {}
        self._finished = SuffixTree(config.suffix_decoding_max_tree_depth)
        self._waiting: deque[np.ndarray] = deque()  # finished, not in the tree yet
        self._num_waiting = 0  # their tokens

    @property
    def num_to_learn(self) -> int:
        """Tokens of finished requests that are still to be learned."""
        return self._num_waiting + self._finished.num_coming

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """One draft per ask; see HostProposer."""
        self._learn(max(LEARNED_PER_CALL, self.num_to_learn // LEARNED_SHARE))
        guesses = [self._from_own_text(ask) for ask in asks]
        if len(self._finished) > 0:
            pairs = zip(guesses, self._from_finished(asks), strict=True)
            guesses = [other if other[1] > own[1] else own for own, other in pairs]
        return [Draft.chain(token_ids, score) for token_ids, score in guesses]

    def finish(self, request_id: str, token_ids: np.ndarray | None) -> None:
        """Forget the request; its text is learned by and by.

        A text of more than max_cached_tokens is not learned.
        """
        self._texts.pop(request_id, None)
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
        """Go on with the oldest text that waits; removing a token costs as much as adding one."""
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

    def _from_own_text(self, ask: DraftAsk) -> _Guess:
        text = self._texts.get(ask.request_id)
        if text is None or not text.is_continued_by(ask.token_ids):
            text = _LiveText(self._config.suffix_decoding_max_tree_depth)
            self._texts[ask.request_id] = text
        text.read(ask.token_ids)
        return text.automaton.draft(
            ask.max_tokens,
            self._config.suffix_decoding_max_spec_factor,
            self._config.suffix_decoding_min_token_prob,
        )

    def _from_finished(self, asks: Sequence[DraftAsk]) -> list[_Guess]:
        depth = self._config.suffix_decoding_max_tree_depth
        contexts_BD = np.zeros((len(asks), depth - 1), np.int32)
        context_lens_B = np.zeros(len(asks), np.int64)
        max_tokens_B = np.zeros(len(asks), np.int64)
        for row, ask in enumerate(asks):
            context = ask.token_ids[-(depth - 1) :]
            contexts_BD[row, : len(context)] = context
            context_lens_B[row] = len(context)
            max_tokens_B[row] = min(ask.max_tokens, MAX_DRAFTS)
        drafts_BK, lengths_B, scores_B = self._finished.drafts(
            contexts_BD,
            context_lens_B,
            max_tokens_B,
            self._config.suffix_decoding_max_spec_factor,
            self._config.suffix_decoding_min_token_prob,
        )
        return [
            (drafts_BK[row, :length].tolist(), score)
            for row, (length, score) in enumerate(
                zip(lengths_B.tolist(), scores_B.tolist(), strict=True)
            )
        ]


class _LiveText:
    """One request's automaton."""

    def __init__(self, max_depth: int) -> None:
        self.automaton = SuffixAutomaton(max_depth)
        self._newest_token = -1

    def is_continued_by(self, token_ids_T: np.ndarray) -> bool:
        """Whether this text can be the one that was read, grown (judged by one token)."""
        read = len(self.automaton)
        if read == 0:
            return True
        return read <= len(token_ids_T) and token_ids_T[read - 1] == self._newest_token

    def read(self, token_ids_T: np.ndarray) -> None:
        """Continue with the tokens that are new."""
        if len(token_ids_T) > len(self.automaton):
            self.automaton.append(token_ids_T[len(self.automaton) :])
            self._newest_token = int(token_ids_T[-1])
