"""From a request's body to SamplingParams."""

import json
import logging
from collections.abc import Iterator
from typing import Any

from outdraft.core.errors import RequestError
from outdraft.core.sampling import SamplingParams, SpeculationParams
from outdraft.core.structured_outputs import StructuredKind, StructuredOutput, choice_text
from outdraft.server.api.chat_types import ChatRequest
from outdraft.server.api.fields import (
    ChoiceFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    JsonSchemaSpec,
    SamplingFields,
)
from outdraft.server.api.responses_types import ResponsesRequest
from outdraft.server.api.settings import ApiSettings
from outdraft.server.api.tool_choice import call_schema, forced_functions

_logger = logging.getLogger(__name__)
# Fields that have the same name and meaning on both sides.
_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "n",
    "prompt_logprobs",
)
# vLLM's names of before, and what they are called now in structured_outputs.
_OLD_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def sampling_params(body: SamplingFields, settings: ApiSettings, **values: Any) -> SamplingParams:
    """The parameters of a body; `values` are those that routes call by different names.

    Raises:
        RequestError: a value is out of its range, or beyond a limit of the server.
    """
    named = {name: getattr(body, name, None) for name in _SAME} | values
    given = {name: value for name, value in named.items() if value is not None}
    # Without any limit an output ends with the context.
    whole: dict[str, Any] = {"max_tokens": None, **settings.default_sampling, **given}
    params = SamplingParams(
        **whole,
        prediction=prediction_text(body),
        speculation=speculation_params(body),
        structured=structured_output(body, settings),
    )
    _check_limits(params, settings)
    return params


def asked_max_tokens(body: SamplingFields) -> tuple[str, int] | None:
    """How many tokens a body asks for, behind the name of the field that says so; None: it does
    not."""
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        if getattr(body, name, None) is not None:
            return name, getattr(body, name)
    return None


def prediction_text(body: SamplingFields) -> str | None:
    """The text that the output is expected to be."""
    if body.prediction is None:
        return None
    content = body.prediction.content
    return content if isinstance(content, str) else "".join(part.text for part in content)


def speculation_params(body: SamplingFields) -> SpeculationParams:
    """How drafts are to be made for this request.

    Raises:
        RequestError: as SpeculationParams.from_mapping.
    """
    if body.speculation is None:
        return SpeculationParams()
    return SpeculationParams.from_mapping(body.speculation.model_dump(exclude_none=True))


def wants_metrics(body: SamplingFields) -> bool:
    """Whether the answer is to tell how speculation fared."""
    return bool(body.include_metrics) or body.speculation is not None


def structured_output(body: SamplingFields, settings: ApiSettings) -> StructuredOutput | None:
    """What the output must match.

    Raises:
        RequestError: it is too large, or several fields ask for something.
    """
    asked = list(_structures(body))
    if not asked:
        return None
    if len(asked) > 1:
        names = ", ".join(field for field, _, _ in asked)
        raise RequestError(f"the output cannot follow several of {names} at once", asked[1][0])
    [(field, kind, text)] = asked
    if field in _OLD_NAMES:
        _logger.warning("%s is deprecated: use structured_outputs.%s", field, _OLD_NAMES[field])
    if len(text.encode()) > settings.max_schema_bytes:
        raise RequestError(f"{field} has more than {settings.max_schema_bytes:,} bytes", field)
    try:
        is_compact = not _is_spaced(body, field, kind)
        return StructuredOutput(kind, text, disable_any_whitespace=is_compact)
    except RequestError as error:  # it speaks of `structured`
        raise RequestError(f"{field}: {error}", field) from error


def form_field(body: SamplingFields) -> str:
    """The field that says what the output must match; empty if none does."""
    return next((field for field, _, _ in _structures(body)), "")


def _is_spaced(body: SamplingFields, field: str, kind: StructuredKind) -> bool:
    """Whether the client asked for JSON that may hold white space; calls of functions never do."""
    asked = body.structured_outputs
    is_wanted = asked is not None and asked.disable_any_whitespace is False
    return is_wanted and kind.startswith("json") and field != "tool_choice"


def _structures(body: SamplingFields) -> Iterator[tuple[str, StructuredKind, str]]:
    """Field, kind and text of everything that the output is asked to match."""
    asked = body.structured_outputs
    if asked is not None:
        if asked.json_ is not None:
            yield "structured_outputs.json", "json_schema", _schema_text(asked.json_)
        if asked.json_object:
            yield "structured_outputs.json_object", "json_object", ""
        if asked.regex is not None:
            yield "structured_outputs.regex", "regex", asked.regex
        if asked.grammar is not None:
            yield "structured_outputs.grammar", "grammar", asked.grammar
        if asked.choice is not None:
            yield "structured_outputs.choice", "choice", choice_text(asked.choice)
    if body.regex is not None:
        yield "regex", "regex", body.regex
    if body.grammar is not None:
        yield "grammar", "grammar", body.grammar
    if body.guided_json is not None:
        yield "guided_json", "json_schema", _schema_text(body.guided_json)
    if body.guided_regex is not None:
        yield "guided_regex", "regex", body.guided_regex
    if body.guided_choice is not None:
        yield "guided_choice", "choice", choice_text(body.guided_choice)
    if body.guided_grammar is not None:
        yield "guided_grammar", "grammar", body.guided_grammar
    if isinstance(body, ChoiceFields):
        yield from _response_format("response_format", body.response_format)
    if isinstance(body, ResponsesRequest) and body.text is not None:
        yield from _response_format("text.format", body.text.format)
    if isinstance(body, ChatRequest) and body.tools:
        names = forced_functions(body)
        if names:
            yield "tool_choice", "json_schema", json.dumps(call_schema(body.tools, names))


def _schema_text(schema: str | dict[str, Any]) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


def _response_format(field: str, asked: object) -> Iterator[tuple[str, StructuredKind, str]]:
    if isinstance(asked, JsonObjectFormat) and asked.schema_ is None:
        yield field, "json_object", ""
    elif isinstance(asked, JsonObjectFormat):
        yield field, "json_schema", json.dumps(asked.schema_)
    spec = asked.json_schema if isinstance(asked, JsonSchemaFormat) else asked
    if isinstance(spec, JsonSchemaSpec):
        if spec.schema_ is None:
            raise RequestError(f"{field} needs a schema", field)
        yield field, "json_schema", json.dumps(spec.schema_)


def _check_limits(params: SamplingParams, settings: ApiSettings) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > settings.max_logprobs:
            raise RequestError(f"{name} must be at most {settings.max_logprobs}", name)
    if len(params.stop_strings) > settings.max_stop_strings:
        raise RequestError(
            f"stop holds {len(params.stop_strings)} strings, at most {settings.max_stop_strings} "
            "are allowed",
            "stop",
        )
    if any(len(text) > settings.max_stop_length for text in params.stop_strings):
        raise RequestError(
            f"a stop string may have at most {settings.max_stop_length} characters", "stop"
        )
    bad_words = params.bad_words or ()  # the engine encodes them between two steps
    if len(bad_words) > settings.max_bad_words:
        raise RequestError(
            f"bad_words holds {len(bad_words)} texts, at most {settings.max_bad_words} are allowed",
            "bad_words",
        )
    if any(len(text) > settings.max_bad_word_length for text in bad_words):
        raise RequestError(
            f"a bad word may have at most {settings.max_bad_word_length} characters", "bad_words"
        )
