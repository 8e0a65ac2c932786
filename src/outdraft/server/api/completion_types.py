"""The bodies of /v1/completions, /tokenize and /detokenize."""

from typing import Annotated

from pydantic import Field

from outdraft.server.api.chat_types import TemplateFields
from outdraft.server.api.fields import Body, ChoiceFields, Int64, Texts, TokenIds


class CompletionRequest(ChoiceFields):
    """A text, or several, to continue."""

    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)]
    max_tokens: Int64 | None = Field(None, description="Absent: 16.")
    logprobs: Int64 | None = None
    echo: bool | None = None


class TokenizeTextRequest(Body):
    """A text to make token ids of."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(TemplateFields):
    """A conversation to make token ids of."""

    model: str | None = None
    add_special_tokens: bool = False
    return_token_strs: bool | None = None


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
