"""Bytes that each token adds to a text: many tokens are parts of characters."""

import re
from types import MappingProxyType

from tokenizers import Tokenizer, decoders

REPLACEMENT = "\ufffd"  # shown for bytes that are no character


BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's tokens for single bytes


def _byte_alphabet() -> dict[str, int]:
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(256 + place): byte for place, byte in enumerate(hidden)
    }


# The byte that each character of byte-level BPE stands for (GPT-2's table).
BYTE_OF = MappingProxyType(_byte_alphabet())


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
