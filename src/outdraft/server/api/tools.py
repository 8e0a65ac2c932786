"""Tools: which functions the model may call, and how it is made to."""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from outdraft.core.errors import RequestError
from outdraft.server.api.bodies import ChatRequest, NamedToolChoice, Tool
from outdraft.server.api.calls import FORCED, MARKS, CallMarks
from outdraft.server.api.settings import ApiSettings

# The calls that a model may write, or has to: marks, and functions that may be called.
CallFormat = tuple[CallMarks, Sequence[str]]

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
    body: ChatRequest, tools: list[Tool] | None, settings: ApiSettings
) -> CallFormat | None:
    """The form in which calls will be written. Raises RequestError if none could be understood."""
    if tools is None:
        return None
    names = forced_functions(body)
    if names:
        return FORCED, names
    if settings.tool_call_parser is None:
        raise RequestError("tools need a server that was started with --tool-call-parser", "tools")
    if not settings.auto_tool_choice:
        raise RequestError(
            "the model may not choose its calls: start the server with --enable-auto-tool-choice, "
            "or ask for a call with tool_choice",
            "tools",
        )
    # Without marks of its own a call is known by the name of a function.
    is_bare = settings.tool_call_parser == "qwen2_5_coder"
    names = [tool.function.name for tool in tools] if is_bare else []
    return MARKS[settings.tool_call_parser], names


def hides_calls(calls: CallFormat | None, tokenizer: Tokenizer | None) -> bool:
    """True if a text without special tokens would lack the tags around its calls."""
    if calls is None or calls[0].may_begin_answer or tokenizer is None:
        return False
    tags = calls[0].begin + calls[0].end
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
