"""Tools: which functions the model may call, how it is made to, and its calls as its text streams.

Hermes and Qwen write calls in one way, Llama 3 in another. A parser gives back text and whole
calls. However its input is cut into pieces, the text adds up to the same, and the calls are the
same. What looks like a call and is none remains text.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from outdraft.core.errors import RequestError
from outdraft.engine.detokenizer import overlap
from outdraft.server.api.bodies import ChatRequest, NamedToolChoice, Tool
from outdraft.server.api.settings import ApiSettings, ToolCallFormat


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call; `arguments` is JSON, as text."""

    name: str
    arguments: str


Piece = str | ParsedCall


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """The model has to call one of the named functions, and writes what `call_schema` says."""

    names: tuple[str, ...]


CallFormat = ToolCallFormat | ForcedCall


def tool_call_parser(
    calls: CallFormat,
) -> "ForcedCallParser | HermesParser | Llama3JsonParser":
    """For one answer. `push` gives what is certain now that the answer goes on with a text,
    `finish` what remains when it has ended."""
    if isinstance(calls, ForcedCall):
        return ForcedCallParser(calls.names)
    return HermesParser() if calls == "hermes" else Llama3JsonParser()


class HermesParser:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, text around them."""

    START, END = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._held = ""  # blanks and what may begin a tag; or a call, from its start tag on
        self._in_call = False
        self._blanks = ""  # before the call
        self._searched = 0  # characters of the call in which no end tag begins
        self._after_call = False

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._in_call or self.START in self._held:
            if not self._in_call:
                before, _, rest = self._held.partition(self.START)
                self._add_text(pieces, before, is_last=True)
                self._blanks = self._held
                self._held, self._in_call, self._searched = self.START + rest, True, 0
            if not self._end_call(pieces):
                return pieces
        self._add_text(pieces, self._held, is_last=False)
        return pieces

    def finish(self) -> list[Piece]:
        if not self._in_call:
            return [self._held] if self._held.strip() or not self._after_call else []
        call = _hermes_call(self._held.removeprefix(self.START))  # some models leave the end out
        return [call or self._blanks + self._held]

    def _end_call(self, pieces: list[Piece]) -> bool:
        """Take the call off, if its end is there."""
        while (end := self._held.find(self.END, self._searched)) >= 0:
            call = _hermes_call(self._held[len(self.START) : end])
            self._searched = end + len(self.END)
            if call is not None:
                pieces.append(call)
                self._held = self._held[self._searched :]
                self._in_call, self._after_call = False, True
                return True
        self._searched = max(self._searched, len(self._held) - len(self.END) + 1)
        return False

    def _add_text(self, pieces: list[Piece], text: str, *, is_last: bool) -> None:
        """Give the text that is certain. Blanks beside a call are the format's, not the text's."""
        if self._after_call:
            text = text.lstrip()
        certain = text if is_last else text[: len(text) - overlap(text, self.START)]
        certain = certain.rstrip()
        if certain:
            pieces.append(certain)
            self._after_call = False
        self._held = text[len(certain) :]


class Llama3JsonParser:
    """{"name": ..., "parameters": {...}} and nothing else, or several with `;` between them."""

    TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> list[Piece]:
        if self._is_text:
            return [text] if text else []
        self._held += text
        start = self._held.lstrip()
        if not start or start[0] == "{" or self.TAG.startswith(start[: len(self.TAG)]):
            return []
        self._is_text = True
        return [self._held]

    def finish(self) -> list[Piece]:
        if self._is_text:
            return []
        calls = _llama_calls(self._held.strip().removeprefix(self.TAG))
        if calls:
            return [*calls]
        return [self._held] if self._held else []


class ForcedCallParser:
    """One call and nothing else, as `call_schema` makes the model write it.

    Where the answer was cut short, what there is of the arguments is the call's.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: functions that may be called."""
        self._names = names
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        self._held += text
        return []

    def finish(self) -> list[Piece]:
        calls = _llama_calls(self._held)
        if calls or not self._held:
            return [*(calls or ())]
        for name in self._names:
            start = _call_start(name)
            if self._held.startswith(start):
                return [ParsedCall(name, self._held.removeprefix(start))]
        # Cut before the end of the name: it is known if only one begins like that.
        possible = [name for name in self._names if _call_start(name).startswith(self._held)]
        if len(possible) == 1:
            return [ParsedCall(possible[0], "")]
        return [ParsedCall(self._held[len(_BEFORE_NAME) :], "")]


