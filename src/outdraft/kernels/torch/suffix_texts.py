"""Suffix decoding by scanning texts (Oliaro et al. 2024, arXiv 2411.04975)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outdraft.core.draft import MAX_DRAFTS, Draft, DraftAsk
from outdraft.kernels.torch.grown_tree import Path, grow


@dataclass(slots=True)
class _Text:
    """A text, of which the strings that start at the tokens [start, stop) are counted."""

    tokens: list[int]
    start: int
    stop: int


class ReferenceSuffixTexts:
    """Texts of requests and finished texts, scanned; `text_ops.SuffixTexts` says what is drafted.

    It starts without texts. max_depth >= 2, max_spec_factor >= 0, 1 <= branching <= MAX_DRAFTS.
    """

    def __init__(
        self, max_depth: int, max_spec_factor: float, min_token_prob: float, branching: int
    ) -> None:
        self._max_depth, self._max_spec_factor = max_depth, max_spec_factor
        self._min_token_prob, self._branching = min_token_prob, branching
        self._finished: list[_Text] = []

    def draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [self._draft(ask.token_ids.tolist(), ask.max_tokens) for ask in asks]

    def forget(self, request_id: str) -> None:
        """Nothing is remembered of a text from step to step."""

    def add_finished(self, token_ids_T: np.ndarray) -> None:
        self._finished.append(_Text(token_ids_T.tolist(), 0, 0))

    def count_finished(self, max_tokens: int) -> int:
        newest = self._finished[-1]
        before = newest.stop
        newest.stop = min(newest.stop + max_tokens, len(newest.tokens))
        return newest.stop - before

    def remove_finished(self, max_tokens: int) -> int:
        oldest = self._finished[0]
        before = oldest.start
        oldest.start = min(oldest.start + max_tokens, oldest.stop)
        if oldest.start == oldest.stop:
            self._finished.pop(0)
        return oldest.start - before

    def _draft(self, context: list[int], max_tokens: int) -> Draft:
        max_tokens = min(max_tokens, MAX_DRAFTS)
        own = self._best(context, [_Text(context, 0, len(context))], 0, max_tokens)
        # The context's own occurrence of a match counts as one more without continuation.
        others = self._best(context, self._finished, 1, max_tokens)
        return others if others.score > own.score else own

    def _best(
        self, context: list[int], texts: list[_Text], num_more: int, max_tokens: int
    ) -> Draft:
        """The draft of the best score over all match lengths; the longest match among equals.

        If several matches occur at the same places, the one that may draft deepest counts.
        """
        best, best_limit = Draft(), 0
        best_ends: list[tuple[int, int]] = []
        for match_len in range(min(len(context), self._max_depth - 1), 0, -1):
            match = context[len(context) - match_len :]

            def children(path: Path, match: list[int] = match) -> list[tuple[int, float]]:
                string = [*match, *path]
                found = _continuations(texts, string)
                most_first = sorted(found, key=lambda t: found[t], reverse=True)[: self._branching]
                seen = len(_ends(texts, string)) + (0 if path else num_more)
                return [(token, found[token][0] / seen) for token in most_first]

            ends = _ends(texts, match)
            by_factor = min(max_tokens, self._max_spec_factor * match_len)
            limit = min(int(by_factor), self._max_depth - match_len)
            draft = grow(children, max_tokens, limit, self._min_token_prob)
            is_deeper = ends == best_ends and limit > best_limit
            if draft.score > best.score or (draft.score == best.score and is_deeper):
                best, best_ends, best_limit = draft, ends, limit
        return replace(best, match_length=_longest(context, texts, best_ends, self._max_depth))


def _longest(
    context: list[int], texts: list[_Text], ends: list[tuple[int, int]], max_depth: int
) -> int:
    """Tokens of the longest end of the context that occurred at these places; 0: at none."""
    lengths = range(1, min(len(context) + 1, max_depth))
    return max((n for n in lengths if ends and _ends(texts, context[-n:]) == ends), default=0)


def _occurrences(text: _Text, string: list[int]) -> list[int]:
    """Where a string starts in a text, as far as that is counted."""
    tokens = text.tokens
    stop = min(text.stop, len(tokens) - len(string) + 1)
    return [i for i in range(text.start, stop) if tokens[i : i + len(string)] == string]


def _ends(texts: list[_Text], string: list[int]) -> list[tuple[int, int]]:
    """Where a string ends: the number of the text and the place behind it, for each occurrence."""
    return [
        (number, start + len(string))
        for number, text in enumerate(texts)
        for start in _occurrences(text, string)
    ]


def _continuations(texts: list[_Text], string: list[int]) -> dict[int, tuple[int, int]]:
    """Token -> (how often it follows the string, its last place in all texts laid end to end)."""
    found: dict[int, tuple[int, int]] = {}
    base = 0
    for text in texts:
        for start in _occurrences(text, string):
            end = start + len(string)
            if end < len(text.tokens):
                token = text.tokens[end]
                count, _ = found.get(token, (0, 0))
                found[token] = (count + 1, base + start)
        base += len(text.tokens)
    return found
