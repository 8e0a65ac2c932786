"""The configuration of a network of the families that are built here.

The families are one network; they differ in biases, query-key norms and sliding windows only. A
setting that is not understood is refused by name: a network that runs without one of its settings
gives plausible nonsense.

Rotary embeddings: transformers 5 writes rope_parameters; before, there were rope_theta and
rope_scaling.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from outdraft.core.errors import ConfigError
from outdraft.models.checkpoints.config_json import (
    COUNT,
    FLAG,
    LIST,
    NUMBER,
    check_known,
    check_supported,
    checked,
    read_config,
    read_count,
    read_generation_config,
    read_object,
    read_positive,
    read_token_ids,
)
from outdraft.models.checkpoints.quantization import Quantization, read_quantization
from outdraft.models.shape import ModelShape


class RopeKind(StrEnum):
    """Ways to stretch rotary frequencies beyond the trained context."""

    PLAIN = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    LONGROPE = "longrope"
    YARN = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding; each kind reads the fields that its formula has.

    Attributes:
        rotary_share: of a head's dimensions, those that are rotated; others stay as they are.
        original_max_len: positions of the training before it was stretched.
        context_len: the longest text that is read. The frequencies of dynamic and longrope depend
            on it, and on no text's own length: keys in the cache would not fit otherwise.
        attention_factor: multiplies cos and sin; yarn and longrope only, None: the papers' value.
        truncate: yarn only: its ramp starts and ends at whole dimensions.
        short_factor, long_factor: longrope only: what divides each frequency, with contexts of up
            to original_max_len and with longer ones.
    """

    kind: RopeKind = RopeKind.PLAIN
    theta: float = 10000.0
    factor: float = 1.0
    rotary_share: float = 1.0
    original_max_len: int = 0
    context_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def rotary_size(self, head_size: int) -> int:
        """Dimensions of a head that are rotated."""
        return int(head_size * self.rotary_share)


_ORIGINAL = "original_max_position_embeddings"
# By their names in config.json: what each kind needs, and what it may have besides.
_KEYS: dict[RopeKind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    RopeKind.LINEAR: (("factor",), ()),
    RopeKind.DYNAMIC: (("factor",), (_ORIGINAL,)),
    RopeKind.LLAMA3: (("factor", "high_freq_factor", "low_freq_factor"), (_ORIGINAL,)),
    RopeKind.LONGROPE: (("long_factor", "short_factor"), ("factor", _ORIGINAL, "attention_factor")),
    RopeKind.YARN: (
        ("factor",),
        (_ORIGINAL, "beta_fast", "beta_slow", "attention_factor", "truncate"),
    ),
}
_FACTORS = Annotated[
    tuple[Annotated[float, Meta(gt=0)], ...],
    Meta(min_length=1, description="a list of numbers above 0"),
]
_SHARE = Annotated[float, Meta(gt=0, le=1, description="above 0 and at most 1")]
_WHOLE = Annotated[int, Meta(description="a whole number")]
# The types of values that are not numbers above 0.
_TYPES: dict[str, Any] = {
    _ORIGINAL: COUNT,
    "short_factor": _FACTORS,
    "long_factor": _FACTORS,
    "truncate": FLAG,
}


