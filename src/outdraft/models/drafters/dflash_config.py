"""The config.json of a DFlash or DSpark drafter, in one shape for the layouts that exist.

Chen et al. 2026, arXiv 2602.06036, and DSpark, arXiv 2607.05147. Their authors write the config of
a Qwen 3 with a few keys more, the speculators library as config.py says.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from outdraft.config.speculation import BLOCK_SOURCES
from outdraft.core.draft import MAX_DRAFTS, DraftSource
from outdraft.core.errors import ConfigError, did_you_mean
from outdraft.models.checkpoints.config_json import read_count
from outdraft.models.decoder.config import ModelConfig
from outdraft.models.drafters.config import (
    SPECULATORS_KIND,
    DrafterConfig,
    check_supported,
    drafter_options,
    layer_options,
    read_draft_vocab_size,
    read_flag,
    read_layers,
    read_mask_token,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(DrafterConfig):
    """The shape of one drafter of blocks.

    Attributes:
        kind: DFlash or DSpark, which is DFlash with two heads more.
        block_size: rows of a pass: the newest token, and mask tokens after it.
        mask_token_id: of the target's vocabulary.
        taps: after how many of the target's layers its streams are read; 0: the embedding.
        is_causal: for each layer, whether a row of a block sees the rows before it only.
        drafts_from_anchor: the row of the newest token drafts, too.
        markov_rank: of DSpark's head of token pairs; 0: there is none.
        has_confidence: there is a head that says how likely each draft is accepted.
        confidence_reads_token: it reads the token before the draft, by the head of token pairs.
    """

    kind: DraftSource
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    is_causal: tuple[bool, ...]
    drafts_from_anchor: bool
    markov_rank: int = 0
    has_confidence: bool = False
    confidence_reads_token: bool = False

    @property
    def num_drafts(self) -> int:
        """Most drafts of a pass."""
        return self.block_size if self.drafts_from_anchor else self.block_size - 1

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> "DFlashConfig":
        """The config from the content of config.json.

        Raises:
            ConfigError: a value is missing, contradicts another, or is not supported.
        """
        kind, options = _kind(raw), drafter_options(raw, "dflash_config", "dspark_config")
        check_supported(options, _UNSUPPORTED)
        layer = _layer_config(raw)
        block_size = read_count(options, "block_size")
        is_spark = kind is DraftSource.DSPARK
        config = cls(
            kind=kind,
            layer=layer,
            block_size=block_size,
            mask_token_id=_mask_token(raw, layer.vocab_size),
            taps=_taps(options),
            is_causal=_causal_layers(options, layer),
            draft_vocab_size=read_draft_vocab_size(options, layer.vocab_size),
            target_hidden_size=read_count(options, "target_hidden_size", default=layer.hidden_size),
            drafts_from_anchor=read_flag(options, "sample_from_anchor", is_spark),
            **(_spark(options) if is_spark else {}),
        )
        _check_block(config)
        return config


_KINDS = {
    "DFlashDraftModel": DraftSource.DFLASH,
    "DFlashSpeculator": DraftSource.DFLASH,
    "DSparkDraftModel": DraftSource.DSPARK,
    "DSparkSpeculator": DraftSource.DSPARK,
    "Qwen3DSparkModel": DraftSource.DSPARK,
}
_FULL, _SLIDING = "full_attention", "sliding_attention"

# Keys that change what is computed, and the values at which they do not.
_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "quantization_config": lambda value: value is None,
    "input_embedding_scale": lambda value: value in (None, 1, 1.0),
    "final_logit_softcapping": lambda value: not value,
    "dflash_context_residual": lambda value: not value,
    "dflash_block_position_embedding": lambda value: not value,
    "dflash_gated_layer_fusion": lambda value: not value,
    "dflash2_dynamic_conv": lambda value: not value,
    "dflash2_candidate_selector": lambda value: not value,
    "enable_correction_head": lambda value: not value,
    "draft_adapter_rank": lambda value: not value,
    "topk_context": lambda value: not value,
}


def _kind(raw: Mapping[str, Any]) -> DraftSource:
    """DFlash or DSpark, by the speculators' type, else by the architecture's name."""
    if (written := raw.get(SPECULATORS_KIND)) is not None:
        if written not in BLOCK_SOURCES:
            raise ConfigError(
                f"config.json: {SPECULATORS_KIND} {written!r} drafts no blocks: "
                f"{did_you_mean(str(written), BLOCK_SOURCES)}"
            )
        return DraftSource(written)
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in _KINDS:
        raise ConfigError(
            f"config.json: architectures {names} is no DFlash or DSpark drafter; supported: "
            f"{', '.join(_KINDS)}"
        )
    return _KINDS[names[0]]


def _layer_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The layers, with the windows that `layer_types` says."""
    layer = layer_options(raw)
    model_type = layer.get("model_type", "qwen3")
    if model_type != "qwen3":
        raise ConfigError(
            f"config.json: DFlash layers of model_type {model_type!r} are not supported, only qwen3"
        )
    # Here a window needs no use_sliding_window.
    own = {key: value for key, value in layer.items() if key != "use_sliding_window"}
    config = ModelConfig.from_mapping({**own, "architectures": ["Qwen3ForCausalLM"]})
    kinds = layer.get("layer_types") or [_FULL] * config.num_layers
    if len(kinds) != config.num_layers:
        raise ConfigError(
            f"config.json: layer_types has {len(kinds)} entries for {config.num_layers} layers"
        )
    if unknown := [kind for kind in kinds if kind not in (_FULL, _SLIDING)]:
        raise ConfigError(f"config.json: unknown layer type {unknown[0]!r}")
    window = read_count(layer, "sliding_window") if _SLIDING in kinds else None
    return replace(config, windows=tuple(window if kind == _SLIDING else None for kind in kinds))


