"""Turns token ids into text, one token at a time, and finds stop strings in it."""

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders

MAX_CHARACTER_BYTES = 4
_Utf8Decoder = getincrementaldecoder("utf-8")
REPLACEMENT = "\ufffd"  # shown for bytes that are no character
BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's tokens for single bytes
_HIDDEN = (*range(33), *range(127, 161), 173)  # written as the characters from 256 on
# The byte that each character of byte-level BPE stands for (GPT-2's table).
BYTE_OF = {chr(byte): byte for byte in range(256) if byte not in _HIDDEN} | {
    chr(256 + place): byte for place, byte in enumerate(_HIDDEN)
}


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes of a token at the start of a text; of a special one the bytes of its name.

    Unlike the tokenizer's decoded text, they are right for parts of characters, too.
    """
    name = tokenizer.id_to_token(token_id)
    if name is None:
        return b""
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    part = _part(name, text)
    return text.encode() if part is None else part


class Detokenizer:
    """The text of one output: that of prompt and output together, less the prompt's.

    Bytes that may become a character wait for the next token; those that cannot are replaced at
    once. A character that the prompt only begins belongs to the output.
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
        self._stop_strings = tuple(stop_strings)
        self._include_stop_string = include_stop_string
        self._pieces = TokenPieces(tokenizer, skip_special_tokens=skip_special_tokens)
        self._bytes = _Utf8Decoder("replace")
        self._stop: tuple[int, str] | None = None  # found by the newest token, and where
        for token_id in prompt_ids[_last_character(tokenizer, prompt_ids, skip_special_tokens) :]:
            self._bytes.decode(self._pieces.push(token_id))

    @property
    def settled_text(self) -> str:
        """The part that no later token can take back: no stop string may begin in it."""
        kept = max((overlap(self.text, stop) for stop in self._stop_strings), default=0)
        end = len(self.text) - kept
        return self.text[: min(end, self._stop[0]) if self._stop is not None else end]

    def push(self, token_id: int) -> str | None:
        """Append a token; return the stop string that it completes, the leftmost of several."""
        self._stop = None
        piece = self._bytes.decode(self._pieces.push(token_id))
        if not piece:
            return None
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
        """End the text: incomplete bytes become replacement characters.

        `at_stop_string`: cut the text at the stop string that `push` found last.
        (A stop string may also have been found too early to count: see min_tokens.)
        """
        if at_stop_string and self._stop is not None:
            at, stop = self._stop
            self.text = self.text[: at + len(stop) if self._include_stop_string else at]
            return
        self._stop = None
        self.text += self._bytes.decode(b"", final=True)


def begun_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of a prompt, its special tokens included, without a character that it only begins.

    The text of a Detokenizer with that prompt follows it.
    """
    pieces = TokenPieces(tokenizer, skip_special_tokens=False)
    places = range(len(token_ids), 0, -1)
    start = next((end for end in places if pieces.is_whole(token_ids[end - 1])), 0)
    rest = Detokenizer(tokenizer, (), prompt_ids=token_ids[:start], skip_special_tokens=False)
    for token_id in token_ids[start:]:
        rest.push(token_id)
    return tokenizer.decode(token_ids[:start], skip_special_tokens=False) + rest.text


def _last_character(tokenizer: Tokenizer, token_ids: Sequence[int], skips_special: bool) -> int:
    """The token from which on the end of a text must be read to decode the text after it."""
    pieces = TokenPieces(tokenizer, skip_special_tokens=skips_special)
    num_bytes, start = 0, len(token_ids)
    while start > 0 and num_bytes < MAX_CHARACTER_BYTES:  # pieces have some length in any order
        start -= 1
        num_bytes += len(pieces.push(token_ids[start]))
    return start


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, short of all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class TokenPieces:
    """The pieces of one text, token after token.

    A piece may depend on the token before it: most decoders leave out the blank with which a text
    begins. No decoder looks further back, so this class does not either.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._looks_back = not isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._last: tuple[int, str] | None = None  # the newest token that is not skipped, its text

    def is_whole(self, token_id: int) -> bool:
        """Return True for a token that is in the text and holds whole characters only."""
        name, text = self._tokenizer.id_to_token(token_id), self._decode(token_id)
        return name is not None and text != "" and _part(name, text) is None

    def push(self, token_id: int) -> bytes:
        """The bytes that the next token adds; none if it is skipped, or stands for no text."""
        name = self._tokenizer.id_to_token(token_id)
        if name is None:
            return b""
        text = self._decode(token_id)
        if text == "" and self._tokenizer.decode([token_id], skip_special_tokens=False):
            return b""
        last, self._last = self._last, (token_id, text)
        part = _part(name, text)
        if part is not None:
            return part
        if last is None or not self._looks_back:
            return text.encode()
        return self._decode(last[0], token_id)[len(last[1]) :].encode()

    def _decode(self, *token_ids: int) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special)


def _part(name: str, text: str) -> bytes | None:
    """The bytes of a token that may be a part of a character; `text`: what it is decoded to."""
    byte = BYTE_NAME.fullmatch(name)
    if byte and text != name:
        return bytes([int(byte[1], 16)])
    if REPLACEMENT in text and set(name) <= BYTE_OF.keys():
        return bytes(BYTE_OF[char] for char in name)
    return None
