"""The body of /v1/responses: text in, text out. Nothing is kept from one request to the next."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from outdraft.server.api.chat_types import refuse_other_parts
from outdraft.server.api.fields import (
    Body,
    Int64,
    JsonObjectFormat,
    JsonSchemaSpec,
    SamplingFields,
    TextFormat,
)


class InputPart(Body):
    """A piece of text: the user's, or of an earlier answer."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Any = Field(None, description="Ignored: notes on an earlier answer.")
    logprobs: Any = Field(None, description="Ignored: of an earlier answer.")


class InputMessage(Body):
    """One turn of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]
    id: Any = Field(None, description="Ignored: of an earlier answer.")
    status: Any = Field(None, description="Ignored: of an earlier answer.")
    phase: Any = Field(None, description="Ignored: of an earlier answer.")

    _parts = field_validator("content", mode="before")(refuse_other_parts)


class JsonSchemaTextFormat(JsonSchemaSpec):
    type: Literal["json_schema"]


class TextConfig(Body):
    """What the output must be."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | JsonSchemaTextFormat, Field(discriminator="type")]
        | None
    ) = None


class ResponsesStreamOptions(Body):
    include_obfuscation: Any = Field(
        None, description="Ignored: padding of OpenAI's own service against eavesdroppers."
    )


class ResponsesRequest(SamplingFields):
    """A text or a conversation to answer."""

    input: str | list[InputMessage]
    instructions: str | None = None
    max_output_tokens: Int64 | None = None
    top_logprobs: Int64 | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    text: TextConfig | None = None
    stream_options: ResponsesStreamOptions | None = None
    # What clients send although it is the only way here.
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