def _causal_layers(options: Mapping[str, Any], layer: ModelConfig) -> tuple[bool, ...]:
    """True for each causal layer: sliding layers are, unless the config says otherwise."""
    written = options.get("is_causal")
    if written is not None:
        return (read_flag(options, "is_causal"),) * layer.num_layers
    if read_flag(options, "sliding_window_non_causal"):
        return (False,) * layer.num_layers
    return tuple(window is not None for window in layer.windows)


def _spark(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that DSpark adds to DFlash."""
    rank = 0 if options.get("markov_rank") == 0 else read_count(options, "markov_rank", default=256)
    kind = options.get("markov_head_type", "vanilla")
    if rank and kind != "vanilla":
        raise ConfigError(
            f"config.json: markov_head_type {kind!r} is not supported: only 'vanilla' is"
        )
    has_confidence = read_flag(options, "enable_confidence_head", True)
    reads_token = has_confidence and read_flag(options, "confidence_head_with_markov", True)
    if reads_token and not rank:
        raise ConfigError("config.json: confidence_head_with_markov needs a markov_rank above 0")
    return {
        "markov_rank": rank,
        "has_confidence": has_confidence,
        "confidence_reads_token": reads_token,
    }


def _taps(options: Mapping[str, Any]) -> tuple[int, ...]:
    """Streams are counted from the embedding on: `target_layer_ids` name the layer that writes one,
    `aux_hidden_state_layer_ids` the one after it."""
    for key, shift in (("target_layer_ids", 1), ("aux_hidden_state_layer_ids", 0)):
        if options.get(key) is not None:
            return tuple(layer + shift for layer in read_layers(options, key))
    raise ConfigError(
        "config.json: target_layer_ids or aux_hidden_state_layer_ids must name the target's layers"
    )


def _mask_token(raw: Mapping[str, Any], vocab_size: int) -> int:
    token = read_mask_token(raw, vocab_size)
    if token is None:
        raise ConfigError("config.json: mask_token_id is missing")
    return token


def _check_block(config: DFlashConfig) -> None:
    """Raise ConfigError if attention cannot express what the rows of a block see."""
    least, size = (1 if config.drafts_from_anchor else 2), config.block_size
    if not least <= size <= MAX_DRAFTS:
        raise ConfigError(
            f"config.json: block_size must be from {least} to {MAX_DRAFTS}, got {size}"
        )
    windows = [window for window in config.layer.windows if window is not None]
    if min(windows, default=size) < size:
        raise ConfigError(
            f"config.json: sliding_window {min(windows)} is shorter than a block of {size}"
        )
