"""Messages of a conversation in the forms that templates read: calls of functions, thoughts."""

import json
from collections.abc import Callable, Mapping
from typing import Any

Message = Mapping[str, Any]

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


def with_named_thoughts(message: Message) -> Message:
    """What the model thought by all names that templates have for it, as in transformers: gpt-oss's
    reads `thinking`."""
    given = [message[name] for name in _THOUGHTS if message.get(name) is not None]
    if not given:
        return message
    return {"thinking": given[0], **message, "reasoning_content": given[0]}


def with_readable_calls(message: Message) -> Message:
    """A message in OpenAI's form as templates read it; one without calls of functions as it is.

    Arguments come parsed, as templates write JSON themselves. Where the calls are all that was
    said, there is an empty text.
    """
    calls = _calls(message)
    if not calls:
        return message
    content = message.get("content")
    return {
        **message,
        "content": "" if content is None else content,
        "tool_calls": [_with_arguments(call, str, parsed_arguments) for call in calls],
    }


def with_json_arguments(message: Message) -> Message:
    """The message with the arguments of its calls as JSON, where they are objects."""
    calls = _calls(message)
    if not calls:
        return message
    written = [_with_arguments(call, Mapping, _json) for call in calls]
    return {**message, "tool_calls": written}


def with_object_arguments(message: Message) -> Message:
    """The message with the arguments of its calls under one key, where they are no JSON object."""
    calls = _calls(message)
    if not calls:
        return message
    written = [_with_arguments(call, str, _under_one_key) for call in calls]
    return {**message, "tool_calls": written}


def _calls(message: object) -> list[Any]:
    """None if it is no message, or its calls are no list."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    return list(calls) if isinstance(calls, list | tuple) else []


def _with_arguments(call: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A call with other arguments, if it has some of this type."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, kind):
        return call
    return {**call, "function": {**function, "arguments": change(arguments)}}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _under_one_key(text: str) -> object:
    return {"arguments": text} if isinstance(parsed_arguments(text), str) else text


def parsed_arguments(text: str) -> dict[str, Any] | str:
    """The arguments of a call; the text as it is where it is no JSON object, as that of a call
    which was cut short."""
    try:
        arguments: object = json.loads(text.strip() or "{}")
        _json(arguments).encode()  # fails for half of a surrogate pair, which no prompt may hold
    except (ValueError, RecursionError):
        return text
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) else text
