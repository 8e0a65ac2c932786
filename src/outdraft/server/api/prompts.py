"""From texts, token ids and conversations to encoded prompts; in threads, as they may be long."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from outdraft.core.errors import RequestError
from outdraft.engine.inputs import EncodedPrompt
from outdraft.server.api.bodies import (
    ChatMessage,
    ChatRequest,
    InputMessage,
    InputPart,
    TemplateFields,
    Tool,
    ToolCall,
)
from outdraft.server.api.errors import unknown_model
from outdraft.server.api.fields import ChoiceFields, SamplingFields, TextPart
from outdraft.server.api.settings import ApiContext

AnyPrompts = str | list[int] | list[str] | list[list[int]]


class PromptOptions(TypedDict):
    """How prompts are made ids of; see InputProcessor.encoded."""

    add_special_tokens: bool
    keep_last: int | None
    cache_salt: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a template writes. `field`: the parameter that it came as.

    `options`: of ChatTemplate.render.
    """

    messages: list[dict[str, Any]]
    field: str
    options: Mapping[str, Any]


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


def prompt_options(
    context: ApiContext, body: SamplingFields, max_tokens: int | None, *, adds_special_tokens: bool
) -> PromptOptions:
    """What a body says about its prompts; `adds_special_tokens` where it says nothing.

    Raises:
        RequestError: more tokens would be kept than the model reads.
    """
    special, keep_last = None, None
    if isinstance(body, ChoiceFields):
        special, keep_last = body.add_special_tokens, body.truncate_prompt_tokens
    most = context.inputs.max_model_len
    if keep_last == 0 or (keep_last or 0) > most:
        raise RequestError(
            f"truncate_prompt_tokens must be -1 or a number from 1 to {most}, got {keep_last}",
            "truncate_prompt_tokens",
        )
    if keep_last == -1:
        keep_last = max(1, most - (max_tokens or 1))
    adds = adds_special_tokens if special is None else special
    return {"add_special_tokens": adds, "keep_last": keep_last, "cache_salt": body.cache_salt}


async def encode_prompts(
    context: ApiContext, prompts: AnyPrompts, options: PromptOptions
) -> list[EncodedPrompt]:
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
    encoded = context.inputs.encoded
    return await asyncio.to_thread(lambda: [encoded(one, **options) for one in several])


def _several(prompts: AnyPrompts) -> Sequence[str | list[int]]:
    if isinstance(prompts, str):
        return [prompts]
    texts = [one for one in prompts if isinstance(one, str)]
    lists = [one for one in prompts if isinstance(one, list)]
    ids = [one for one in prompts if isinstance(one, int)]
    return texts or lists or ([ids] if ids else [])


async def encode_chat(
    context: ApiContext, chat: Conversation, options: PromptOptions
) -> EncodedPrompt:
    """Text and ids of a conversation.

    Raises:
        RequestError: it is too long, or the model's template cannot write it.
    """

    def encode() -> EncodedPrompt:
        try:
            return context.inputs.encoded(chat_text(context, chat), **options)
        except RequestError as error:  # it speaks of messages, or of the prompt made of them
            field = chat.field if error.field in ("messages", "prompt") else error.field
            raise RequestError(str(error), field) from error

    return await asyncio.to_thread(encode)


def chat_text(context: ApiContext, chat: Conversation) -> str:
    """What the model reads of a conversation.

    Raises:
        RequestError: the model's template cannot write it.
    """
    if context.chat_template is None:
        raise RequestError("the model has no chat template: use /v1/completions", chat.field)
    return context.chat_template.render(chat.messages, **chat.options)


def conversation(body: TemplateFields, tools: list[Tool] | None) -> Conversation:
    """What a body says of its conversation.

    Raises:
        RequestError: as `chat_messages`.
    """
    variables = dict(body.chat_template_kwargs or {})
    if isinstance(body, ChatRequest) and body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    options = {
        "tools": [tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": bool(body.continue_final_message),
        "variables": variables,
    }
    return Conversation(messages=chat_messages(body.messages), field="messages", options=options)


def chat_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates expect them.

    Raises:
        RequestError: a call's arguments are not a JSON object.
    """
    result: list[dict[str, Any]] = []
    for message in messages:
        entry: dict[str, Any] = {"role": _role(message.role), "content": _content(message.content)}
        thoughts = message.reasoning or message.reasoning_content
        if thoughts:  # templates know one name or the other
            entry |= {"reasoning": thoughts, "reasoning_content": thoughts}
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
        {"role": _role(message.role), "content": _content(message.content)} for message in messages
    ]


def _role(role: str) -> str:
    return "system" if role == "developer" else role  # the newer name, which templates do not know


def _content(content: str | Sequence[TextPart | InputPart] | None) -> str | list[dict[str, str]]:
    if content is None or isinstance(content, str):
        return content or ""
    return [{"type": "text", "text": part.text} for part in content]


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
