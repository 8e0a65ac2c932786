"""Fields that the bodies of several routes have in common.

A field that no class here or in bodies.py names is refused: silence would change the output. One
that would change it, but for some values, is accepted with these: see Neutral. null means the same
as an absent field, everywhere: clients send it for what they leave alone.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from annotated_types import GroupedMetadata
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from outdraft.core.sampling import MAX_INT64

Int64 = Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_INT64)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT64)]
TokenIdKey = Annotated[int, Field(ge=0, le=MAX_INT64, strict=False)]  # JSON's keys are texts
# Long lists stop at their first error.
Texts = Annotated[list[str], Field(fail_fast=True)]
Choices = Annotated[Texts, Field(min_length=1)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
TokenSet = Annotated[TokenIds, Field(max_length=2**18)]  # no vocabulary has more
MAX_ERRORS = 100  # of one body that are listed; each of them takes a kilobyte
TOO_MANY_ERRORS = "too_many_errors"
UNSUPPORTED = "unsupported"  # the type of an error: there are values that would be fine
_OLD: JsonDict = {"deprecated": True}  # pydantic's own `deprecated` warns when the field is read


class Body(BaseModel):
    """A JSON object without unknown fields, in which "1" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    @model_validator(mode="wrap")
    @classmethod
    def _checked(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Leave unknown nulls out, and list a bounded number of errors: a body of a megabyte may be
        wrong in a million places, and listing them takes seconds."""
        if isinstance(value, dict):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            value = {name: one for name, one in value.items() if one is not None or name in known}
        try:
            return handler(value)
        except ValidationError as error:
            if error.error_count() <= MAX_ERRORS:
                raise
            message = "more than {most} values are wrong or unknown"
            raise PydanticCustomError(TOO_MANY_ERRORS, message, {"most": MAX_ERRORS}) from None


def ignored(why: str) -> Any:
    """A field that is accepted and changes nothing."""
    return Field(None, description=f"Ignored: {why}")


@dataclass(frozen=True, eq=False)  # typing takes equal ones for the same, and 0 for False
class Neutral(GroupedMetadata):
    """Metadata of a field that is accepted with values that change nothing, and with no others.

    Clients send the defaults of their own libraries, of vLLM and of OpenAI's service.
    """

    values: tuple[Any, ...] = ()  # beside null

    def __iter__(self) -> Iterator[object]:
        yield AfterValidator(self._checked)
        yield WithJsonSchema({"enum": [*self.values, None]})

    def _checked(self, given: Any) -> Any:
        for value in (None, *self.values):
            if isinstance(given, bool) == isinstance(value, bool) and given == value:
                return given
        raise unsupported(" or ".join(map(json.dumps, self.values)) or "null")


def unsupported(values: str) -> PydanticCustomError:
    """The error of a value that would change something; `values`: those that would not."""
    return PydanticCustomError(UNSUPPORTED, "only {values} is supported here", {"values": values})


class HarmlessExtras(Body):
    """Fields that real OpenAI clients send and that are accepted and ignored.

    Only what cannot change a token of the output may stand here, each with its reason.
    """

    user: Any = ignored("who asks: nothing is kept by user.")
    safety_identifier: Any = ignored("the same, under its newer name.")
    metadata: Any = ignored("labels of a stored answer: no answer is stored.")
    store: Any = ignored("whether to keep the answer: none is ever kept.")
    service_tier: Any = ignored("a price class: there is one. See `priority`.")
    prompt_cache_key: Any = ignored("routing hint: prefixes are found by content.")
    prompt_cache_retention: Any = ignored("prefixes stay while there is room.")
    prompt_cache_options: Any = ignored("the same, under its newer name.")
    parallel_tool_calls: Any = ignored("no functions are called here.")
    spaces_between_special_tokens: Any = ignored("a setting of vLLM's slow tokenizers.")
    session_id: Any = ignored("routing hint of vLLM's: prefixes are found by content.")
    stream_interval: Any = ignored("an event of a stream has what a step brought.")
    return_mm_kwargs: Any = ignored("about images, which there are none of.")
    verbosity: Any = ignored("a text says how long the answer is to be. A line in the log says so.")


class NeutralFields(Body):
    """Fields that would change an answer, accepted with the values that do not."""

    use_beam_search: Annotated[Any, Neutral((False,))] = None
    length_penalty: Annotated[Any, Neutral((1.0,))] = None
    early_stopping: Annotated[Any, Neutral((False,))] = None
    watermarking: Annotated[Any, Neutral((False,))] = None
    logits_processors: Annotated[Any, Neutral(([],))] = None
    thinking_token_budget: Annotated[Any, Neutral((-1,))] = None
    guided_decoding_backend: Annotated[Any, Neutral(("auto",))] = None
    mm_processor_kwargs: Annotated[Any, Neutral(({},))] = None
    kv_transfer_params: Annotated[Any, Neutral(({},))] = None
    ec_transfer_params: Annotated[Any, Neutral(({},))] = None
    vllm_xargs: Annotated[Any, Neutral(({},))] = None
    routed_experts_prompt_start: Annotated[Any, Neutral((0,))] = None
    return_token_offsets: Annotated[Any, Neutral((False,))] = None
    return_prompt_text: Annotated[Any, Neutral((False,))] = None


class StreamOptions(Body):
    """The content of a stream beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Any = ignored("padding of OpenAI's own service against eavesdroppers.")


class CacheHints(Body):
    """Marks of Anthropic's and OpenAI's services: up to here a prompt is worth keeping."""

    cache_control: Any = ignored("prefixes are found by content.")
    prompt_cache_breakpoint: Any = ignored("prefixes are found by content.")


class TextPart(CacheHints):
    """A piece of text."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """The text that the output is expected to be, more or less."""

    type: Literal["content"]
    content: str | list[TextPart]


class Speculation(Body):
    """The speculation of this request, within the server's own."""

    enabled: bool | None = None
    method: str | None = None
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MAX_INT64)] | None = None
    trace: bool | None = None


