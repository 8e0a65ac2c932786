"""Speculation of an engine: a verification rule and draft sources in priority order.

Its JSON has vLLM's keys, so that a configuration can be carried over.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from outdraft.config.fields import check_choice, check_fields, check_whole
from outdraft.core.draft import MAX_DRAFTS, DraftSource, TreeShape
from outdraft.core.errors import ConfigError, did_you_mean
from outdraft.core.weights import QUANTIZATIONS

HOST_SOURCES = (DraftSource.PREDICTION, DraftSource.SUFFIX, DraftSource.NGRAM)
NETWORK_SOURCES = tuple(source for source in DraftSource if source not in HOST_SOURCES)
OWN_SOURCES = (DraftSource.MTP, DraftSource.SELF)  # weights of the target's own checkpoint
HEAD_SOURCES = (DraftSource.MEDUSA, DraftSource.MLP)
BLOCK_SOURCES = (DraftSource.DFLASH, DraftSource.DSPARK)
PARALLEL_SOURCES = (DraftSource.MODEL, DraftSource.EAGLE3)
AUTO = "auto"
MOST_OF_NETWORK, MOST_OF_NGRAM = 7, 10  # drafts a step, where "auto" chooses
POSTERIOR_THRESHOLD, POSTERIOR_ALPHA = 0.09, 0.3  # Medusa's own

RejectionMethod = Literal["block", "token", "drafter_invariant", "lossy_typical"]
Branching = Annotated[int, 1, MAX_DRAFTS]  # most continuations of one context; 1: chains


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramConfig:
    """Prompt lookup: copy what followed the last occurrence of the text's newest n tokens."""

    prompt_lookup_min: Annotated[int, 1] = 2  # tokens
    prompt_lookup_max: Annotated[int, 1] = 5  # tokens
    branching: Branching = 1
    source: DraftSource = field(default=DraftSource.NGRAM, init=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                "prompt_lookup_min must not exceed prompt_lookup_max, got "
                f"prompt_lookup_min={self.prompt_lookup_min}, "
                f"prompt_lookup_max={self.prompt_lookup_max}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixConfig:
    """Suffix decoding (arXiv 2411.04975): frequent continuations in this and earlier texts."""

    suffix_decoding_max_tree_depth: Annotated[int, 2] = 24  # tokens
    suffix_decoding_max_cached_requests: Annotated[int, 0] = 1000  # finished requests, 0: none
    suffix_decoding_max_spec_factor: Annotated[float, 0] = 1.0  # drafts per matched token
    suffix_decoding_min_token_prob: Annotated[float, 0, 1] = 0.1
    branching: Branching = 1
    source: DraftSource = field(default=DraftSource.SUFFIX, init=False)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNetworkConfig:
    """A network that drafts: a small model, a head on the target's hidden states, or the target.

    A small model of another vocabulary than the target's drafts the tokens that both know (arXiv
    2502.05202).

    Attributes:
        model: directory or hub name; "": the target's own checkpoint, of `mtp` and `self`.
        source: what kind of network it is.
        max_model_len: tokens; None: what the network's own config says.
        parallel_drafting: all drafts in one pass, with mask tokens (PARD, P-EAGLE).
        min_vocabulary_overlap: share of the target's tokens that a small model must know. A good
            small vocabulary before a large one may know an eighth of it; one that has little but
            single bytes knows a hundredth.
        quantization: of its weights, as EngineConfig's for the target; it changes no output. With
            `self` a copy of the target in these bits drafts.
        kv_budget: tokens of each text that the target attends to while it drafts for itself; None:
            all of them. For `self` only.
        draft_tensor_parallel_size: ranks that share one such network: a divisor of
            tensor_parallel_size. 1: every rank has a whole one for requests of its own, and drafts
            without a message to another rank.
        tree: None: chains.
    """

    model: str = ""
    source: DraftSource = DraftSource.MODEL
    max_model_len: Annotated[int | None, 1] = None
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"
    parallel_drafting: bool = False
    min_vocabulary_overlap: Annotated[float, 0, 1] = 0.1
    quantization: Annotated[str | None, QUANTIZATIONS] = None
    kv_budget: Annotated[int | None, 1] = None
    draft_tensor_parallel_size: Annotated[int, 1] = 1
    tree: TreeShape | None = None

    def __post_init__(self) -> None:
        check_choice("method", self.source, NETWORK_SOURCES)
        check_fields(self)
        if not isinstance(self.model, str):
            raise ConfigError(f"model must be a directory or a name, got {self.model!r}")
        self._check_who_drafts()
        if self.parallel_drafting and self.source not in PARALLEL_SOURCES:
            raise ConfigError(
                "parallel_drafting is for draft_model and eagle3; "
                f"{self.source} makes all drafts in one pass anyway"
                if self.source in (*HEAD_SOURCES, *BLOCK_SOURCES)
                else f"parallel_drafting is for draft_model and eagle3, not for {self.source}"
            )
        if self.parallel_drafting and self.tree is not None:
            raise ConfigError("parallel_drafting drafts chains: leave out the tree")

    def _check_who_drafts(self) -> None:
        method = str(self.source)
        if self.source not in OWN_SOURCES and not self.model:
            raise ConfigError(f"method {method!r} needs a model")
        if self.source in OWN_SOURCES and self.model:
            raise ConfigError(
                f"method {method!r} drafts with weights of the target's checkpoint: leave out "
                f"{self.model!r}"
            )
        if self.source is not DraftSource.SELF:
            if self.kv_budget is not None:
                raise ConfigError(f"kv_budget is for method 'self', not for {method!r}")
            return
        if self.quantization is None and self.kv_budget is None:
            raise ConfigError(
                "method 'self' needs a quantization of the weights that draft, a kv_budget of "
                "tokens that drafts attend to, or both: else drafting costs what the target costs"
            )

    @property
    def samples(self) -> bool:
        """True if drafts are drawn from the network's distribution, which is then kept."""
        return self.draft_sample_method == "probabilistic"


SourceConfig = NgramConfig | SuffixConfig | DraftNetworkConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Draft sources, their limits, and the verification of drafts.

    Attributes:
        sources: draft sources in priority order; empty means plain decoding.
        num_speculative_tokens: most drafts of one request in one step; "auto": `max_drafts` says.
        control: `adaptive`: each step drafts what brings more tokens per time, at most the maximum
            and often less or nothing. `fixed`: every request drafts the maximum in every step,
            whatever it brings; for comparisons.
        rejection_sample_method: rule for drafts that were sampled from a known distribution.
            `drafter_invariant` makes the output a function of the seed alone, as it always is of
            requests that bring a seed: those are verified like that by any rule. `lossy_typical` is
            Medusa's typical acceptance (arXiv 2401.10774): it changes what sampled requests say.
        posterior_threshold, posterior_alpha: of `lossy_typical`: a draft is accepted where its
            probability exceeds min(threshold, alpha * exp(-entropy)).
        disable_by_batch_size: no drafts while more than this many requests run; None: never.
    """

    sources: tuple[SourceConfig, ...] = ()
    num_speculative_tokens: int | Literal["auto"] = AUTO
    control: Literal["adaptive", "fixed"] = "adaptive"
    rejection_sample_method: RejectionMethod = "block"
    posterior_threshold: Annotated[float, 1e-6, 1] = POSTERIOR_THRESHOLD
    posterior_alpha: Annotated[float, 1e-6, 1] = POSTERIOR_ALPHA
    disable_by_batch_size: Annotated[int | None, 1] = None

    def __post_init__(self) -> None:
        if self.num_speculative_tokens != AUTO:
            check_whole("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFTS)
        check_fields(self)
        bounds = self.posterior_threshold, self.posterior_alpha
        if self.is_lossless and bounds != (POSTERIOR_THRESHOLD, POSTERIOR_ALPHA):
            raise ConfigError(
                "posterior_threshold and posterior_alpha have a meaning for "
                "rejection_sample_method='lossy_typical' only"
            )
        if twice := [source for source in self.methods if self.methods.count(source) > 1]:
            raise ConfigError(f"sources names {twice[0]} twice")
        networks = [s.source for s in self.sources if isinstance(s, DraftNetworkConfig)]
        if len(networks) > 1:
            raise ConfigError(
                f"one network drafts beside any sources of the host, not {' and '.join(networks)}"
            )
        tree = self.network.tree if self.network is not None else None
        if tree is not None and tree.num_rows != self.max_drafts:
            raise ConfigError(
                f"the tree has {tree.num_rows} rows, but num_speculative_tokens is "
                f"{self.num_speculative_tokens}: leave one of them out"
            )

    @property
    def network(self) -> DraftNetworkConfig | None:
        return next((s for s in self.sources if isinstance(s, DraftNetworkConfig)), None)

    @property
    def max_drafts(self) -> int:
        """Most drafts of one request in one step; predictions may be longer."""
        if self.num_speculative_tokens != AUTO:
            return self.num_speculative_tokens
        network = self.network
        if network is not None:
            return network.tree.num_rows if network.tree is not None else MOST_OF_NETWORK
        depths = [
            source.suffix_decoding_max_tree_depth
            if isinstance(source, SuffixConfig)
            else MOST_OF_NGRAM
            for source in self.sources
        ]
        return min(max(depths, default=1), MAX_DRAFTS)

    @property
    def is_lossless(self) -> bool:
        return self.rejection_sample_method != "lossy_typical"

    @property
    def methods(self) -> tuple[DraftSource, ...]:
        return tuple(source.source for source in self.sources)


METHODS = (*map(str, NETWORK_SOURCES), "ngram", "suffix", "combined")
# Names that vLLM has, or had, for the layers of one family.
_OTHER_NAMES: dict[str, str] = dict.fromkeys(("deepseek_mtp", "glm4_moe_mtp", "mimo_mtp"), "mtp")


def _options(kind: type) -> tuple[str, ...]:
    left_out = ("sources", "source", "tree", "kv_budget")
    return tuple(f.name for f in fields(kind) if f.init and f.name not in left_out)


_NGRAM_KEYS = _options(NgramConfig)
_SUFFIX_KEYS = _options(SuffixConfig)
_MODEL_KEYS = (*_options(DraftNetworkConfig), "tree_levels")
_OF_MODELS_ONLY = ("parallel_drafting", "min_vocabulary_overlap")
_NETWORK_KEYS = tuple(key for key in _MODEL_KEYS if key not in _OF_MODELS_ONLY)
_SELF_KEYS = ("quantization", "kv_budget", "max_model_len", "draft_sample_method", "tree_levels")
_COMMON_KEYS = _options(SpeculationConfig)
_KEYS_OF_METHOD = dict.fromkeys(METHODS, _NETWORK_KEYS) | {
    "ngram": _NGRAM_KEYS,
    "suffix": _SUFFIX_KEYS,
    "draft_model": _MODEL_KEYS,
    "eagle3": (*_NETWORK_KEYS, "parallel_drafting"),
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
    method, given = _read(values, _COMMON_KEYS)
    common = _chosen(given, _COMMON_KEYS)
    sources = _listed(given) if "sources" in given else _sources(method, given)
    return SpeculationConfig(sources=sources, **common)


def _read(values: Mapping[str, Any], more: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """The method, and the values by their names in Python; null stands for the default.

    more: keys that are allowed beside those of the method.
    """
    known = {"method", *_COMMON_KEYS, *_KEYS_OF_METHOD["combined"], *_SELF_KEYS}
    given: dict[str, Any] = {}
    for written, value in values.items():
        key = written.replace("-", "_")
        if key not in known:
            raise ConfigError(f"unknown speculative_config key {key!r}: {did_you_mean(key, known)}")
        if value is not None:
            given[key] = value
    fallback = "draft_model" if "model" in given else "combined" if "sources" in given else None
    method = given.pop("method", fallback)
    if method is None:
        raise ConfigError(f"speculative_config needs a method, one of {', '.join(METHODS)}")
    if isinstance(method, str):
        method = _OTHER_NAMES.get(method, method)
    check_choice("method", method, METHODS)
    _check_keys(given, method, (*more, *_KEYS_OF_METHOD[method]))
    return method, given


def _check_keys(given: Mapping[str, Any], method: str, allowed: Sequence[str]) -> None:
    for key in given:
        if key not in allowed:
            raise ConfigError(
                f"speculative_config key {key!r} has no meaning for method {method!r}"
            )


def _listed(given: Mapping[str, Any]) -> tuple[SourceConfig, ...]:
    """The draft sources that `sources` lists."""
    _check_keys(given, "combined, with sources", (*_COMMON_KEYS, "sources"))
    listed = given["sources"]
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise ConfigError(f"sources must be a list of objects with a method, got {listed!r}")
    sources: list[SourceConfig] = []
    for entry in listed:
        if not isinstance(entry, Mapping):
            raise ConfigError(f"sources must be a list of objects with a method, got {entry!r}")
        method, own = _read(entry)
        if method == "combined":
            raise ConfigError("sources must not hold another combination")
        sources += _sources(method, own)
    return tuple(sources)


def _sources(method: str, given: Mapping[str, Any]) -> tuple[SourceConfig, ...]:
    sources: list[SourceConfig] = []
    if method in ("suffix", "combined"):
        sources.append(SuffixConfig(**_chosen(given, _SUFFIX_KEYS)))
    if method in ("ngram", "combined"):
        bounds = _chosen(given, ("prompt_lookup_min", "prompt_lookup_max"))
        if len(bounds) == 1:  # as in vLLM, one bound alone stands for both
            [(name, bound)] = bounds.items()
            check_whole(name, bound, 1)  # else the error could name the other one
            bounds = {"prompt_lookup_min": bound, "prompt_lookup_max": bound}
        sources.append(NgramConfig(**bounds, **_chosen(given, ("branching",))))
    if method in map(str, NETWORK_SOURCES) or any(key in given for key in _MODEL_KEYS):
        if "model" not in given and method not in OWN_SOURCES:
            raise ConfigError(f"speculative_config of method {method!r} needs a model")
        kind = DraftSource.MODEL if method == "combined" else DraftSource(method)
        options = _chosen(given, {*_MODEL_KEYS, *_SELF_KEYS} - {"tree_levels"})
        tree = TreeShape.of_levels(given["tree_levels"]) if "tree_levels" in given else None
        sources.append(DraftNetworkConfig(source=kind, tree=tree, **options))
    return tuple(sources)


def _chosen(given: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: given[key] for key in keys if key in given}
