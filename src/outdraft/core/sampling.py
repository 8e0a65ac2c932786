"""Sampling parameters of one request, with vLLM's names and meanings."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outdraft.core.errors import RequestError, from_mapping
from outdraft.core.structured_outputs import StructuredOutput, StructuredOutputsParams

MAX_INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """One request's wishes for speculation; the engine's configuration is the upper bound.

    Attributes:
        enabled: False for plain decoding.
        method: None for the engine's own choice, or the name of one source that the engine was
            configured with.
        num_speculative_tokens: drafts a step, None for the engine's number.
        trace: report the drafts of every step.
    """

    enabled: bool = True
    method: str | None = None
    num_speculative_tokens: int | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        if (wrong := self._what_is_wrong()) is not None:
            raise RequestError(wrong, "speculation")

    def _what_is_wrong(self) -> str | None:
        for name in ("enabled", "trace"):
            if not isinstance(getattr(self, name), bool):
                return f"{name} of speculation must be true or false"
        if self.method is not None and not isinstance(self.method, str):
            return f"method of speculation must be a text, got {self.method!r}"
        number = self.num_speculative_tokens
        is_whole = isinstance(number, int) and not isinstance(number, bool)
        if number is not None and (not is_whole or number < 0):
            must = "must be a whole number of at least 0"
            return f"num_speculative_tokens of speculation {must}, got {number!r}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. Validates itself.

    The processed distribution of a row is: structured, allowed_token_ids, bad_words, min_tokens,
    logit_bias, penalties, then temperature, min_p, top_k, top_p, in this order (as in vLLM).
    If no token would be left, an output of a given form still keeps to its form.

    A request with a `seed` has the same text every time, with any drafts or none and beside any
    other requests: its drafts are compared with the target's own choices. One without is verified
    by the engine's `rejection_sample_method`. A seed of -1 is none, as in vLLM.

    Raises:
        RequestError: a value is out of its range; `field` names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    prediction: str | Sequence[int] | None = None  # the expected output
    structured: StructuredOutput | None = None
    structured_outputs: StructuredOutputsParams | None = None  # vLLM's form of `structured`
    speculation: SpeculationParams = field(default_factory=SpeculationParams)

    def __post_init__(self) -> None:
        for name, kind in _PARTS.items():
            if isinstance(values := getattr(self, name), Mapping):
                object.__setattr__(self, name, from_mapping(kind, values, name))
        self._check_types()
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        if self.structured_outputs is not None:
            structured = self.structured_outputs.structured_output()
            if self.structured not in (None, structured):
                message = "structured and structured_outputs ask for different forms"
                raise RequestError(message, "structured_outputs")
            object.__setattr__(self, "structured", structured)
        for name, bound in (("repetition_penalty", "above 0"), ("top_p", "above 0 and at most 1")):
            if getattr(self, name) <= 0:
                raise RequestError(f"{name} must be {bound}, got {getattr(self, name)}", name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                "min_tokens",
            )
        if any(not text for text in self.stop_strings):
            raise RequestError("stop must not hold an empty string", "stop")
        if self.stop_strings and not self.detokenize:
            raise RequestError("stop strings need detokenize=True", "stop")
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) == 0:
            raise RequestError("allowed_token_ids must not be empty", "allowed_token_ids")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Parameters from JSON-like values.

        Raises:
            RequestError: an unknown name, or a value out of range.
        """
        return from_mapping(cls, values, "")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        added = self.presence_penalty, self.frequency_penalty
        return any(added) or self.repetition_penalty != 1.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def _check_types(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                _check_range(name, value, low, high)
            if name in _WHOLE and not isinstance(value, int | None):
                raise RequestError(f"{name} must be a whole number, got {value!r}", name)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false", name)
        if self.stop is not None and not isinstance(self.stop, str):
            _check_list("stop", self.stop, str)
        if self.prediction is not None and not isinstance(self.prediction, str):
            _check_list("prediction", self.prediction, int)
        for name, kind in _LISTS:
            if getattr(self, name) is not None:
                _check_list(name, getattr(self, name), kind)
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise RequestError("logit_bias must map token ids to numbers", "logit_bias")
        for bias in (self.logit_bias or {}).values():
            _check_range("logit_bias", bias, -100, 100)
        for name, kind in _PARTS.items():
            part = getattr(self, name)
            if not isinstance(part, kind) and (part is not None or name == "speculation"):
                raise RequestError(f"{name} must be {kind.__name__} or a mapping", name)


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("n", 1, 128),
    ("temperature", 0.0, 100.0),
    ("top_k", -1, math.inf),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 100.0),
    ("min_tokens", 0, MAX_INT64),
    ("max_tokens", 1, math.inf),
    ("logprobs", 0, 100),
    ("prompt_logprobs", 0, 100),
    ("seed", -MAX_INT64 - 1, MAX_INT64),
)
_OPTIONAL = ("max_tokens", "logprobs", "prompt_logprobs", "seed")
_WHOLE = ("n", "top_k", "min_tokens", *_OPTIONAL)
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens")
_LISTS = (("stop_token_ids", int), ("allowed_token_ids", int), ("bad_words", str))
_PARTS: dict[str, type] = {
    "speculation": SpeculationParams,
    "structured": StructuredOutput,
    "structured_outputs": StructuredOutputsParams,
}


def _check_list(name: str, values: object, kind: type) -> None:
    what = "texts" if kind is str else "whole numbers"
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise RequestError(f"{name} must be a list of {what}, got {values!r}", name)
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise RequestError(f"{name} must hold {what} only, got {value!r}", name)


def _check_range(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, got {value!r}", name)
    if not low <= value <= high:  # also false for NaN
        bound = f"between {low} and {high}" if high != math.inf else f"at least {low}"
        raise RequestError(f"{name} must be {bound}, got {value}", name)
