"""From texts, token ids and conversations to encoded prompts; in threads, as they may be long."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from outdraft.core.errors import RequestError
from outdraft.engine.inputs import EncodedPrompt, is_one_prompt
from outdraft.server.api.bodies import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    InputMessage,
    InputReasoning,
    TemplateFields,
    Tool,
    ToolCall,
)
from outdraft.server.api.errors import unknown_model
from outdraft.server.api.fields import ChoiceFields, SamplingFields
from outdraft.server.api.settings import ApiContext
from outdraft.text.chat import parsed_arguments

_HINTS = {"cache_control": True, "prompt_cache_breakpoint": True, "defer_loading": True}
_BESIDE = _HINTS | {"function": _HINTS}


def model_name(context: ApiContext, asked: str | None) -> str:
    """The served name that a request means. Raises ApiError if there is no such model."""
    names = context.settings.served_model_names
    if asked is None:
        return names[0]
    if asked not in names:
        raise unknown_model(asked)
    return asked


def _encoder(
    context: ApiContext, body: SamplingFields, max_tokens: int | None, *, adds_special_tokens: bool
) -> Callable[[str | list[int]], EncodedPrompt]:
    """Makes ids of a prompt as the body says, `adds_special_tokens` where it says nothing."""
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
    return partial(
        context.inputs.encoded,
        add_special_tokens=adds_special_tokens if special is None else special,
        keep_last=keep_last,
        cache_salt=body.cache_salt,
    )


async def encode_prompts(
    context: ApiContext, body: CompletionRequest, max_tokens: int | None
) -> list[EncodedPrompt]:
    """Ids of one text or id list, or of several.

    Raises:
        ContextLengthError: one is too long.
        RequestError: there are too many, or one is empty or holds ids outside the vocabulary; or
            more tokens would be kept than the model reads.
    """
    encode = _encoder(context, body, max_tokens, adds_special_tokens=True)
    several: Any = [body.prompt] if is_one_prompt(body.prompt) else body.prompt
    if not several:
        raise RequestError("prompt must not be empty", "prompt")
    most = context.settings.max_choices
    if len(several) > most:  # before a million of them are encoded
        raise RequestError(
            f"there are {len(several)} prompts, at most {most} are allowed", "prompt"
        )
    return await asyncio.to_thread(lambda: [encode(one) for one in several])


async def encode_chat(
    context: ApiContext,
    body: SamplingFields,
    chat: Mapping[str, Any],
    max_tokens: int | None,
    field: str = "messages",
) -> EncodedPrompt:
    """Text and ids of a conversation.

    Args:
        chat: arguments of ChatTemplate.render.
        field: the parameter that the messages came as.

    Raises:
        ContextLengthError: it is too long.
        RequestError: the model's template cannot write it, or more tokens would be kept than the
            model reads.
    """
    encode = _encoder(context, body, max_tokens, adds_special_tokens=False)

    def encode_text() -> EncodedPrompt:
        try:
            return encode(chat_text(context, chat))
        except RequestError as error:  # it speaks of messages, or of the prompt made of them
            named = field if error.field in ("messages", "prompt") else error.field
            raise type(error)(str(error), named) from error

    return await asyncio.to_thread(encode_text)


def chat_text(context: ApiContext, chat: Mapping[str, Any]) -> str:
    """The prompt of a conversation. Raises RequestError if no template can write it."""
    if context.chat_template is None:
        raise RequestError("the model has no chat template: use /v1/completions", "messages")
    return context.chat_template.render(**chat)


def conversation(body: TemplateFields, tools: list[Tool] | None) -> dict[str, Any]:
    """Arguments of ChatTemplate.render for the conversation of a body."""
    variables = dict(body.chat_template_kwargs or {})
    if body.documents:
        variables["documents"] = body.documents
    if isinstance(body, ChatRequest) and body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    return {
        "messages": [_template_message(message) for message in body.messages],
        # Without what clients send beside: a template writes all that it is given.
        "tools": [tool.model_dump(exclude_none=True, exclude=_BESIDE) for tool in tools or ()]
        or None,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": bool(body.continue_final_message),
        "variables": variables,
    }


def _template_message(message: ChatMessage) -> dict[str, Any]:
    entry = _turn(message)
    entry |= message.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
    if thoughts := message.reasoning or message.reasoning_content:
        entry["reasoning"] = thoughts
    if message.tool_calls:
        entry["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return entry


def input_messages(
    items: str | Sequence[InputMessage | InputReasoning], instructions: str | None
) -> list[dict[str, Any]]:
    """Messages for ChatTemplate.render of a body of /v1/responses.

    Its first message may come separately, as instructions, and thoughts do.
    """
    result: list[dict[str, Any]] = []
    if instructions is not None:
        result.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        items = [InputMessage(role="user", content=items)]
    thoughts = ""
    for item in items:
        if isinstance(item, InputReasoning):
            thoughts = "".join(part.text for part in item.content or ())
            continue
        entry = _turn(item)
        if thoughts and item.role == "assistant":
            entry["reasoning"] = thoughts
        thoughts = ""
        result.append(entry)
    return result


def _turn(message: ChatMessage | InputMessage) -> dict[str, Any]:
    role = message.role
    content: Any = message.content or ""
    if not isinstance(content, str):
        content = [{"type": "text", "text": part.text} for part in content]
    # Templates do not know the newer name.
    return {"role": "system" if role == "developer" else role, "content": content}


def _tool_call(call: ToolCall) -> dict[str, Any]:
    """Templates write the arguments as JSON themselves, so they get them parsed."""
    arguments = parsed_arguments(call.function.arguments or "")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
