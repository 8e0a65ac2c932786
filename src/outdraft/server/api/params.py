"""From a request's body to SamplingParams."""

import logging
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from outdraft.core.errors import RequestError
from outdraft.core.sampling import SamplingParams
from outdraft.core.structured_outputs import KINDS, StructuredKind, StructuredOutput, form_of
from outdraft.server.api.bodies import ChatRequest, ResponsesRequest
from outdraft.server.api.fields import (
    ChoiceFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    JsonSchemaSpec,
    SamplingFields,
)
from outdraft.server.api.settings import ApiContext, ApiSettings
from outdraft.server.api.tools import call_schema, forced_functions
from outdraft.text.chat import ChatTemplate

_logger = logging.getLogger(__name__)
# Fields that have the same name and meaning on both sides.
_SAME = {field.name for field in fields(SamplingParams)} - {
    *("max_tokens", "logprobs", "detokenize"),
    *("prediction", "speculation", "structured", "structured_outputs"),
}


def sampling_params(body: SamplingFields, context: ApiContext, **values: Any) -> SamplingParams:
    """The parameters of a body; `values` are those that routes call by different names.

    Raises:
        RequestError: a value is out of its range, or beyond a limit of the server.
    """
    named = {name: getattr(body, name, None) for name in _SAME} | values
    given = {name: value for name, value in named.items() if value is not None}
    if body.speculation is not None:
        given["speculation"] = body.speculation.model_dump(exclude_none=True)
    if body.prediction is not None:
        text = body.prediction.content
        is_whole = isinstance(text, str)
        given["prediction"] = text if is_whole else "".join(part.text for part in text)
    # Without any limit an output ends with the context.
    whole: dict[str, Any] = {"max_tokens": None, **context.settings.default_sampling, **given}
    params = SamplingParams(**whole, structured=structured_output(body, context))
    _check_limits(params, context.settings)
    text = body.text if isinstance(body, ResponsesRequest) else None
    if body.verbosity is not None or (text is not None and text.verbosity is not None):
        _logger.warning("verbosity is ignored: say in a message how long the answer is to be")
    return params


def check_numbers(body: ChatRequest | ResponsesRequest, settings: ApiSettings) -> None:
    """Check fields that SamplingParams has under other names, so that errors name them right.

    Raises:
        RequestError: one is out of its range.
    """
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        value = getattr(body, name, None)
        if value is not None and value < 1:
            raise RequestError(f"{name} must be at least 1, got {value}", name)
    most, top = settings.max_logprobs, body.top_logprobs
    if top is not None and not 0 <= top <= most:
        raise RequestError(f"top_logprobs must be between 0 and {most}, got {top}", "top_logprobs")


def wants_metrics(body: SamplingFields) -> bool:
    """True if the answer has numbers about its speculation."""
    return bool(body.include_metrics) or body.speculation is not None


def structured_output(body: SamplingFields, context: ApiContext) -> StructuredOutput | None:
    """The form that the output must match, if there is one.

    Raises:
        RequestError: it is too large, several fields ask for something, or `structured_outputs` is
            there and nothing does.
    """
    asked = list(_structures(body, context.chat_template))
    if not asked:
        if body.structured_outputs is not None:
            message = f"structured_outputs needs one of {', '.join(KINDS)}"
            raise RequestError(message, "structured_outputs")
        return None
    if len(asked) > 1:
        names = ", ".join(field for field, _, _ in asked)
        raise RequestError(f"the output cannot follow several of {names} at once", asked[1][0])
    [(field, kind, value)] = asked
    if field.startswith("guided_"):  # vLLM's name of before
        now = field.removeprefix("guided_")
        _logger.warning("%s is deprecated: use structured_outputs.%s", field, now)
    spacing = None
    if body.structured_outputs is not None and field != "tool_choice":  # calls never hold any
        spacing = body.structured_outputs.disable_any_whitespace
    form = form_of(field, kind, value, spacing)
    if len(form.text.encode()) > (most := context.settings.max_schema_bytes):
        raise RequestError(f"{field} has more than {most:,} bytes", field)
    return form


def form_field(body: SamplingFields) -> str:
    """The field that says what the output must match; empty if none does."""
    return next((field for field, _, _ in _structures(body)), "")


def _structures(
    body: SamplingFields, template: ChatTemplate | None = None
) -> Iterator[tuple[str, StructuredKind, Any]]:
    """Field, kind and value of everything that the output is asked to match.

    `template`: writes a message with several calls, if it can; None: it cannot.
    """
    asked = body.structured_outputs
    named = asked.model_dump(by_alias=True) if asked is not None else {}
    values = {f"structured_outputs.{name}": named.get(name) for name in KINDS}
    old = [f"guided_{name}" for name in KINDS]
    values |= {name: getattr(body, name, None) for name in ("regex", "grammar", *old)}
    for field, value in values.items():
        name = field.removeprefix("structured_outputs.").removeprefix("guided_")
        if value is not None and value is not False:
            yield field, KINDS[name], value
    if isinstance(body, ChoiceFields):
        yield from _response_format("response_format", body.response_format)
    if isinstance(body, ResponsesRequest) and body.text is not None:
        yield from _response_format("text.format", body.text.format)
    if isinstance(body, ChatRequest) and body.tools:
        names = forced_functions(body)
        if names:
            wants_several = body.tool_choice == "required" and body.parallel_tool_calls is not False
            several = wants_several and template is not None and template.takes_several_calls
            schema = call_schema(body.tools, names, may_be_several=several)
            yield "tool_choice", "json_schema", schema


def _response_format(field: str, asked: object) -> Iterator[tuple[str, StructuredKind, Any]]:
    if isinstance(asked, JsonSchemaFormat):
        asked = asked.json_schema
    if isinstance(asked, JsonObjectFormat) and asked.schema_ is None:
        yield field, "json_object", True
    elif isinstance(asked, JsonObjectFormat | JsonSchemaSpec):
        if asked.schema_ is None:
            raise RequestError(f"{field} needs a schema", field)
        yield field, "json_schema", asked.schema_


def _check_limits(params: SamplingParams, settings: ApiSettings) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > settings.max_logprobs:
            most, got = settings.max_logprobs, getattr(params, name)
            raise RequestError(f"{name} must be between 0 and {most}, got {got}", name)
    stops = settings.max_stop_strings, settings.max_stop_length
    words = settings.max_bad_words, settings.max_bad_word_length
    for field, what, one, texts, (most, longest) in (
        ("stop", "strings", "stop string", params.stop_strings, stops),
        # The engine encodes them between two steps.
        ("bad_words", "texts", "bad word", params.bad_words or (), words),
    ):
        if len(texts) > most:
            message = f"{field} holds {len(texts)} {what}, at most {most} are allowed"
            raise RequestError(message, field)
        if any(len(text) > longest for text in texts):
            raise RequestError(f"a {one} may have at most {longest} characters", field)
