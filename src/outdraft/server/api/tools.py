"""Tools: which functions the model may call, and how it is made to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from outdraft.core.errors import RequestError
from outdraft.server.api.bodies import ChatRequest, NamedToolChoice, Tool
from outdraft.server.api.calls import MARKS, CallFinder, ForcedCallParser
from outdraft.server.api.settings import ApiSettings, ToolCallFormat


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The calls that a model may write, or has to.

    Attributes:
        names: functions that may be called.
        format: in which the model writes calls; None: it has to call one of the functions, and
            writes what `call_schema` says.
        may_be_several: it may have to write a list of calls.
    """

    names: tuple[str, ...]
    format: ToolCallFormat | None = None
    may_be_several: bool = False


def tool_call_parser(calls: CallFormat) -> CallFinder | ForcedCallParser:
    """For one answer. `push` gives what is certain now that the answer goes on with a text,
    `finish` what remains when it has ended."""
    if calls.format is None:
        return ForcedCallParser(calls.names)
    # Without marks of its own a call is known by the name of a function.
    names = calls.names if calls.format == "qwen2_5_coder" else None
    return CallFinder(MARKS[calls.format], names)


_DEFINITIONS = ("$defs", "definitions")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def active_tools(body: ChatRequest) -> list[Tool] | None:
    """The functions that stand in the prompt.

    Raises:
        RequestError: it would have to call one, and there is none.
    """
    if not body.tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools", "tool_choice")
        return None
    return None if body.tool_choice == "none" else body.tools


def call_format(
    body: ChatRequest,
    tools: list[Tool] | None,
    settings: ApiSettings,
    *,
    template_takes_several: bool = True,
) -> CallFormat | None:
    """The form in which calls will be written. Raises RequestError if none could be understood.

    `template_takes_several`: the chat template can write a message with several calls.
    """
    if tools is None:
        return None
    names = forced_functions(body)
    if names:
        may_be_several = body.tool_choice == "required" and body.parallel_tool_calls is not False
        return CallFormat(tuple(names), None, may_be_several and template_takes_several)
    if settings.tool_call_parser is None:
        raise RequestError("tools need a server that was started with --tool-call-parser", "tools")
    if not settings.auto_tool_choice:
        raise RequestError(
            "the model may not choose its calls: start the server with --enable-auto-tool-choice, "
            "or ask for a call with tool_choice",
            "tools",
        )
    return CallFormat(tuple(tool.function.name for tool in tools), settings.tool_call_parser)


def hides_calls(calls: CallFormat | None, tokenizer: Tokenizer | None) -> bool:
    """True if a text without special tokens would lack the tags around its calls."""
    if calls is None or calls.format is None or tokenizer is None:
        return False
    marks = MARKS[calls.format]
    if marks.may_begin_answer:
        return False
    tags = marks.begin + marks.end
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


def call_schema(
    tools: Sequence[Tool], names: Sequence[str], *, may_be_several: bool = False
) -> dict[str, Any]:
    """JSON schema of a call of one of the named functions, or of a list of such calls.

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
    schema: dict[str, Any] = {"anyOf": calls}
    if may_be_several:
        schema = {"type": "array", "items": schema, "minItems": 1}
    return schema | {key: value for key, value in definitions.items() if value}
