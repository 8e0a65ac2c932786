"""Token ids to text, one token at a time, and the stop strings that are looked for in it."""

from collections.abc import Sequence

from tokenizers import Tokenizer

CONTEXT_TOKENS = 6  # of the prompt: more than a character has bytes
REPLACEMENT = "\ufffd"  # what incomplete bytes decode to


class Detokenizer:
    """The text of one output. Characters whose bytes are incomplete wait for the next token.

    A token is decoded together with the few before it, the prompt's last ones at first: how it
    reads may depend on them (a leading blank, the bytes of one character).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str],
        *,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        include_stop_string: bool = False,
    ) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop_strings = tuple(stop_strings)
        self._include_stop_string = include_stop_string
        self._ids = list(prompt_ids[-CONTEXT_TOKENS:])
        self._context = self._decode(self._ids)  # text of the tokens that are all decoded
        self._num_context = len(self._ids)
        self._stop: tuple[int, str] | None = None  # found by the newest token, and where

    @property
    def settled_text(self) -> str:
        """The part that no later token can take back: no stop string may begin in it."""
        kept = max((overlap(self.text, stop) for stop in self._stop_strings), default=0)
        end = len(self.text) - kept
        return self.text[: min(end, self._stop[0]) if self._stop is not None else end]

    def push(self, token_id: int) -> str | None:
        """Append a token; the stop string that it completes, the leftmost of several."""
        self._stop = None
        self._ids.append(token_id)
        both = self._decode(self._ids)
        piece = both[len(self._context) :]
        if not piece or both.endswith(REPLACEMENT):
            return None
        self._ids = self._ids[self._num_context :]
        self._context = self._decode(self._ids)
        self._num_context = len(self._ids)
        start = len(self.text)
        self.text += piece
        found = [
            (at, stop)
            for stop in self._stop_strings
            if (at := self.text.find(stop, max(0, start - len(stop) + 1))) >= 0
        ]
        self._stop = min(found, default=None)
        return self._stop[1] if self._stop is not None else None

    def finish(self, *, at_stop_string: bool = False) -> None:
        """No token follows: incomplete bytes become replacement characters.

        `at_stop_string`: the stop string that `push` found last is why; the text is cut there.
        (A stop string may also have been found too early to count: see min_tokens.)
        """
        if at_stop_string and self._stop is not None:
            at, stop = self._stop
            self.text = self.text[: at + len(stop) if self._include_stop_string else at]
            return
        self._stop = None
        self.text += self._decode(self._ids)[len(self._context) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, short of all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
