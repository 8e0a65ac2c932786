"""The body of /v1/chat/completions."""

from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from outdraft.server.api.fields import Body, ChoiceFields, Int64, TextPart


def refuse_other_parts(parts: object) -> object:
    """Say by name which kind of content the model cannot read."""
    if isinstance(parts, list):
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in ("text", "input_text", "output_text"):
                raise PydanticCustomError(
                    "content_part",
                    "content of type {kind} is not supported: the model reads text only",
                    {"kind": ascii(kind)},
                )
    return parts


class FunctionCall(Body):
    """A call of a function that the model wrote."""

    name: str
    arguments: str = Field(description="A JSON object, as text.")


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # What clients send back with the answers that they were given.
    refusal: None = None
    reasoning: str | None = Field(None, description="What the model thought before it answered.")
    reasoning_content: str | None = Field(None, description="The same, under its older name.")
    audio: None = None
    function_call: None = None
    annotations: Any = Field(None, description="Ignored: notes on an earlier answer.")

    _parts = field_validator("content", mode="before")(refuse_other_parts)


class Function(Body):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class TemplateFields(Body):
    """A conversation, and how the model's template writes it."""

    messages: list[ChatMessage]
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = Field(
        None, description="End with the beginning of an answer; default: true."
    )
    continue_final_message: bool | None = Field(
        None, description="End within the last message, which the model goes on with."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the template, such as enable_thinking."
    )


class ChatRequest(ChoiceFields, TemplateFields):
    """A conversation to continue."""

    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="A variable of the template, if it reads it."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    modalities: list[Literal["text"]] | None = None
