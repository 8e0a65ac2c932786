"""The config.json of an EAGLE, DFlash or DSpark drafter, in one shape for the layouts that exist.

Their authors write the config of a known family with a few keys more, at its level or in an object
of their own; the speculators library puts that config into `transformer_layer_config`, next to its
own keys, and vLLM puts EAGLE's into `model`. A setting that changes what is computed and is not
understood is refused by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from outdraft.config.speculation import BLOCK_SOURCES
from outdraft.core.draft import MAX_DRAFTS, DraftSource
from outdraft.core.errors import ConfigError
from outdraft.models.checkpoints.config_json import (
    FLAG,
    check_known,
    checked,
    read_count,
    read_json,
    read_object,
)
from outdraft.models.checkpoints.files import tensor_places, weight_files
from outdraft.models.checkpoints.gguf_file import is_gguf
from outdraft.models.checkpoints.gguf_metadata import NETWORKS
from outdraft.models.decoder.config import ModelConfig

SPECULATORS_KIND = "speculators_model_type"
MASK_KEYS = ("pard_token", "mask_token_id", "ptd_token_id")
# Parts of names that config.json gives, and the methods they are for; the first one counts.
_METHODS = {
    "medusa": "medusa",
    "mlp_speculator": "mlp_speculator",
    "mlpspeculator": "mlp_speculator",
    "dspark": "dspark",
    "dflash": "dflash",
    "eagle3": "eagle3",
    "peagle": "eagle3",
    "eagle": "eagle",
}
_LAYERS = Annotated[tuple[int, ...], Meta(min_length=1, description="a list of layers")]


def drafter_method(path: Path) -> str | None:
    """The method whose drafter a checkpoint holds; None: as far as can be seen it is a model.

    Raises:
        ConfigError: there is no readable config.json, or there are no readable weights.
    """
    if is_gguf(path):
        return None
    raw = read_json(path / "config.json")
    kinds = raw.get(SPECULATORS_KIND), raw.get("model_type"), raw.get("architectures")
    names = str(kinds).lower()
    for part, method in _METHODS.items():
        if part in names:
            return method
    if "medusa_num_heads" in raw:
        return "medusa"
    # EAGLE's authors call theirs a Llama.
    if raw.get("draft_vocab_size") is not None:
        return "eagle3"
    places = tensor_places(weight_files(path), lambda name: name.removeprefix("model."))
    return "eagle" if "fc.weight" in places else None


def _drafter_options(raw: Mapping[str, Any], *objects: str) -> dict[str, Any]:
    """The drafter's own keys: some write them into one of these objects, some next to it."""
    parts = [*(read_object(raw, name) for name in objects), raw]
    return {key: value for part in parts for key, value in part.items() if value is not None}


