"""The bodies of requests, and of the plain routes' replies. What they share is in fields.py."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator
from pydantic_core import PydanticCustomError

from outdraft.server.api.fields import (
    UNSUPPORTED,
    Body,
    CacheHints,
    ChoiceFields,
    Int64,
    JsonObjectFormat,
    JsonSchemaSpec,
    Neutral,
    SamplingFields,
    TextFormat,
    TextPart,
    Texts,
    TokenIds,
    ignored,
)

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def refuse_other_parts(parts: object) -> object:
    """Say by name which kind of content the model cannot read."""
    if isinstance(parts, list):
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in ("text", "input_text", "output_text"):
                raise PydanticCustomError(
                    UNSUPPORTED,
                    "content of type {kind} is not supported: the model reads text only",
                    {"kind": ascii(kind)},
                )
    return parts


class FunctionCall(Body):
    """A call of a function that the model wrote."""

    name: str
    arguments: str | None = None
    """A JSON object, as text; the beginning of one if the call was cut short."""


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Any = ignored("the call's place in a stream: a client that adds up deltas has it.")


class ChatMessage(CacheHints):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # What clients send back with the answers that they were given.
    refusal: Annotated[Any, Neutral()] = None
    reasoning: str | None = Field(None, description="What the model thought before it answered.")
    reasoning_content: str | None = Field(None, description="The same, under its older name.")
    audio: Annotated[Any, Neutral()] = None
    function_call: Annotated[Any, Neutral()] = None
    annotations: Any = ignored("notes on an earlier answer.")

    _parts = field_validator("content", mode="before")(refuse_other_parts)


class Function(CacheHints):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Annotated[Any, Neutral((False,))] = None


class Tool(CacheHints):
    type: Literal["function"]
    function: Function
    defer_loading: Annotated[Any, Neutral((False,))] = None


class NamedFunction(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class TemplateFields(Body):
    """A conversation, and how the model's template writes it."""

    messages: list[ChatMessage]
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    """End with the beginning of an answer; default: true."""
    continue_final_message: bool | None = None
    """End within the last message, which the model goes on with."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the template, such as enable_thinking."""
    documents: list[dict[str, Any]] | None = None
    """A variable of the template, if it reads it: texts with titles."""
    media_io_kwargs: Annotated[Any, Neutral(({},))] = None
    mm_processor_kwargs: Annotated[Any, Neutral(({},))] = None


class ChatRequest(ChoiceFields, TemplateFields):
    """A conversation to continue."""

    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    reasoning_effort: ReasoningEffort | None = None
    """A variable of the template, if it reads it."""
    include_reasoning: bool | None = None
    """false: with --reasoning-parser, the answer comes without the thoughts."""
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """false: of several calls only the first is sent."""
    modalities: Annotated[Any, Neutral((["text"], []))] = None
    echo: Annotated[Any, Neutral((False,))] = None
    functions: Annotated[Any, Neutral(([],))] = None
    function_call: Annotated[Any, Neutral(("none", "auto"))] = None


class CompletionRequest(ChoiceFields):
    """A text, or several, to continue."""

    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)]
    max_tokens: Int64 | None = Field(None, description="Absent: 16.")
    logprobs: Int64 | None = None
    echo: bool | None = None
    suffix: Annotated[Any, Neutral(("",))] = None


class TokenizeTextRequest(Body):
    """A text to make token ids of."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = Field(None, description="Absent: true.")
    return_token_strs: bool | None = None


class TokenizeChatRequest(TemplateFields):
    """A conversation to make token ids of."""

    model: str | None = None
    add_special_tokens: bool | None = Field(None, description="Absent: false.")
    return_token_strs: bool | None = None


def _tokenize_kind(body: object) -> str:
    is_chat = isinstance(body, dict) and "messages" in body
    return "TokenizeChatRequest" if is_chat else "TokenizeTextRequest"


# One field decides: otherwise an error in a conversation would be that it is no text.
TokenizeRequest = Annotated[
    Annotated[TokenizeTextRequest, Tag("TokenizeTextRequest")]
    | Annotated[TokenizeChatRequest, Tag("TokenizeChatRequest")],
    Discriminator(_tokenize_kind),
]


class TokenizeResponse(Body):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    """Token ids to make a text of."""

    tokens: TokenIds
    model: str | None = None


class DetokenizeResponse(Body):
    prompt: str


class InputPart(CacheHints):
    """A piece of text: the user's, or of an earlier answer."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Any = ignored("notes on an earlier answer.")
    logprobs: Any = ignored("of an earlier answer.")


class InputMessage(Body):
    """One turn of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]
    id: Any = ignored("of an earlier answer.")
    status: Any = ignored("of an earlier answer.")
    phase: Any = ignored("of an earlier answer.")

    _parts = field_validator("content", mode="before")(refuse_other_parts)


class ThoughtPart(Body):
    """A piece of what the model thought."""

    type: Literal["reasoning_text"]
    text: str


class InputReasoning(Body):
    """The model's thoughts before the answer that follows."""

    type: Literal["reasoning"]
    content: list[ThoughtPart] | None = None
    id: Any = ignored("of an earlier answer.")
    status: Any = ignored("of an earlier answer.")
    summary: Any = ignored("of thoughts that are there themselves.")
    encrypted_content: Any = ignored("thoughts of OpenAI's own service.")


def _input_kind(item: object) -> str:
    is_thought = isinstance(item, dict) and item.get("type") == "reasoning"
    return "InputReasoning" if is_thought else "InputMessage"


# The type decides, which a message may leave out.
InputItem = Annotated[
    Annotated[InputMessage, Tag("InputMessage")] | Annotated[InputReasoning, Tag("InputReasoning")],
    Discriminator(_input_kind),
]


class JsonSchemaTextFormat(JsonSchemaSpec):
    type: Literal["json_schema"]


class TextConfig(Body):
    """The form of the output."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | JsonSchemaTextFormat, Field(discriminator="type")]
        | None
    ) = None
    verbosity: Any = ignored("as the field of that name in a conversation.")


class ResponsesStreamOptions(Body):
    include_obfuscation: Any = ignored("padding of OpenAI's own service against eavesdroppers.")


class Reasoning(Body):
    """The way in which the model is to think."""

    effort: ReasoningEffort | None = None
    """The template's variable reasoning_effort, if it reads it."""
    summary: Any = ignored("whether to sum the thoughts up: they come as they are.")
    generate_summary: Any = ignored("the same, under its older name.")
    context: Annotated[Any, Neutral(("auto",))] = None
    mode: Annotated[Any, Neutral(("standard",))] = None


Includable = Literal[
    "message.output_text.logprobs",
    # No answer has any of these here, so there is nothing to include.
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesRequest(SamplingFields):
    """A text or a conversation to answer."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Int64 | None = None
    top_logprobs: Int64 | None = None
    include: list[Includable] | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_tool_calls: Any = ignored("no functions are called here.")
    background: Annotated[Any, Neutral((False,))] = None
    truncation: Annotated[Any, Neutral(("disabled",))] = None
    tools: Annotated[Any, Neutral(([],))] = None
    tool_choice: Annotated[Any, Neutral(("auto", "none"))] = None
    context_management: Annotated[Any, Neutral(([],))] = None
    enable_response_messages: Annotated[Any, Neutral((False,))] = None

    @property
    def includes_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())
