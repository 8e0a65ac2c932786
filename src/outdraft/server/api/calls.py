"""Calls in what a model writes, found as its text streams.

A call is an object in JSON: {"name": ..., "arguments": {...}}. Its name comes first, then its
arguments piece by piece, as the model writes them. Once they have begun the object is a call, even
if it is cut short or they turn out to be no JSON.

Models differ in what they write around calls. A parser gives back text and calls. However its input
is cut into parts, the text, the names and the arguments add up to the same. What looks like a call
and is none remains text.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outdraft.text.detokenizer import overlap

# A part of an answer: a call begins with its name, and parts of its arguments follow, in JSON.
Part = tuple[Literal["thought", "text", "call", "arguments"], str]

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

    def __init__(self, names: Sequence[str], *, is_forced: bool) -> None:
        """
        Args:
            names: functions that may be called; none: any. With names, the name comes first.
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

    def push(self, text: str, *, is_last: bool = False) -> list[Part]:
        """Read on, or the end; the parts that no later text can change."""
        self.text += text
        parts: list[Part] = []
        self._find_arguments(parts)
        self._look_on()
        if self.end is not None and not self.is_none:
            self._end_object(parts)
        if self._start is not None:
            is_cut = is_last and self.is_call and self.end is None
            end = self._arguments_end or (len(self.text) if is_cut else self._seen)
            piece = self.text[self._returned : end]
            if not (is_cut and self._is_in_string):  # else blanks that may follow the arguments
                piece = piece.rstrip()
            if piece:
                parts.append(("arguments", piece))
            self._returned += len(piece)
        return parts

    def _find_arguments(self, parts: list[Part]) -> None:
        if self._start is not None or self.is_none:
            return
        found = (_BEGUN if self._is_forced else _BEGUN_OBJECT).match(self.text)
        named = _NAMED.match(self.text) if self._is_forced and found is None else found
        if named is not None and not self.is_call:
            self._name(parts, _name_of(named[1]))
        if found is not None and self.is_call:
            self._start = self._returned = found.end()
        elif self._names and _OTHER_KEY.match(self.text):
            self.is_none = True

    def _name(self, parts: list[Part], name: object) -> None:
        if isinstance(name, str) and (not self._names or name in self._names):
            parts.append(("call", name))
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

    def _end_object(self, parts: list[Part]) -> None:
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
            self._name(parts, call[0])
        if self.is_call and call[1]:
            parts.append(("arguments", call[1]))


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


def whole_calls(parts: Iterable[Part]) -> list[tuple[str, str]]:
    """The calls among an answer's parts: their names and their arguments, in JSON."""
    calls: list[tuple[str, str]] = []
    for kind, text in parts:
        if kind == "call":
            calls.append((text, ""))
        elif kind == "arguments":
            name, arguments = calls[-1]
            calls[-1] = name, arguments + text
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


# Calls and nothing else, one or a list, as `call_schema` makes the model write them.
FORCED = CallMarks(("[",), ("]",), joints=r"[\s,]*", may_begin_answer=True)
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


class CallFinder:
    """Finds calls where a model may write them, and text around them.

    In FORCED marks there is no text. Where such an answer was cut short, what there is of the
    arguments is the call's.
    """

    def __init__(self, marks: CallMarks, names: Sequence[str] = ()) -> None:
        """`names`: functions that may be called; none: any."""
        self._marks, self._names, self._is_forced = marks, names, marks is FORCED
        self._lead, self._joints = re.compile(marks.lead), re.compile(marks.joints)
        self._begin = re.compile("|".join(map(re.escape, marks.begin)))
        self._held = ""  # from where a call or a mark may begin on
        self._searched = 0  # characters of it in which no mark begins
        # Number of its characters after which a call may stand; None: it may not.
        self._opened = 0 if marks.may_begin_answer else None
        self._reader: CallReader | None = None
        self._is_after_call = False  # no text has come since
        self._is_joined = False  # nor has a mark
        self._is_over = False

    def push(self, text: str, *, is_last: bool = False) -> list[Part]:
        """Read on, or the end; the parts that no later text can change."""
        self._held += text
        self._is_over = is_last
        parts: list[Part] = []
        if self._reader is not None and not self._read_on(text, parts):
            return parts
        while self._advance(parts):
            pass
        return [part for part in parts if part[0] != "text"] if self._is_forced else parts

    def _advance(self, parts: list[Part]) -> bool:
        """One step through the held text; False: it depends on what comes."""
        if self._is_joined:
            return self._join()
        if self._opened is not None:
            return self._begin_call(self._opened, parts)
        return self._find_mark(parts)

    def _find_mark(self, parts: list[Part]) -> bool:
        held = self._held
        if (found := self._begin.search(held, self._searched)) is None:
            end = len(held)
            if not self._is_over:
                rest = held[self._searched :]
                end -= max(overlap(rest, mark) for mark in self._marks.begin)
            self._tell(parts, end)
            self._searched = max(0, end - len(held) + len(self._held))
            return False
        self._tell(parts, found.start())
        self._opened = found.end() - len(held) + len(self._held)
        return True

    def _tell(self, parts: list[Part], end: int) -> None:
        """The text is certain. Blanks beside a call are the format's, not the text's."""
        text, rest = self._held[:end], self._held[end:]
        if self._is_after_call:
            text = text.lstrip()
        is_rest = self._is_over and not rest
        certain = text if is_rest else text.rstrip()
        if certain:
            parts.append(("text", certain))
            self._is_after_call = False
        self._held = text[len(certain) :] + rest

    def _begin_call(self, opened: int, parts: list[Part]) -> bool:
        lead = self._lead.match(self._held, opened)
        assert lead is not None
        start = lead.end()
        if start == len(self._held) and not self._is_over:
            return False
        if self._held[start : start + 1] != "{":
            self._searched, self._opened = opened, None
            return True
        names = () if self._is_forced else self._names
        self._reader = CallReader(names, is_forced=self._is_forced)
        return self._read_on(self._held[start:], parts)

    def _read_on(self, text: str, parts: list[Part]) -> bool:
        """Read on in an object; true if it is over. If it was no call, all of it is text."""
        reader, opened = self._reader, self._opened
        assert reader is not None
        assert opened is not None
        parts += reader.push(text, is_last=self._is_over)
        if self._is_over and reader.is_call and reader.end is None:
            self._held, self._reader = "", None
            return False
        if not reader.is_call and (reader.is_none or self._is_over):
            parts += self._cut_call(reader.text) if self._is_forced else []
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

    def _cut_call(self, text: str) -> list[Part]:
        """A call that was cut before the end of its name: known if only one begins like that."""
        possible = [name for name in self._names if _call_start(name).startswith(text)]
        if len(possible) == 1:
            return [("call", possible[0])]
        return [] if self._is_after_call else [("call", text[len(_BEFORE_NAME) :])]


_BEFORE_NAME = '{"name":"'


def _call_start(name: str) -> str:
    return _BEFORE_NAME + json.dumps(name, ensure_ascii=False)[1:] + ',"arguments":'