def read_rope(raw: Mapping[str, Any], head_size: int) -> RopeConfig:
    """The rotary embedding of a model whose heads have `head_size` dimensions.

    Raises:
        ConfigError: a value is missing, wrong or unknown.
    """
    values = read_object(raw, "rope_scaling") | read_object(raw, "rope_parameters")
    theta = read_positive(values, "rope_theta", read_positive(raw, "rope_theta", 10000.0))
    values.pop("rope_theta", None)
    old_name = values.pop("type", None)
    name = str(values.pop("rope_type", None) or old_name or RopeKind.PLAIN)
    check_known(name, set(RopeKind), f"unknown rope type {name!r}")
    kind = RopeKind(name)
    max_positions = read_count(raw, "max_position_embeddings")
    share_key = "partial_rotary_factor"
    share = values.pop(share_key, raw.get(share_key))
    fields = {} if kind is RopeKind.PLAIN else _rope_fields(kind, values)
    original = fields.pop(_ORIGINAL, max_positions)
    if kind is RopeKind.LONGROPE:
        original = read_count(raw, _ORIGINAL, default=original)
        fields.setdefault("factor", max_positions / original)
    context_len = max_positions
    if kind in (RopeKind.YARN, RopeKind.DYNAMIC):
        # Where the scaling was switched on by hand, config.json has the length before it.
        context_len = max(max_positions, int(fields["factor"] * original))
    rope = RopeConfig(
        kind=kind,
        theta=theta,
        rotary_share=1.0 if share is None else checked(share_key, share, _SHARE),
        original_max_len=original,
        context_len=context_len,
        **fields,
    )
    _check_rotary_size(rope, head_size)
    return rope


