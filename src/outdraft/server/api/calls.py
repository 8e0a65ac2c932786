"""Calls in what a model writes, found as its text streams.

A call is an object in JSON: {"name": ..., "arguments": {...}}. Its name comes first, then its
arguments piece by piece, as the model writes them. Once they have begun the object is a call, even
if it is cut short or they turn out to be no JSON.

Models differ in what they write around calls. A parser gives back text and calls. However its input
is cut into pieces, the text, the names and the arguments add up to the same. What looks like a call
and is none remains text.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outdraft.text.detokenizer import overlap


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


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A whole call; `arguments` is JSON, as text."""

    name: str
    arguments: str


def whole_calls(pieces: Iterable[object]) -> list[ParsedCall]:
    """The calls among an answer's pieces."""
    calls: list[ParsedCall] = []
    for piece in pieces:
        if isinstance(piece, CallName):
            calls.append(ParsedCall(piece.text, ""))
        elif isinstance(piece, CallArguments):
            calls[-1] = ParsedCall(calls[-1].name, calls[-1].arguments + piece.text)
    return calls


@dataclass(frozen=True, slots=True)
class CallMarks:
    """The text that a model writes around its calls.

    Attributes:
        begin: texts after which a call may stand.
        end: texts that may follow it, and then belong to the format.
        lead: regular expression of what may stand between the first and the call.
        joints: of what may stand between two calls.
        may_begin_answer: a call may stand at the beginning of the answer without such a text.
    """

    begin: tuple[str, ...]
    end: tuple[str, ...]
    lead: str = r"\s*"
    joints: str = r"\s*"
    may_begin_answer: bool = False


MARKS = {
    "hermes": CallMarks(("<tool_call>",), ("</tool_call>",)),
    "llama3_json": CallMarks(("<|python_tag|>",), (), joints=r"[\s;]*", may_begin_answer=True),
    # Qwen2.5-Coder is asked for Hermes' tags. It writes fences, lists in fences, the tags that its
    # prompt has around the tools, or nothing at all.
    "qwen2_5_coder": CallMarks(
        ("<tool_call>", "<tools>", "```"),
        ("</tool_call>", "</tools>", "```"),
        lead=r"(?:(?<=```)\w*)?\s*\[?\s*",
        joints=r"[\s,;\]]*",
        may_begin_answer=True,
    ),
}
_BLANKS_OR_LIST = re.compile(r"[\s,\[\]]*")


