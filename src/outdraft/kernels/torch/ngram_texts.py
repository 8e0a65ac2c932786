"""Prompt lookup by scanning texts (Saxena 2023, "prompt lookup decoding")."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outdraft.core.draft import MAX_DRAFTS, Draft, DraftAsk
from outdraft.kernels.torch.grown_tree import Path, grow


@dataclass(slots=True)
class _Text:
    """What is remembered of one text.

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
    """Texts of requests, scanned; `text_ops.NgramTexts` says what is drafted.

    It starts without texts. 1 <= min_n <= max_n, 1 <= branching <= MAX_DRAFTS.
    """

    def __init__(self, min_n: int, max_n: int, branching: int) -> None:
        self._min_n, self._max_n, self._branching = min_n, max_n, branching
        self._texts: dict[str, _Text] = {}

    def draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    def _draft(self, ask: DraftAsk) -> Draft:
        tokens: list[int] = ask.token_ids.tolist()
        max_tokens = min(ask.max_tokens, MAX_DRAFTS)
        text = self._texts.get(ask.request_id)
        if text is None or not _continues(text.tokens, tokens):
            text = self._texts[ask.request_id] = _Text()
        _judge(text, tokens[len(text.tokens) :])
        text.tokens = tokens
        self._look_up(text, max_tokens)
        judged = text.history.get(text.match_len, [])
        rate = (1 + sum(judged)) / (2 + len(judged))

        def children(path: Path) -> list[tuple[int, float]]:
            behind = [f for f in text.followers if tuple(f[: len(path)]) == path]
            following = [f[len(path)] for f in behind if len(f) > len(path)]
            most_first = sorted(dict.fromkeys(following), key=lambda t: -following.count(t))
            return [(t, rate * (following.count(t) / len(following))) for t in most_first]

        return replace(grow(children, max_tokens, max_tokens), match_length=text.match_len)

    def _look_up(self, text: _Text, max_tokens: int) -> None:
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


def _judge(text: _Text, truth: list[int]) -> None:
    """Compare what followed the matches with what the text became."""
    for end in range(1, len(truth) + 1):
        right_so_far = [f for f in text.followers if f[: end - 1] == truth[: end - 1]]
        if all(len(f) < end for f in right_so_far):
            break
        is_right = any(f[:end] == truth[:end] for f in right_so_far)
        text.history.setdefault(text.match_len, []).append(is_right)
        if not is_right:
            break


def _continues(old: list[int], tokens: list[int]) -> bool:
    return not old or (len(old) <= len(tokens) and tokens[len(old) - 1] == old[-1])
