"""How the engine speculates: a verification rule and a list of draft sources, in priority order.

The JSON form has vLLM's keys, so that a configuration can be carried over.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from outdraft.config.checks import check_choice, check_number, check_whole
from outdraft.core.draft import MAX_DRAFTS, DraftSource
from outdraft.core.errors import ConfigError, did_you_mean

METHODS = ("draft_model", "ngram", "suffix", "combined")
REJECTION_METHODS = ("block", "token", "drafter_invariant")
DRAFT_SAMPLE_METHODS = ("probabilistic", "greedy")
DEFAULT_NUM_DRAFTS = 4

RejectionMethod = Literal["block", "token", "drafter_invariant"]
DraftSampleMethod = Literal["probabilistic", "greedy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramConfig:
    """Prompt lookup: copy what followed the last occurrence of the text's newest n tokens."""

    prompt_lookup_min: int = 2  # tokens
    prompt_lookup_max: int = 5  # tokens
    source: DraftSource = field(default=DraftSource.NGRAM, init=False)

    def __post_init__(self) -> None:
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            check_whole(name, getattr(self, name), 1)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                "prompt_lookup_min must not exceed prompt_lookup_max, got "
                f"prompt_lookup_min={self.prompt_lookup_min}, "
                f"prompt_lookup_max={self.prompt_lookup_max}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixConfig:
    """Suffix decoding (arXiv 2411.04975): frequent continuations in this and earlier texts."""

    suffix_decoding_max_tree_depth: int = 24  # tokens
    suffix_decoding_max_cached_requests: int = 1000  # finished requests, 0: none
    suffix_decoding_max_spec_factor: float = 1.0  # drafts per matched token
    suffix_decoding_min_token_prob: float = 0.1
    source: DraftSource = field(default=DraftSource.SUFFIX, init=False)

    def __post_init__(self) -> None:
        for name, low in (("max_tree_depth", 2), ("max_cached_requests", 0)):
            option = f"suffix_decoding_{name}"
            check_whole(option, getattr(self, option), low)
        for name, high in (("max_spec_factor", math.inf), ("min_token_prob", 1)):
            option = f"suffix_decoding_{name}"
            check_number(option, getattr(self, option), 0, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelConfig:
    """A small model of the same vocabulary that drafts a chain."""

    model: str  # directory or hub name
    max_model_len: int | None = None  # tokens; None: what the drafter's own config says
    draft_sample_method: DraftSampleMethod = "probabilistic"
    source: DraftSource = field(default=DraftSource.MODEL, init=False)

    def __post_init__(self) -> None:
        if self.max_model_len is not None:
            check_whole("max_model_len", self.max_model_len, 1)
        check_choice("draft_sample_method", self.draft_sample_method, DRAFT_SAMPLE_METHODS)


SourceConfig = NgramConfig | SuffixConfig | DraftModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """What drafts, how much, and how drafts are verified.

    Attributes:
        sources: draft sources in priority order; empty means plain decoding.
        num_speculative_tokens: most drafts of one request in one step.
        rejection_sample_method: rule for drafts that were sampled from a known distribution.
            `drafter_invariant` makes the output a function of the seed alone.
        disable_by_batch_size: no drafts while more than this many requests run; None: never.
    """

    sources: tuple[SourceConfig, ...] = ()
    num_speculative_tokens: int = DEFAULT_NUM_DRAFTS
    rejection_sample_method: RejectionMethod = "block"
    disable_by_batch_size: int | None = None

    def __post_init__(self) -> None:
        check_whole("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFTS)
        check_choice("rejection_sample_method", self.rejection_sample_method, REJECTION_METHODS)
        if self.disable_by_batch_size is not None:
            check_whole("disable_by_batch_size", self.disable_by_batch_size, 1)

    @property
    def draft_model(self) -> DraftModelConfig | None:
        return next((s for s in self.sources if isinstance(s, DraftModelConfig)), None)

    @property
    def methods(self) -> tuple[DraftSource, ...]:
        return tuple(source.source for source in self.sources)


_NGRAM_KEYS = ("prompt_lookup_min", "prompt_lookup_max")
_SUFFIX_KEYS = (
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)
_MODEL_KEYS = ("model", "max_model_len", "draft_sample_method")
_COMMON_KEYS = ("num_speculative_tokens", "rejection_sample_method", "disable_by_batch_size")
_KEYS_OF_METHOD = {
    "ngram": _NGRAM_KEYS,
    "suffix": _SUFFIX_KEYS,
    "draft_model": _MODEL_KEYS,
    "combined": (*_NGRAM_KEYS, *_SUFFIX_KEYS, *_MODEL_KEYS),
}


def parse_speculative_config(values: Mapping[str, Any] | None) -> SpeculationConfig:
    """The configuration that vLLM-style JSON describes; None means no speculation.

    Raises:
        ConfigError: an unknown key (with the closest known one), one that the method does not
            use, or a value out of range.
    """
    if values is None:
        return SpeculationConfig()
    known = {"method", *_COMMON_KEYS, *_KEYS_OF_METHOD["combined"]}
    given: dict[str, Any] = {}
    for written, value in values.items():
        key = written.replace("-", "_")
        if key not in known:
            raise ConfigError(f"unknown speculative_config key {key!r}: {did_you_mean(key, known)}")
        if value is not None:  # null stands for the default
            given[key] = value
    method = given.pop("method", "draft_model" if "model" in given else None)
    if method is None:
        raise ConfigError(f"speculative_config needs a method, one of {', '.join(METHODS)}")
    check_choice("method", method, METHODS)
    for key in given:
        if key not in _COMMON_KEYS and key not in _KEYS_OF_METHOD[method]:
            raise ConfigError(
                f"speculative_config key {key!r} has no meaning for method {method!r}"
            )
    sources = _sources(method, given)
    common = _chosen(given, _COMMON_KEYS)
    if isinstance(sources[0], SuffixConfig) and len(sources) == 1:
        depth = sources[0].suffix_decoding_max_tree_depth
        common.setdefault("num_speculative_tokens", min(depth, MAX_DRAFTS))
    return SpeculationConfig(sources=sources, **common)


def _sources(method: str, given: Mapping[str, Any]) -> tuple[SourceConfig, ...]:
    sources: list[SourceConfig] = []
    if method in ("suffix", "combined"):
        sources.append(SuffixConfig(**_chosen(given, _SUFFIX_KEYS)))
    if method in ("ngram", "combined"):
        bounds = _chosen(given, _NGRAM_KEYS)
        if len(bounds) == 1:  # as in vLLM, one bound alone stands for both
            [bound] = bounds.values()
            bounds = {"prompt_lookup_min": bound, "prompt_lookup_max": bound}
        sources.append(NgramConfig(**bounds))
    if method == "draft_model" and "model" not in given:
        raise ConfigError("speculative_config of method 'draft_model' needs a model")
    if "model" in given:
        sources.append(DraftModelConfig(**_chosen(given, _MODEL_KEYS)))
    return tuple(sources)


def _chosen(given: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: given[key] for key in keys if key in given}