def _layer_options(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of the layers."""
    if SPECULATORS_KIND not in raw:
        return raw
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ConfigError("config.json: transformer_layer_config is missing")
    return layer  # pyright: ignore[reportUnknownVariableType]  # keys of a JSON object are str


def _check_supported(options: Mapping[str, Any], harmless: Mapping[str, Sequence[object]]) -> None:
    """Raise ConfigError for a key whose value is not one at which it changes nothing."""
    for key, values in harmless.items():
        if options.get(key) not in values:
            raise ConfigError(f"config.json: {key}={options[key]!r} is not supported")


def _read_flag(options: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """The flag under this key; the default where it is missing."""
    return checked(key, options.get(key, default), FLAG)


def read_mask_token(raw: Mapping[str, Any], vocab_size: int) -> int | None:
    """The token that a drafter reads in place of tokens not known yet; None: it was not trained to.

    Raises:
        ConfigError: it is no token of the vocabulary.
    """
    values = {**raw, **read_object(raw, "dflash_config")}
    key = next((key for key in MASK_KEYS if values.get(key) is not None), None)
    if key is None:
        return None
    description = f"a token id below {vocab_size}"
    kind = Annotated[int, Meta(ge=0, lt=vocab_size, description=description)]
    return checked(key, values[key], kind)


def _read_sizes(
    options: Mapping[str, Any], layer: ModelConfig, *, is_whole: bool = False
) -> dict[str, int]:
    """The number of tokens that it can draft, and the size of the states that it reads; `is_whole`:
    it must draft the whole vocabulary. Raises ConfigError if they do not fit."""
    size = read_count(options, "draft_vocab_size", default=layer.vocab_size)
    if size > layer.vocab_size or (is_whole and size != layer.vocab_size):
        raise ConfigError(
            f"config.json: draft_vocab_size {size} does not fit a vocabulary of {layer.vocab_size}"
        )
    state_size = read_count(options, "target_hidden_size", default=layer.hidden_size)
    return {"draft_vocab_size": size, "target_hidden_size": state_size}


def _checked_taps(taps: tuple[int, ...], num_target_layers: int) -> tuple[int, ...]:
    """The taps. Raises ConfigError if a target with num_target_layers has no such streams."""
    if not all(0 <= tap <= num_target_layers for tap in taps):
        raise ConfigError(
            f"the drafter reads the target behind layers {list(taps)}, but the target has "
            f"{num_target_layers} layers"
        )
    return taps


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """The shape of one EAGLE drafter.

    Attributes:
        version: EAGLE (Li et al. 2024, arXiv 2401.15077; with trees it is EAGLE-2), EAGLE-3 (Li et
            al. 2025, arXiv 2503.01840; EAGLE-3.1 and P-EAGLE are options of it), or MTP, a layer
            for multi-token prediction as eagle.py says.
        layer: of its own layers; its vocabulary is the target's.
        draft_vocab_size: how many of the target's tokens it can draft.
        target_hidden_size: of the states that it reads.
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
        mask_token_id: stands for tokens that are not known yet, in parallel drafting (P-EAGLE,
            arXiv 2602.01469).
    """

    version: DraftSource
    layer: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...] | None = None
    may_count_from_0: bool = False
    fc_bias: bool = False
    layernorms: bool = False
    input_norm: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    mask_token_id: int | None = None

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> "EagleConfig":
        """The config from the content of config.json.

        Raises:
            ConfigError: a value is missing, contradicts another, or is not supported.
        """
        version, options = _version(raw), _drafter_options(raw, "eagle_config")
        is_first, layer = version is DraftSource.EAGLE, _eagle_layer(raw)
        _check_supported(options, _HARMLESS_TO_EAGLE)
        if SPECULATORS_KIND in options and "norm_before_residual" not in options and not is_first:
            # The library and the engines that read its files differ in what a missing key means.
            raise ConfigError("config.json: norm_before_residual is missing")
        flags: dict[str, Any] = {key: _read_flag(options, key) for key in _FLAGS[version]}
        for other in _FLAGS.keys() - {version}:
            if key := next((key for key in _FLAGS[other] if options.get(key)), None):
                raise ConfigError(f"config.json: {key} is of {other}, but this is {version}")
        if (size := options.get("truncated_vocab_size")) not in (None, layer.vocab_size):
            raise ConfigError(
                f"config.json: truncated_vocab_size={size!r} is not supported, it must be "
                f"{layer.vocab_size}"
            )
        return cls(
            version=version,
            layer=layer,
            taps=None if is_first else _eagle_taps(options),
            may_count_from_0=raw.get(_TAPS) is None,
            fc_bias=is_first and any(_read_flag(options, key) for key in ("bias", "fusion_bias")),
            mask_token_id=read_mask_token(raw, layer.vocab_size),
            **_read_sizes(options, layer, is_whole=is_first),
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
        # Ids in eagle_config name layers from 0 on, as SpecForge and ModelOpt write, or count them.
        # SGLang distinguishes them by the first id, as the paper's first tap is after 2 layers: 1
        # by name, 2 by count. No layer has the number of all layers.
        if self.may_count_from_0 and taps[0] == 1 and max(taps) < num_target_layers:
            taps = tuple(tap + 1 for tap in taps)
        return _checked_taps(taps, num_target_layers)


_TAPS = "eagle_aux_hidden_state_layer_ids"

_OFF = (None, False, 0)
# Keys that change what is computed, with the values at which they do not.
_HARMLESS_TO_EAGLE: dict[str, Sequence[object]] = {
    "quantization_config": (None,),
    "use_aux_hidden_state": (None, True),
    "use_mtp_layernorm": _OFF,
    "add_para_norm": _OFF,
    "logit_scale": (None, 1.0),
    "is_causal": (None, True),
    # Counts layers in another way; eagle_aux_hidden_state_layer_ids is what all others write.
    "target_layer_ids": (None,),
}
_HARMLESS_TO_DFLASH: Mapping[str, Sequence[object]] = {
    "quantization_config": (None,),
    "input_embedding_scale": (None, 1.0),
} | dict.fromkeys(
    (
        *("final_logit_softcapping", "dflash_context_residual", "dflash_block_position_embedding"),
        *("dflash_gated_layer_fusion", "dflash2_dynamic_conv", "dflash2_candidate_selector"),
        *("enable_correction_head", "draft_adapter_rank", "topk_context"),
    ),
    _OFF,
)
_FLAGS = {
    DraftSource.EAGLE: ("layernorms",),
    DraftSource.EAGLE3: ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual"),
}
_SPECULATORS = {
    "eagle": DraftSource.EAGLE,
    "eagle3": DraftSource.EAGLE3,
    "peagle": DraftSource.EAGLE3,
}


def _version(raw: Mapping[str, Any]) -> DraftSource:
    """EAGLE or EAGLE-3, by the speculators' type, else by the architecture's name.

    The checkpoints of EAGLE's authors call themselves LlamaForCausalLM: then EAGLE-3 is what has
    a draft vocabulary.
    """
    if (kind := raw.get(SPECULATORS_KIND)) is not None:
        what = f"{SPECULATORS_KIND} {kind!r} is not an EAGLE drafter"
        check_known(kind, _SPECULATORS, what)
        return _SPECULATORS[kind]
    names = raw.get("architectures") or []
    if len(names) != 1:
        raise ConfigError(f"config.json must name one architecture, got {names}")
    name = str(names[0]).lower()
    if "eagle3" in name or "peagle" in name:
        return DraftSource.EAGLE3
    if "eagle" in name:
        return DraftSource.EAGLE
    if names[0] not in NETWORKS.values():
        raise ConfigError(f"architecture {names[0]!r} is not an EAGLE drafter")
    is_newer = raw.get("draft_vocab_size") is not None or raw.get("eagle_config") is not None
    return DraftSource.EAGLE3 if is_newer else DraftSource.EAGLE


def _eagle_layer(raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration of the drafter's own layers, from the Llama-style part of the file.

    Raises:
        ConfigError: another family's layers, or windows that this family's config cannot have.
    """
    layer, nested = _layer_options(raw), raw.get("model")
    if raw.get("model_type") == "eagle" and isinstance(nested, dict):
        layer = nested
    model_type = str(layer.get("model_type", "llama"))
    what = f"EAGLE layers of model_type {model_type!r} are not supported"
    check_known(model_type, NETWORKS, what)
    if model_type == "llama":
        kinds = set(layer.get("layer_types") or [])
        if layer.get("use_sliding_window") or not kinds <= {"full_attention"}:
            raise ConfigError("config.json: sliding windows in a llama layer are not supported")
    return ModelConfig.from_mapping({**layer, "architectures": [NETWORKS[model_type]]})


def _eagle_taps(options: Mapping[str, Any]) -> tuple[int, ...] | None:
    if options.get(_TAPS):
        return checked(_TAPS, options[_TAPS], _LAYERS)
    if (count := options.get("num_aux_hidden_states")) not in (None, 3):
        raise ConfigError(
            f"config.json: num_aux_hidden_states={count!r} needs {_TAPS} to say which"
        )
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig:
    """The shape of one drafter of blocks.

    Attributes:
        kind: DFlash or DSpark, which is DFlash with two heads more.
        layer, draft_vocab_size, target_hidden_size: as in EagleConfig.
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
    layer: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
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

    def taps_of(self, num_target_layers: int) -> tuple[int, ...]:
        """The taps. Raises ConfigError if such a target has none of them."""
        return _checked_taps(self.taps, num_target_layers)

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> "DFlashConfig":
        """The config from the content of config.json.

        Raises:
            ConfigError: a value is missing, contradicts another, or is not supported.
        """
        kind, options = _kind(raw), _drafter_options(raw, "dflash_config", "dspark_config")
        _check_supported(options, _HARMLESS_TO_DFLASH)
        layer = _dflash_layer(raw)
        mask_token_id = read_mask_token(raw, layer.vocab_size)
        if mask_token_id is None:
            raise ConfigError("config.json: mask_token_id is missing")
        is_spark = kind is DraftSource.DSPARK
        config = cls(
            kind=kind,
            layer=layer,
            block_size=read_count(options, "block_size"),
            mask_token_id=mask_token_id,
            taps=_dflash_taps(options),
            is_causal=_causal_layers(options, layer),
            **_read_sizes(options, layer),
            drafts_from_anchor=_read_flag(options, "sample_from_anchor", is_spark),
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


def _kind(raw: Mapping[str, Any]) -> DraftSource:
    """DFlash or DSpark, by the speculators' type, else by the architecture's name."""
    if (written := raw.get(SPECULATORS_KIND)) is not None:
        check_known(written, BLOCK_SOURCES, f"{SPECULATORS_KIND} {written!r} drafts no blocks")
        return DraftSource(written)
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in _KINDS:
        raise ConfigError(
            f"config.json: architectures {names} is no DFlash or DSpark drafter; supported: "
            f"{', '.join(_KINDS)}"
        )
    return _KINDS[names[0]]


def _dflash_layer(raw: Mapping[str, Any]) -> ModelConfig:
    """The layers, with the windows that `layer_types` says."""
    layer = _layer_options(raw)
    model_type = layer.get("model_type", "qwen3")
    if model_type != "qwen3":
        raise ConfigError(
            f"config.json: DFlash layers of model_type {model_type!r} are not supported, only qwen3"
        )
    kinds = layer.get("layer_types") or []
    if "sliding_attention" in kinds:
        read_count(layer, "sliding_window")  # no default fits
    # Here a window needs no use_sliding_window.
    own = {"use_sliding_window": bool(kinds), "architectures": ["Qwen3ForCausalLM"]}
    return ModelConfig.from_mapping({**layer, **own})


def _causal_layers(options: Mapping[str, Any], layer: ModelConfig) -> tuple[bool, ...]:
    """True for each causal layer: sliding layers are, unless the config says otherwise."""
    if "is_causal" in options:
        return (_read_flag(options, "is_causal"),) * layer.num_layers
    is_wide = _read_flag(options, "sliding_window_non_causal")
    return tuple(window is not None and not is_wide for window in layer.windows)


def _spark(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that DSpark adds to DFlash."""
    rank = 0 if options.get("markov_rank") == 0 else read_count(options, "markov_rank", default=256)
    kind = options.get("markov_head_type", "vanilla")
    if rank and kind != "vanilla":
        raise ConfigError(
            f"config.json: markov_head_type {kind!r} is not supported: only 'vanilla' is"
        )
    has_confidence = _read_flag(options, "enable_confidence_head", True)
    reads_token = has_confidence and _read_flag(options, "confidence_head_with_markov", True)
    if reads_token and not rank:
        raise ConfigError("config.json: confidence_head_with_markov needs a markov_rank above 0")
    return {
        "markov_rank": rank,
        "has_confidence": has_confidence,
        "confidence_reads_token": reads_token,
    }


def _dflash_taps(options: Mapping[str, Any]) -> tuple[int, ...]:
    """Streams are counted from the embedding on: `target_layer_ids` name the layer that writes one,
    `aux_hidden_state_layer_ids` the one after it."""
    for key, shift in (("target_layer_ids", 1), ("aux_hidden_state_layer_ids", 0)):
        if options.get(key) is not None:
            return tuple(layer + shift for layer in checked(key, options[key], _LAYERS))
    raise ConfigError(
        "config.json: target_layer_ids or aux_hidden_state_layer_ids must name the target's layers"
    )


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
