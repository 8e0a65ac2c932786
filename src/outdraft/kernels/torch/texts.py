"""Drafts from texts, by scanning them.

Prompt lookup (Saxena 2023, "prompt lookup decoding") and suffix decoding (Oliaro et al. 2024, arXiv
2411.04975) both draft the most probable paths of a tree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from outdraft.core.draft import MAX_DRAFTS, Draft, DraftAsk

Path = tuple[int, ...]  # the token ids from the root, which is ()


def grow_tree(
    children: Callable[[Path], list[tuple[int, float]]],
    max_rows: int,
    max_depth: int,
    min_prob: float = 0.0,
) -> Draft:
    """Add the most probable path that continues one of the tree, again and again.

    A path's probability is the product along it, and the draft's score is the sum over its paths.
    Among equals the longest path comes first, then the earliest parent's, then the first child. So
    the first K rows are the best tree of K rows, for every K.

    Args:
        children: what may follow a path, and how probable that is, the likeliest first.
        min_prob: of a path.
    """
    paths: list[Path] = [()]
    probs = [1.0]
    parents: list[int] = []
    waiting: list[tuple[float, int, int, int, int]] = []
    while True:
        row = len(parents)
        if len(paths[row]) < max_depth:
            for rank, (token, share) in enumerate(children(paths[row])):
                prob = probs[row] * share
                if prob >= min_prob:
                    waiting.append((prob, len(paths[row]), -row, -rank, token))
        if len(parents) == max_rows or not waiting:
            break
        best = max(waiting)
        waiting.remove(best)
        prob, _, minus_row, _, token = best
        paths.append((*paths[-minus_row], token))
        probs.append(prob)
        parents.append(-minus_row)
    score = 0.0
    for prob in probs[1:]:
        score += prob
    return Draft(tuple(path[-1] for path in paths[1:]), tuple(parents), score)


@dataclass(slots=True)
class _LookedUpText:
    """The memory of one text.

    Attributes:
        followers: what followed each match of the last look-up, the newest first.
        match_len: of that look-up.
        history: by match length, whether each token that was judged came true.
    """

    tokens: list[int] = field(default_factory=list[int])
    followers: list[list[int]] = field(default_factory=list[list[int]])
    match_len: int = 0
    history: dict[int, list[bool]] = field(default_factory=dict[int, list[bool]])


class ReferenceNgramTexts:
    """Texts of requests, scanned; `ops.NgramTexts` says what is drafted.

    It starts without texts. 1 <= min_n <= max_n, 1 <= branching <= MAX_DRAFTS.
    """

    def __init__(self, min_n: int, max_n: int, branching: int) -> None:
        self._min_n, self._max_n, self._branching = min_n, max_n, branching
        self._texts: dict[str, _LookedUpText] = {}

    def draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    def _draft(self, ask: DraftAsk) -> Draft:
        tokens: list[int] = ask.token_ids.tolist()
        max_tokens = min(ask.max_tokens, MAX_DRAFTS)
        text = self._texts.get(ask.request_id)
        old = [] if text is None else text.tokens
        if text is None or (old and tokens[len(old) - 1 : len(old)] != old[-1:]):
            text = self._texts[ask.request_id] = _LookedUpText()
        _judge(text, tokens[len(text.tokens) :])
        text.tokens = tokens
        self._look_up(text, max_tokens)
        judged = text.history.get(text.match_len, [])
        rate = (1 + sum(judged)) / (2 + len(judged))

        def children(path: Path) -> list[tuple[int, float]]:
            fitting = [f for f in text.followers if tuple(f[: len(path)]) == path]
            following = [f[len(path)] for f in fitting if len(f) > len(path)]
            most_first = sorted(dict.fromkeys(following), key=lambda t: -following.count(t))
            return [(t, rate * (following.count(t) / len(following))) for t in most_first]

        return replace(grow_tree(children, max_tokens, max_tokens), match_length=text.match_len)

    def _look_up(self, text: _LookedUpText, max_tokens: int) -> None:
        tokens = text.tokens
        for n in range(self._max_n, self._min_n - 1, -1):
            ends = range(len(tokens) - 1, n - 1, -1)
            suffix = tokens[len(tokens) - n :]
            matches = [end for end in ends if tokens[end - n : end] == suffix]
            if matches:
                newest = matches[: self._branching]
                text.followers = [tokens[end : end + max_tokens] for end in newest]
                text.match_len = n
                return
        text.followers, text.match_len = [], 0


def _judge(text: _LookedUpText, truth: list[int]) -> None:
    """Compare what followed the matches with what the text became."""
    for end in range(1, len(truth) + 1):
        right_so_far = [f for f in text.followers if f[: end - 1] == truth[: end - 1]]
        if all(len(f) < end for f in right_so_far):
            break
        is_right = any(f[:end] == truth[:end] for f in right_so_far)
        text.history.setdefault(text.match_len, []).append(is_right)
        if not is_right:
            break


@dataclass(slots=True)
class _CountedText:
    """A text, of which the strings that start at the tokens [start, stop) are counted."""

    tokens: list[int]
    start: int
    stop: int


class ReferenceSuffixTexts:
    """Texts of requests and finished texts, scanned; `ops.SuffixTexts` says what is drafted.

    It starts without texts. max_depth >= 2, max_spec_factor >= 0, 1 <= branching <= MAX_DRAFTS.
    """

    def __init__(
        self, max_depth: int, max_spec_factor: float, min_token_prob: float, branching: int
    ) -> None:
        self._max_depth, self._max_spec_factor = max_depth, max_spec_factor
        self._min_token_prob, self._branching = min_token_prob, branching
        self._finished: list[_CountedText] = []

    def draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [self._draft(ask.token_ids.tolist(), ask.max_tokens) for ask in asks]

    def forget(self, request_id: str) -> None:
        """Nothing is remembered of a text from step to step."""

    def add_finished(self, token_ids_T: np.ndarray) -> None:
        self._finished.append(_CountedText(token_ids_T.tolist(), 0, 0))

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
        own = self._best(context, [_CountedText(context, 0, len(context))], 0, max_tokens)
        # The context's own occurrence of a match counts as one more without continuation.
        others = self._best(context, self._finished, 1, max_tokens)
        return others if others.score > own.score else own

    def _best(
        self, context: list[int], texts: list[_CountedText], num_more: int, max_tokens: int
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
            draft = grow_tree(children, max_tokens, limit, self._min_token_prob)
            is_deeper = ends == best_ends and limit > best_limit
            if draft.score > best.score or (draft.score == best.score and is_deeper):
                best, best_ends, best_limit = draft, ends, limit
        return replace(best, match_length=_longest(context, texts, best_ends, self._max_depth))


def _longest(
    context: list[int], texts: list[_CountedText], ends: list[tuple[int, int]], max_depth: int
) -> int:
    """Tokens of the longest end of the context that occurred at these places; 0: at none."""
    lengths = range(1, min(len(context) + 1, max_depth))
    return max((n for n in lengths if ends and _ends(texts, context[-n:]) == ends), default=0)


def _occurrences(text: _CountedText, string: list[int]) -> list[int]:
    """Places where a string starts in a text, as far as that is counted."""
    tokens = text.tokens
    stop = min(text.stop, len(tokens) - len(string) + 1)
    return [i for i in range(text.start, stop) if tokens[i : i + len(string)] == string]


def _ends(texts: list[_CountedText], string: list[int]) -> list[tuple[int, int]]:
    """The number of the text and the place after the string, for each occurrence."""
    return [
        (number, start + len(string))
        for number, text in enumerate(texts)
        for start in _occurrences(text, string)
    ]


def _continuations(texts: list[_CountedText], string: list[int]) -> dict[int, tuple[int, int]]:
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
