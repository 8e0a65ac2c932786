"""The config.json of an EAGLE drafter, in one shape for the layouts that exist.

EAGLE's own repository and SpecForge write the config of a Llama with a few keys more, the
speculators library as config.py says, and vLLM puts the Llama's into `model`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outdraft.core.draft import DraftSource
from outdraft.core.errors import ConfigError, did_you_mean
from outdraft.models.checkpoints.config_json import read_count
from outdraft.models.decoder.config import ModelConfig
from outdraft.models.drafters.config import (
    SPECULATORS_KIND,
    DrafterConfig,
    check_supported,
    check_taps,
    drafter_options,
    layer_options,
    read_draft_vocab_size,
    read_flag,
    read_layers,
    read_mask_token,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(DrafterConfig):
    """The shape of one EAGLE drafter.

    Attributes:
        version: EAGLE (Li et al. 2024, arXiv 2401.15077; with trees it is EAGLE-2), EAGLE-3 (Li et
            al. 2025, arXiv 2503.01840; EAGLE-3.1 and P-EAGLE are options of it), or MTP, a layer
            for multi-token prediction as models/drafters/mtp.py says.
        taps: EAGLE-3: after how many of the target's layers the states are taken; None: as
            in the paper's checkpoints.
        may_count_from_0: `taps` may name layers, the first one 0, rather than count them.
        fc_bias: of the layer that takes in the target's states.
        layernorms: EAGLE, MTP: norms of the embedding, before layer 0 and before the head.
        input_norm: EAGLE, MTP: before layer 0.
        norm_before_fc: EAGLE-3: one norm over all tapped states together.
        fc_norm: EAGLE-3.1: a norm for each tapped state.
        norm_output: EAGLE-3.1, MTP: the state that is fed back is the one after the final norm.
        norm_before_residual: layer 0 adds to the normed state rather than to the state.
        mask_shape: of the tensor that stands in for a state not known yet, if there is one.
        mask_token_id: stands for tokens that are not known yet, in parallel drafting (P-EAGLE,
            arXiv 2602.01469).
    """

    version: DraftSource
    taps: tuple[int, ...] | None = None
    may_count_from_0: bool = False
    fc_bias: bool = False
    layernorms: bool = False
    input_norm: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    mask_shape: tuple[int, ...] | None = None
    mask_token_id: int | None = None

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> "EagleConfig":
        """The config from the content of config.json.

        Raises:
            ConfigError: a value is missing, contradicts another, or is not supported.
        """
        version, options = _version(raw), drafter_options(raw, "eagle_config")
        is_first, layer = version is DraftSource.EAGLE, _layer_config(raw)
        check_supported(options, _UNSUPPORTED)
        flags: dict[str, Any] = {key: _flag(options, key) for key in _FLAGS[version]}
        _refuse_other_flags(options, version)
        if options.get("truncated_vocab_size") not in (None, layer.vocab_size):
            raise ConfigError(
                f"config.json: truncated_vocab_size={options['truncated_vocab_size']!r} is not "
                f"supported, it must be {layer.vocab_size}"
            )
        return cls(
            version=version,
            layer=layer,
            draft_vocab_size=read_draft_vocab_size(options, layer.vocab_size, is_whole=is_first),
            target_hidden_size=read_count(options, "target_hidden_size", default=layer.hidden_size),
            taps=None if is_first else _taps(options),
            may_count_from_0=raw.get(_TAPS) is None,
            fc_bias=is_first and (_flag(options, "bias") or _flag(options, "fusion_bias")),
            mask_token_id=read_mask_token(raw, layer.vocab_size),
            **flags,
        )

    def taps_of(self, num_target_layers: int) -> tuple[int, ...]:
        """The layers of such a target after which the states are taken, counted; () unless EAGLE-3.

        Raises:
            ConfigError: the target has no such layers.
        """
        if self.version is not DraftSource.EAGLE3:
            return ()
        taps = self.taps or (2, num_target_layers // 2, num_target_layers - 3)
        if self.may_count_from_0 and _names_layers(taps, num_target_layers):
            taps = tuple(tap + 1 for tap in taps)
        check_taps(taps, num_target_layers)
        return taps


_TAPS = "eagle_aux_hidden_state_layer_ids"

# Keys that change what is computed, and the values at which they do not.
_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "quantization_config": lambda value: value is None,
    "use_aux_hidden_state": lambda value: value in (None, True),
    "use_mtp_layernorm": lambda value: not value,
    "add_para_norm": lambda value: not value,
    "logit_scale": lambda value: value in (None, 1.0),
    "is_causal": lambda value: value in (None, True),
    # Counts layers in another way; eagle_aux_hidden_state_layer_ids is what all others write.
    "target_layer_ids": lambda value: value is None,
}

_FLAGS = {
    DraftSource.EAGLE: ("layernorms",),
    DraftSource.EAGLE3: ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual"),
}
_SPECULATORS = {
    "eagle": DraftSource.EAGLE,
    "eagle3": DraftSource.EAGLE3,
    "peagle": DraftSource.EAGLE3,
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def _version(raw: Mapping[str, Any]) -> DraftSource:
    """EAGLE or EAGLE-3, by the speculators' type, else by the architecture's name.

    The checkpoints of EAGLE's authors call themselves LlamaForCausalLM: then EAGLE-3 is what has
    a draft vocabulary.
    """
    if (kind := raw.get(SPECULATORS_KIND)) is not None:
        if kind not in _SPECULATORS:
            raise ConfigError(
                f"config.json: {SPECULATORS_KIND} {kind!r} is not an EAGLE drafter: "
                f"{did_you_mean(str(kind), _SPECULATORS)}"
            )
        return _SPECULATORS[kind]
    names = raw.get("architectures") or []
    if len(names) != 1:
        raise ConfigError(f"config.json must name one architecture, got {names}")
    name = str(names[0]).lower()
    if "eagle3" in name or "peagle" in name:
        return DraftSource.EAGLE3
    if "eagle" in name:
        return DraftSource.EAGLE
    if names[0] not in _ARCHITECTURES.values():
        raise ConfigError(f"architecture {names[0]!r} is not an EAGLE drafter")
    is_newer = raw.get("draft_vocab_size") is not None or raw.get("eagle_config") is not None
    return DraftSource.EAGLE3 if is_newer else DraftSource.EAGLE


def _layer_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration of the drafter's own layers, from the Llama-style part of the file.

    Raises:
        ConfigError: another family's layers, or windows that this family's config cannot have.
    """
    layer, nested = layer_options(raw), raw.get("model")
    if raw.get("model_type") == "eagle" and isinstance(nested, dict):
        layer = nested
    model_type = str(layer.get("model_type", "llama"))
    if model_type not in _ARCHITECTURES:
        raise ConfigError(
            f"config.json: EAGLE layers of model_type {model_type!r} are not supported: "
            f"{did_you_mean(model_type, _ARCHITECTURES)}"
        )
    if model_type == "llama":
        kinds = set(layer.get("layer_types") or [])
        if layer.get("use_sliding_window") or not kinds <= {"full_attention"}:
            raise ConfigError("config.json: sliding windows in a llama layer are not supported")
    return ModelConfig.from_mapping({**layer, "architectures": [_ARCHITECTURES[model_type]]})


