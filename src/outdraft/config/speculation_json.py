"""A SpeculationConfig in JSON: with vLLM's keys, so that a configuration can be carried over."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from outdraft.config.checks import check_choice, check_whole
from outdraft.config.speculation import (
    NETWORK_SOURCES,
    OWN_SOURCES,
    DraftNetworkConfig,
    NgramConfig,
    SourceConfig,
    SpeculationConfig,
    SuffixConfig,
)
from outdraft.core.draft import DraftSource, TreeShape
from outdraft.core.errors import ConfigError, did_you_mean

METHODS = (*map(str, NETWORK_SOURCES), "ngram", "suffix", "combined")
# Names that vLLM has, or had, for the layers of one family.
_OTHER_NAMES: dict[str, str] = dict.fromkeys(("deepseek_mtp", "glm4_moe_mtp", "mimo_mtp"), "mtp")


def _options(kind: type) -> tuple[str, ...]:
    left_out = ("sources", "source", "tree", "kv_budget")
    return tuple(f.name for f in fields(kind) if f.init and f.name not in left_out)


_NGRAM_BOUNDS = ("prompt_lookup_min", "prompt_lookup_max")
_NGRAM_KEYS = _options(NgramConfig)
_SUFFIX_KEYS = _options(SuffixConfig)
_NETWORK_KEYS = (
    "model",
    "max_model_len",
    "draft_sample_method",
    "quantization",
    "draft_tensor_parallel_size",
    "tree_levels",
)
_MODEL_KEYS = (*_options(DraftNetworkConfig), "tree_levels")
_SELF_KEYS = ("quantization", "kv_budget", "max_model_len", "draft_sample_method", "tree_levels")
_COMMON_KEYS = _options(SpeculationConfig)
_KEYS_OF_METHOD = {
    "ngram": _NGRAM_KEYS,
    "suffix": _SUFFIX_KEYS,
    "draft_model": _MODEL_KEYS,
    "eagle": _NETWORK_KEYS,
    "eagle3": (*_NETWORK_KEYS, "parallel_drafting"),
    "medusa": _NETWORK_KEYS,
    "mlp_speculator": _NETWORK_KEYS,
    "dflash": _NETWORK_KEYS,
    "dspark": _NETWORK_KEYS,
    "mtp": _NETWORK_KEYS,
    "self": _SELF_KEYS,
    "combined": (*_NGRAM_KEYS, *_SUFFIX_KEYS, *_MODEL_KEYS, "sources"),
}


def parse_speculative_config(values: Mapping[str, Any] | None) -> SpeculationConfig:
    """The configuration that vLLM-style JSON describes; None means no speculation.

    `combined` stands for suffix, ngram and, where there is a `model`, draft_model; or for what
    `sources` lists, each an object with its `method`, the preferred one first.

    Raises:
        ConfigError: an unknown key (with the closest known one), one that the method does not
            use, or a value out of range.
    """
    if values is None:
        return SpeculationConfig()
    if not isinstance(values, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers'
        raise ConfigError(f"speculative_config must be an object or null, got {values!r:.80}")
    given = _known(values)
    method = _method(given)
    _check_keys(given, method, (*_COMMON_KEYS, *_KEYS_OF_METHOD[method]))
    common = _chosen(given, _COMMON_KEYS)
    sources = _listed(given) if "sources" in given else _sources(method, given)
    return SpeculationConfig(sources=sources, **common)


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by their names in Python; null stands for the default."""
    known = {"method", *_COMMON_KEYS, *_KEYS_OF_METHOD["combined"], *_SELF_KEYS}
    given: dict[str, Any] = {}
    for written, value in values.items():
        key = written.replace("-", "_")
        if key not in known:
            raise ConfigError(f"unknown speculative_config key {key!r}: {did_you_mean(key, known)}")
        if value is not None:
            given[key] = value
    return given


def _method(given: dict[str, Any]) -> str:
    """Taken out of `given`."""
    fallback = "draft_model" if "model" in given else "combined" if "sources" in given else None
    method = given.pop("method", fallback)
    if method is None:
        raise ConfigError(f"speculative_config needs a method, one of {', '.join(METHODS)}")
    if isinstance(method, str):
        method = _OTHER_NAMES.get(method, method)
    check_choice("method", method, METHODS)
    return method


def _check_keys(given: Mapping[str, Any], method: str, allowed: Sequence[str]) -> None:
    for key in given:
        if key not in allowed:
            raise ConfigError(
                f"speculative_config key {key!r} has no meaning for method {method!r}"
            )


def _listed(given: Mapping[str, Any]) -> tuple[SourceConfig, ...]:
    """What `sources` says."""
    _check_keys(given, "combined, with sources", (*_COMMON_KEYS, "sources"))
    listed = given["sources"]
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise ConfigError(f"sources must be a list of objects with a method, got {listed!r}")
    sources: list[SourceConfig] = []
    for entry in listed:
        if not isinstance(entry, Mapping):
            raise ConfigError(f"sources must be a list of objects with a method, got {entry!r}")
        own = _known(entry)
        method = _method(own)
        if method == "combined":
            raise ConfigError("sources must not hold another combination")
        _check_keys(own, method, _KEYS_OF_METHOD[method])
        sources += _sources(method, own)
    return tuple(sources)


def _sources(method: str, given: Mapping[str, Any]) -> tuple[SourceConfig, ...]:
    sources: list[SourceConfig] = []
    if method in ("suffix", "combined"):
        sources.append(SuffixConfig(**_chosen(given, _SUFFIX_KEYS)))
    if method in ("ngram", "combined"):
        bounds = _chosen(given, _NGRAM_BOUNDS)
        if len(bounds) == 1:  # as in vLLM, one bound alone stands for both
            [(name, bound)] = bounds.items()
            check_whole(name, bound, 1)  # else the error could name the other one
            bounds = {"prompt_lookup_min": bound, "prompt_lookup_max": bound}
        sources.append(NgramConfig(**bounds, **_chosen(given, ("branching",))))
    if method in map(str, NETWORK_SOURCES) or any(key in given for key in _MODEL_KEYS):
        if "model" not in given and method not in OWN_SOURCES:
            raise ConfigError(f"speculative_config of method {method!r} needs a model")
        kind = DraftSource.MODEL if method == "combined" else DraftSource(method)
        keys = {*_MODEL_KEYS, *_SELF_KEYS} - {"tree_levels"}
        options = _chosen(given, tuple(keys))
        tree = TreeShape.of_levels(given["tree_levels"]) if "tree_levels" in given else None
        sources.append(DraftNetworkConfig(source=kind, tree=tree, **options))
    return tuple(sources)


def _chosen(given: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: given[key] for key in keys if key in given}