def _rope_fields(kind: RopeKind, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of rope_parameters that the kind reads."""
    needed, others = _KEYS[kind]
    for key in values:
        what = f"rope type '{kind}' with {key!r} is not supported"
        check_known(key, needed + others, what)
    given = {key: value for key, value in values.items() if value is not None}
    if missing := [key for key in needed if key not in given]:
        raise ConfigError(f"config.json: rope type '{kind}' needs {', '.join(missing)}")
    return {key: checked(key, value, _TYPES.get(key, NUMBER)) for key, value in given.items()}


def _check_rotary_size(rope: RopeConfig, head_size: int) -> None:
    size = rope.rotary_size(head_size)
    least = 4 if rope.kind is RopeKind.DYNAMIC else 2
    if size < least or size % 2:
        raise ConfigError(
            f"config.json: partial_rotary_factor {rope.rotary_share:g} turns {size} of {head_size} "
            f"dimensions: it must be an even number of at least {least}"
        )
    for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        if factors and len(factors) != size // 2:
            raise ConfigError(
                f"config.json: {name} has {len(factors)} numbers, but {size // 2} frequencies"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ModelShape):
    """One decoder-only model of the families that have a network here.

    Attributes:
        windows: per layer, how many positions back a row sees (itself included), None for all.
        quantization: of the checkpoint; None: its weights are plain.
        mtp_prefix: how the names of tensors begin that only draft (models/drafters/eagle.py); None:
            it has no such tensors.
    """

    rope: RopeConfig
    rms_norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    quantization: Quantization | None = None
    mtp_prefix: str | None = None

    @classmethod
    def from_directory(cls, path: Path) -> "ModelConfig":
        """The config of a checkpoint directory, or of a GGUF file.

        Raises:
            ConfigError: no readable config.json, or it asks for something that is not supported.
        """
        return cls.from_mapping(read_config(path), read_generation_config(path))

    @classmethod
    def from_mapping(
        cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> "ModelConfig":
        """The config from the content of config.json and of generation_config.json.

        Raises:
            ConfigError: a value is missing, contradicts another, or is not supported.
        """
        architecture = _architecture(raw)
        family = _FAMILIES[architecture]
        if (activation := raw.get("hidden_act")) not in (None, "silu"):
            raise ConfigError(f"config.json: hidden_act={activation!r} is not supported")
        hidden_size = read_count(raw, "hidden_size")
        num_heads = read_count(raw, "num_attention_heads")
        num_kv_heads = read_count(raw, "num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads ({num_heads}) must be a multiple of "
                f"num_key_value_heads ({num_kv_heads})"
            )
        num_layers = read_count(raw, "num_hidden_layers")
        head_size = family.head_size or hidden_size // num_heads
        head_size = read_count(raw, "head_dim", default=head_size)
        if head_size % 2:
            raise ConfigError(f"config.json: head_dim must be even, got {head_size}")
        rope = read_rope(raw, head_size)
        attention_bias = bool(raw.get("attention_bias")) and family.reads_attention_bias
        return cls(
            architecture=architecture,
            vocab_size=read_count(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read_count(raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            max_model_len=rope.context_len,
            depends_on_context=rope.kind in (RopeKind.DYNAMIC, RopeKind.LONGROPE),
            rope=rope,
            rms_norm_eps=read_positive(raw, "rms_norm_eps", 1e-6),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family.always_qkv_bias or attention_bias,
            o_bias=attention_bias,
            mlp_bias=bool(raw.get("mlp_bias")) and family.reads_mlp_bias,
            qk_norm=family.qk_norm,
            windows=family.windows(raw, num_layers),
            quantization=read_quantization(raw),
            mtp_prefix=family.mtp_prefix,
            bos_token_id=next(iter(read_token_ids(raw, "bos_token_id")), None),
            eos_token_ids=read_token_ids(generation or {}, "eos_token_id")
            or read_token_ids(raw, "eos_token_id"),
            torch_dtype=raw.get("dtype") or raw.get("torch_dtype"),
        )

    def for_context(self, max_model_len: int | None) -> "ModelConfig":
        """The config for texts of up to max_model_len tokens; None: for the longest that it
        reads."""
        if max_model_len is None:
            return self
        context_len = min(max_model_len, self.max_model_len)
        return replace(self, rope=replace(self.rope, context_len=context_len))


def is_known(raw: Mapping[str, Any]) -> bool:
    """Is true if the content of config.json names a family that has a network here."""
    names = raw.get("architectures") or []
    return len(names) == 1 and names[0] in _FAMILIES


def _no_windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    return (None,) * num_layers


def _mistral_windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    if raw.get("layer_types"):
        raise ConfigError("config.json: layer_types is not supported for MistralForCausalLM")
    if raw.get("sliding_window", 4096) is None:  # a missing key means 4096, null means none
        return _no_windows(raw, num_layers)
    return (read_count(raw, "sliding_window", default=4096),) * num_layers


def _qwen_windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    if not raw.get("use_sliding_window", False) or raw.get("sliding_window", 4096) is None:
        return _no_windows(raw, num_layers)
    window = read_count(raw, "sliding_window", default=4096)
    if raw.get("layer_types") is None:
        first = checked("max_window_layers", raw.get("max_window_layers", 28), _WHOLE)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    layer_types = checked("layer_types", raw["layer_types"], LIST)
    if len(layer_types) != num_layers:
        raise ConfigError(
            f"config.json: layer_types has {len(layer_types)} entries for {num_layers} layers"
        )
    window_of = {"full_attention": None, "sliding_attention": window}
    for layer_type in layer_types:
        check_known(layer_type, window_of, f"unknown layer type {layer_type!r}")
    return tuple(window_of[layer_type] for layer_type in layer_types)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """The differences between the families."""

    windows: Callable[[Mapping[str, Any], int], tuple[int | None, ...]]
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    always_qkv_bias: bool = False
    qk_norm: bool = False
    head_size: int | None = None  # where config.json has none; None: hidden_size / heads
    mtp_prefix: str | None = None


_FAMILIES = {
    "LlamaForCausalLM": _Family(
        windows=_no_windows, reads_attention_bias=True, reads_mlp_bias=True
    ),
    "MiMoForCausalLM": _Family(
        windows=_qwen_windows, always_qkv_bias=True, mtp_prefix="model.mtp_layers."
    ),
    "MistralForCausalLM": _Family(windows=_mistral_windows),
    "Qwen2ForCausalLM": _Family(windows=_qwen_windows, always_qkv_bias=True),
    "Qwen3ForCausalLM": _Family(
        windows=_qwen_windows, reads_attention_bias=True, qk_norm=True, head_size=128
    ),
}


def _architecture(raw: Mapping[str, Any]) -> str:
    names, supported = raw.get("architectures") or [], sorted(_FAMILIES)
    if len(names) != 1:
        raise ConfigError(
            f"config.json must name one architecture, got {names}; supported: "
            f"{', '.join(supported)}"
        )
    check_supported(names[0], supported, f"architecture {names[0]!r}")
    return str(names[0])