class CallFinder:
    """Finds calls where a model may write them, and text around them."""

    def __init__(self, marks: CallMarks, names: Sequence[str] | None = None) -> None:
        """`names`: functions that may be called; None: any."""
        self._marks, self._names = marks, names
        self._lead, self._joints = re.compile(marks.lead), re.compile(marks.joints)
        self._held = ""  # from where a call or a mark may begin on
        self._searched = 0  # characters of it in which no mark begins
        # Number of its characters after which a call may stand; None: it may not.
        self._opened = 0 if marks.may_begin_answer else None
        self._reader: CallReader | None = None
        self._is_after_call = False  # no text has come since
        self._is_joined = False  # nor has a mark
        self._is_over = False

    def push(self, text: str) -> list[Piece]:
        """Read on; the pieces that no later text can change."""
        self._held += text
        pieces: list[Piece] = []
        if self._reader is not None and not self._read_on(text, pieces):
            return pieces
        while self._advance(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """End the answer; the pieces that remain."""
        self._is_over = True
        return self.push("")

    def _advance(self, pieces: list[Piece]) -> bool:
        """One step through the held text; False: it depends on what comes."""
        if self._is_joined:
            return self._join()
        if self._opened is not None:
            return self._begin_call(self._opened, pieces)
        return self._find_mark(pieces)

    def _find_mark(self, pieces: list[Piece]) -> bool:
        held = self._held
        found = [(held.find(mark, self._searched), mark) for mark in self._marks.begin]
        found = [(start, mark) for start, mark in found if start >= 0]
        if not found:
            end = len(held)
            if not self._is_over:
                rest = held[self._searched :]
                end -= max(overlap(rest, mark) for mark in self._marks.begin)
            self._tell(pieces, end)
            self._searched = max(0, end - len(held) + len(self._held))
            return False
        start, mark = min(found)
        self._tell(pieces, start)
        self._opened = start + len(mark) - len(held) + len(self._held)
        return True

    def _tell(self, pieces: list[Piece], end: int) -> None:
        """The text is certain. Blanks beside a call are the format's, not the text's."""
        text, rest = self._held[:end], self._held[end:]
        if self._is_after_call:
            text = text.lstrip()
        is_rest = self._is_over and not rest
        certain = text if is_rest else text.rstrip()
        if certain:
            pieces.append(certain)
            self._is_after_call = False
        self._held = text[len(certain) :] + rest

    def _begin_call(self, opened: int, pieces: list[Piece]) -> bool:
        lead = self._lead.match(self._held, opened)
        assert lead is not None
        start = lead.end()
        if start == len(self._held) and not self._is_over:
            return False
        if self._held[start : start + 1] != "{":
            self._searched, self._opened = opened, None
            return True
        self._reader = CallReader(self._names)
        return self._read_on(self._held[start:], pieces)

    def _read_on(self, text: str, pieces: list[Piece]) -> bool:
        """Read on in an object; true if it is over. If it was no call, all of it is text."""
        reader, opened = self._reader, self._opened
        assert reader is not None
        assert opened is not None
        pieces += reader.push(text)
        if self._is_over and reader.is_call and reader.end is None:
            pieces += reader.finish()
            self._held, self._reader = "", None
            return False
        if not reader.is_call and (reader.is_none or self._is_over):
            self._searched, self._opened, self._reader = opened, None, None
            return True
        if reader.end is None:
            return False
        self._held, self._searched = reader.text[reader.end :], 0
        self._opened = self._reader = None
        self._is_after_call = self._is_joined = True
        return True

    def _join(self) -> bool:
        """After a call: its end, or another call, or text."""
        joint = self._joints.match(self._held)
        assert joint is not None
        rest = self._held[joint.end() :]
        is_open = any(mark.startswith(rest) and mark != rest for mark in (*self._marks.end, "{"))
        if is_open and not self._is_over:
            return False
        self._held, self._is_joined = rest, False
        for mark in self._marks.end:
            if rest.startswith(mark):
                self._held = rest.removeprefix(mark)
                return True
        if rest.startswith("{"):
            self._opened = 0
        return True


class ForcedCallParser:
    """Calls and nothing else, one or a list, as `call_schema` makes the model write them.

    Where the answer was cut short, what there is of the arguments is the call's.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: functions that may be called."""
        self._names = names
        self._reader: CallReader | None = None
        self._has_calls = False

    def push(self, text: str) -> list[Piece]:
        """Read on; the pieces that no later text can change."""
        pieces: list[Piece] = []
        while text:
            if self._reader is None:
                text = text[_end(_BLANKS_OR_LIST, text) :]
                if not text:
                    break
                self._reader = CallReader(is_forced=True)
            pieces += self._reader.push(text)
            if self._reader.end is None:
                break
            text = self._reader.text[self._reader.end :]
            self._reader, self._has_calls = None, True
        return pieces

    def finish(self) -> list[Piece]:
        """End the answer; the pieces that remain."""
        reader = self._reader
        if reader is None:
            return []
        if reader.is_call:
            return reader.finish()
        # Cut before the end of the name: it is known if only one begins like that.
        possible = [name for name in self._names if _call_start(name).startswith(reader.text)]
        if len(possible) == 1:
            return [CallName(possible[0])]
        return [] if self._has_calls else [CallName(reader.text[len(_BEFORE_NAME) :])]


_BEFORE_NAME = '{"name":"'


def _call_start(name: str) -> str:
    return _BEFORE_NAME + json.dumps(name, ensure_ascii=False)[1:] + ',"arguments":'


def _end(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.match(text)
    return match.end() if match is not None else 0