class JsonSchemaSpec(Body):
    """A named JSON schema."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """As llama.cpp and others take it: the object's schema."""


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchemaSpec


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class StructuredOutputs(Body):
    """The form that the output must match, one at most, and spaces in JSON. Names are vLLM's."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Choices | None = None
    disable_any_whitespace: bool | None = None
    """false: JSON may have white space, also that of response_format."""
    disable_fallback: Any = ignored("there is nothing else to fall back to.")
    disable_additional_properties: Annotated[Any, Neutral((False,))] = None


class SamplingFields(HarmlessExtras, NeutralFields):
    """Fields of all routes that generate: how tokens are chosen, as SamplingParams has it."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[TokenIdKey, float] | None = None
    allowed_token_ids: TokenSet | None = None
    bad_words: Texts | None = None
    seed: Int64 | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenSet | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Int64 | None = None
    skip_special_tokens: bool | None = None
    prediction: Prediction | None = None
    speculation: Speculation | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    grammar: str | None = None
    guided_json: str | dict[str, Any] | None = Field(None, json_schema_extra=_OLD)
    guided_regex: str | None = Field(None, json_schema_extra=_OLD)
    guided_choice: Choices | None = Field(None, json_schema_extra=_OLD)
    guided_grammar: str | None = Field(None, json_schema_extra=_OLD)
    stream: bool | None = None
    priority: Int64 | None = Field(None, description="Lower is earlier.")
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,256}$")] | None = None
    """Is part of the answer's id; default: a random one."""
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    """Only requests of the same salt share blocks of the prefix cache."""
    include_metrics: bool | None = None
    """Tell how speculation fared, as metrics.speculative_decoding."""


class ChoiceFields(SamplingFields):
    """Fields of the routes that give several choices."""

    n: Int64 | None = None
    best_of: Int64 | None = None
    """Only as many as n: all answers that are made are sent."""
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Int64 | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_INT64)] | None = Field(
        None,
        description="Cut a longer prompt to its last N tokens; -1: to what leaves room for "
        "max_tokens.",
    )
    truncation_side: Annotated[Any, Neutral(("left",))] = None
    add_special_tokens: bool | None = Field(
        None,
        description="Whether the tokenizer adds its own to a text; default: true for a prompt, "
        "false for a conversation, whose template writes them.",
    )
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities name tokens as token_id:N."""

    @field_validator("best_of")
    @classmethod
    def _as_n(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        n = info.data.get("n") or 1
        if best_of not in (None, n):
            raise unsupported(f"{n}, as n,")
        return best_of
