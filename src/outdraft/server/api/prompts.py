"""From texts, token ids and conversations to encoded prompts; in threads, as they may be long."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from outdraft.core.errors import RequestError
from outdraft.engine.prompts import EncodedPrompt
from outdraft.server.api.chat_types import ChatMessage, Tool, ToolCall
from outdraft.server.api.errors import unknown_model
from outdraft.server.api.responses_types import InputMessage
from outdraft.server.api.settings import ApiContext

AnyPrompts = str | list[int] | list[str] | list[list[int]]


def model_name(context: ApiContext, asked: str | None) -> str:
    """The served name that a request means.

    Raises:
        ApiError: there is no such model.
    """
    names = context.settings.served_model_names
    if asked is None:
        return names[0]
    if asked not in names:
        raise unknown_model(asked)
    return asked


async def encode_prompts(context: ApiContext, prompts: AnyPrompts) -> list[EncodedPrompt]:
    """Ids of one text or id list, or of several.

    Raises:
        RequestError: there are too many, or one is empty, too long or holds ids outside the
            vocabulary.
    """
    several = _several(prompts)
    if not several:
        raise RequestError("prompt must not be empty", "prompt")
    most = context.settings.max_choices
    if len(several) > most:  # before a million of them are encoded
        raise RequestError(
            f"there are {len(several)} prompts, at most {most} are allowed", "prompt"
        )
    return await asyncio.to_thread(lambda: [context.inputs.encoded(one) for one in several])


def _several(prompts: AnyPrompts) -> Sequence[str | list[int]]:
    if isinstance(prompts, str):
        return [prompts]
    texts = [one for one in prompts if isinstance(one, str)]
    lists = [one for one in prompts if isinstance(one, list)]
    ids = [one for one in prompts if isinstance(one, int)]
    return texts or lists or ([ids] if ids else [])


async def encode_chat(
    context: ApiContext, messages: list[dict[str, Any]], field: str, tools: list[Tool] | None = None
) -> EncodedPrompt:
    """Ids of a conversation; `field` is the parameter that it came as.

    Raises:
        RequestError: it is too long, or the model's template cannot write it.
    """

    def encode() -> EncodedPrompt:
        try:
            return context.inputs.encoded(chat_ids(context, messages, field, tools))
        except RequestError as error:  # it speaks of messages, or of the prompt made of them
            raise RequestError(str(error), field) from error

    return await asyncio.to_thread(encode)


def chat_ids(
    context: ApiContext,
    messages: list[dict[str, Any]],
    field: str,
    tools: list[Tool] | None,
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Ids of a conversation of any length.

    Raises:
        RequestError: the model's template cannot write it.
    """
    if context.chat_template is None:
        raise RequestError("the model has no chat template: use /v1/completions", field)
    text = context.chat_template.render(
        messages,
        tools=[tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
        add_generation_prompt=add_generation_prompt,
    )
    # The template has written all special tokens; the tokenizer must not add its own.
    return context.inputs.encode(text, add_special_tokens=False, field=field)


def chat_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates expect them.

    Raises:
        RequestError: a call's arguments are not a JSON object.
    """
    result: list[dict[str, Any]] = []
    for message in messages:
        entry: dict[str, Any] = {"role": _role(message.role), "content": _text(message.content)}
        if message.name is not None:
            entry["name"] = message.name
        if message.tool_call_id is not None:
            entry["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            entry["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
        result.append(entry)
    return result


def input_messages(
    messages: str | Sequence[InputMessage], instructions: str | None
) -> list[dict[str, Any]]:
    """The same of /v1/responses, where the first message may come separately."""
    result = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(messages, str):
        return [*result, {"role": "user", "content": messages}]
    return result + [
        {"role": _role(message.role), "content": _text(message.content)} for message in messages
    ]


def _role(role: str) -> str:
    return "system" if role == "developer" else role  # the newer name, which templates do not know


def _text(content: str | Sequence[Any] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)  # as vLLM does


def _tool_call(call: ToolCall) -> dict[str, Any]:
    """Templates write the arguments as JSON themselves, so they get them parsed."""
    try:
        arguments: object = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError("the arguments of a tool call must be a JSON object", "messages")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
