"""One call in what a model writes, read as its text streams: an object in JSON.

Its name comes first, then its arguments piece by piece, as the model writes them. Once they have
begun the object is a call, even if it is cut short or they turn out to be no JSON.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CallName:
    """A call begins."""

    text: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments, in JSON, of the call that began last."""

    text: str


Piece = str | CallName | CallArguments


_NAME = r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*'
_ARGUMENTS = r',\s*"(?:arguments|parameters)"\s*:\s*'
_NAMED = re.compile(_NAME + r"(?=[,}])", re.DOTALL)
_BEGUN = re.compile(_NAME + _ARGUMENTS + r"(?=\S)", re.DOTALL)
_BEGUN_OBJECT = re.compile(_NAME + _ARGUMENTS + r"(?=\{)", re.DOTALL)
_OTHER_KEY = re.compile(r'\{\s*+(?!"name"|(?:"(?:n(?:a(?:me?)?)?)?)?\Z)')
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_OUTSIDE_STRINGS = re.compile(r"[\s:\w.+\-]")  # beside brackets and commas


class CallReader:
    """Reads one object from its brace on, and finds out if it is a call.

    Attributes:
        text: all of the input.
        end: where the object ends in it; None: further on.
        is_call: a piece with its name was returned.
        is_none: it is no call, or not one of the known functions'.
    """

    def __init__(self, names: Sequence[str] | None = None, *, is_forced: bool = False) -> None:
        """
        Args:
            names: functions that may be called; None: any. With names, the name comes first.
            is_forced: it can be nothing but a call, whose name is returned as soon as it is there.
        """
        self.text = ""
        self.end: int | None = None
        self.is_call = self.is_none = False
        self._names = names
        self._is_forced = is_forced
        self._seen = 0  # characters that were looked at
        self._depth = 0  # of brackets there
        self._is_in_string = False
        self._start: int | None = None  # of the arguments
        self._returned = 0  # end of the part of them that was returned
        self._arguments_end: int | None = None

    def push(self, text: str) -> list[Piece]:
        """Read on; the pieces that no later text can change."""
        self.text += text
        pieces: list[Piece] = []
        self._find_arguments(pieces)
        self._look_on()
        if self.end is not None and not self.is_none:
            self._end_object(pieces)
        self._tell_arguments(pieces, self._seen)
        return pieces

    def finish(self) -> list[Piece]:
        """End the text; the rest of the arguments."""
        pieces: list[Piece] = []
        self._tell_arguments(pieces, len(self.text), is_last=True)
        return pieces

    def _find_arguments(self, pieces: list[Piece]) -> None:
        if self._start is not None or self.is_none:
            return
        found = (_BEGUN if self._is_forced else _BEGUN_OBJECT).match(self.text)
        named = _NAMED.match(self.text) if self._is_forced and found is None else found
        if named is not None and not self.is_call:
            self._name(pieces, _name_of(named[1]))
        if found is not None and self.is_call:
            self._start = self._returned = found.end()
        elif self._names is not None and _OTHER_KEY.match(self.text):
            self.is_none = True

    def _name(self, pieces: list[Piece], name: object) -> None:
        if isinstance(name, str) and (self._names is None or name in self._names):
            pieces.append(CallName(name))
            self.is_call = True
        else:
            self.is_none = True

    def _look_on(self) -> None:
        """Find the end of the arguments, and of the object."""
        text = self.text
        while self.end is None and not self.is_none and self._seen < len(text):
            if self._is_in_string:
                match = _IN_STRING.match(text, self._seen)
                assert match is not None
                self._seen = match.end()
                if text[self._seen : self._seen + 1] != '"':
                    return  # its end, or a backslash and what it stands before, are still to come
                self._is_in_string = False
            else:
                self._look_at(text[self._seen])
            self._seen += self.end is None

    def _look_at(self, character: str) -> None:
        """One that stands outside of strings."""
        if character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}],":
            if self._depth == 1 and self._start is not None and self._start < self._seen:
                self._arguments_end = self._arguments_end or self._seen
            self._depth -= character != ","
            if self._depth == 0:
                self._seen += 1
                self.end = self._seen
        elif self.is_call and character in "<`":  # of a mark: brackets are missing
            self.end = self._seen
        elif not self.is_call and not _OUTSIDE_STRINGS.match(character):
            self.is_none = not self._is_forced

    def _end_object(self, pieces: list[Piece]) -> None:
        """The object is whole: a call whose arguments do not come right after the name, or none."""
        if self._start is not None:
            return
        try:
            call = _call(json.loads(self.text[: self.end]))
        except (ValueError, RecursionError):
            call = None
        if call is None:
            self.is_none = not self.is_call
            return
        if not self.is_call:
            self._name(pieces, call[0])
        if self.is_call and call[1]:
            pieces.append(CallArguments(call[1]))

    def _tell_arguments(self, pieces: list[Piece], end: int, *, is_last: bool = False) -> None:
        if self._start is None:
            return
        if self._arguments_end is not None:
            end = self._arguments_end
        piece = self.text[self._returned : end]
        if not (is_last and self._is_in_string):  # else blanks that may stand after the arguments
            piece = piece.rstrip()
        if piece:
            pieces.append(CallArguments(piece))
            self._returned += len(piece)


def _name_of(notation: str) -> object:
    try:
        return json.loads(notation)
    except ValueError:
        return None


def _call(value: Any) -> tuple[str, str] | None:
    """Name and arguments of a call; the arguments may be missing, null, or JSON as text."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    name, arguments = value["name"], value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        return name, arguments
    if not isinstance(arguments, dict | None):
        return None
    return name, _dumps(arguments or {})


def _dumps(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, written as an escape
        return json.dumps(value)
    return text