def _refuse_other_flags(options: Mapping[str, Any], version: DraftSource) -> None:
    for other, keys in _FLAGS.items():
        for key in keys:
            if other is not version and options.get(key):
                raise ConfigError(f"config.json: {key} is of {other}, but this is {version}")


def _flag(options: Mapping[str, Any], key: str) -> bool:
    if options.get(key) is not None:
        return read_flag(options, key)
    if key == "norm_before_residual" and SPECULATORS_KIND in options:
        # The library and the engines that read its files differ in what a missing key means.
        raise ConfigError(f"config.json: {key} is missing")
    return False


def _taps(options: Mapping[str, Any]) -> tuple[int, ...] | None:
    if not options.get(_TAPS):
        if (count := options.get("num_aux_hidden_states")) not in (None, 3):
            raise ConfigError(
                f"config.json: num_aux_hidden_states={count!r} needs {_TAPS} to say which"
            )
        return None
    return read_layers(options, _TAPS)


def _names_layers(taps: Sequence[int], num_target_layers: int) -> bool:
    """Is true if ids in eagle_config name layers from 0 on, as SpecForge and ModelOpt write.

    Others count layers in the same place. SGLang distinguishes them by the first id, as the paper's
    first tap is after 2 layers: 1 by name, 2 by count. No layer has the number of all layers.
    """
    return taps[0] == 1 and max(taps) < num_target_layers