_BEFORE_NAME = '{"name":"'


def _call_start(name: str) -> str:
    return _BEFORE_NAME + json.dumps(name, ensure_ascii=False)[1:] + ',"arguments":'


def _hermes_call(text: str) -> ParsedCall | None:
    try:
        return _call(json.loads(text), ("arguments", "parameters"))
    except (ValueError, RecursionError):
        return None


def _llama_calls(text: str) -> list[ParsedCall] | None:
    """All calls of a text, None if it holds anything else."""
    calls: list[ParsedCall] = []
    decoder = json.JSONDecoder()
    position = 0
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return None
        call = _call(value, ("parameters", "arguments"))
        if call is None:
            return None
        calls.append(call)
        while position < len(text) and text[position] in "; \t\r\n":
            position += 1
    return calls


def _call(value: Any, names: tuple[str, str]) -> ParsedCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = next((value[name] for name in names if name in value), {})
    if isinstance(arguments, str):  # some models write JSON into a string
        return ParsedCall(value["name"], arguments)
    return ParsedCall(value["name"], _dumps(arguments)) if isinstance(arguments, dict) else None


def _dumps(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, written as an escape
        return json.dumps(value)
    return text


_DEFINITIONS = ("$defs", "definitions")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def active_tools(body: ChatRequest) -> list[Tool] | None:
    """The functions that the model is told of.

    Raises:
        RequestError: it would have to call one, and there is none.
    """
    if not body.tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools", "tool_choice")
        return None
    return None if body.tool_choice == "none" else body.tools


def call_format(
    body: ChatRequest, tools: list[Tool] | None, settings: ApiSettings
) -> CallFormat | None:
    """How calls will be written. Raises RequestError if a call could not be understood."""
    if tools is None:
        return None
    names = forced_functions(body)
    if names:
        return ForcedCall(tuple(names))
    if settings.tool_call_parser is None:
        raise RequestError("tools need a server that was started with --tool-call-parser", "tools")
    if not settings.auto_tool_choice:
        raise RequestError(
            "the model may not choose its calls: start the server with --enable-auto-tool-choice, "
            "or ask for a call with tool_choice",
            "tools",
        )
    return settings.tool_call_parser


def hides_calls(calls: CallFormat | None, tokenizer: Tokenizer | None) -> bool:
    """Whether a text without special tokens would lack the tags that its calls stand between."""
    if calls != "hermes" or tokenizer is None:
        return False
    tags = (HermesParser.START, HermesParser.END)
    tokens = tokenizer.get_added_tokens_decoder().values()
    return any(token.special and token.content in tags for token in tokens)


def forced_functions(body: ChatRequest) -> list[str]:
    """Names of the functions one of which must be called; none if the model is free.

    Raises:
        RequestError: tool_choice names an unknown function.
    """
    names = [tool.function.name for tool in body.tools or ()]
    if body.tool_choice == "required":
        return names
    if not isinstance(body.tool_choice, NamedToolChoice):
        return []
    name = body.tool_choice.function.name
    if name not in names:
        raise RequestError("tool_choice names a function that tools does not", "tool_choice")
    return [name]


def call_schema(tools: Sequence[Tool], names: Sequence[str]) -> dict[str, Any]:
    """JSON schema of a call of one of the named functions.

    Raises:
        RequestError: two functions define a part of their schemas differently under one name.
    """
    definitions: dict[str, dict[str, Any]] = {}
    calls: list[dict[str, Any]] = []
    for function in (tool.function for tool in tools if tool.function.name in names):
        parameters = dict(function.parameters or _NO_PARAMETERS)
        for key in _DEFINITIONS:  # references count from the root, so these have to move there
            found: object = parameters.pop(key, {})
            if not isinstance(found, dict):
                raise RequestError(f"{key} of a tool's parameters must be an object", "tools")
            moved = definitions.setdefault(key, {})
            for name, value in found.items():
                if moved.setdefault(name, value) != value:
                    raise RequestError(f"{key} of two tools differ in {name!r}", "tools")
        properties = {"name": {"const": function.name}, "arguments": parameters}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls} | {key: value for key, value in definitions.items() if value}
