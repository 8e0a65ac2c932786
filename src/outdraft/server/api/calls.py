"""Calls in what a model writes, found as its text streams.

A call is an object in JSON: {"name": ..., "arguments": {...}}. Models differ in what they write
around calls. A parser gives back text and calls. However its input is cut into pieces, the text,
the names and the arguments add up to the same. What looks like a call and is none remains text.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outdraft.server.api.call_reader import CallArguments, CallName, CallReader, Piece
from outdraft.text.detokenizer import overlap


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
