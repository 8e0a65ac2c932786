"""What a checkpoint's config.json says, in one shape for all families.

The four families are one network; they differ in biases, query-key norms and sliding windows
only. What is not understood is refused by name, because a network that is run with a setting left
out gives plausible nonsense.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from outdraft.core.errors import ConfigError, did_you_mean


class RopeKind(StrEnum):
    """How rotary frequencies are stretched beyond the trained context."""

    PLAIN = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding; the fields below `factor` are read by llama3 and yarn only.

    Attributes:
        original_max_len: positions of the training before it was stretched.
        attention_factor: multiplies cos and sin; yarn only, None for the paper's value.
        truncate: yarn only: its ramp starts and ends at whole dimensions.
    """

    kind: RopeKind = RopeKind.PLAIN
    theta: float = 10000.0
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one decoder-only model.

    Attributes:
        windows: per layer, how many positions back a row sees (itself included), None for all.
        eos_token_ids: every token that ends a text, as generation_config.json names them, else
            config.json.
        torch_dtype: what the checkpoint was saved in, such as "bfloat16", None if not told.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    rope: RopeConfig
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    torch_dtype: str | None

    @classmethod
    def from_directory(cls, path: Path) -> "ModelConfig":
        """The config of a checkpoint directory.

        Raises:
            ConfigError: no readable config.json, or it asks for something that is not supported.
        """
        generation_path = path / "generation_config.json"
        generation = read_json(generation_path) if generation_path.is_file() else {}
        return cls.from_mapping(read_json(path / "config.json"), generation)

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
        for key, is_fine in _UNSUPPORTED.items():
            if not is_fine(raw.get(key)):
                raise ConfigError(f"config.json: {key}={raw[key]!r} is not supported")
        hidden_size = _count(raw, "hidden_size")
        num_heads = _count(raw, "num_attention_heads")
        num_kv_heads = _count(raw, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads ({num_heads}) must be a multiple of "
                f"num_key_value_heads ({num_kv_heads})"
            )
        num_layers = _count(raw, "num_hidden_layers")
        rope = _rope(raw, _count(raw, "max_position_embeddings"))
        attention_bias = bool(raw.get("attention_bias")) and family.reads_attention_bias
        return cls(
            architecture=architecture,
            vocab_size=_count(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_count(raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=_head_size(raw, family, hidden_size, num_heads),
            max_model_len=_max_model_len(raw, rope),
            rope=rope,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family.always_qkv_bias or attention_bias,
            o_bias=attention_bias,
            mlp_bias=bool(raw.get("mlp_bias")) and family.reads_mlp_bias,
            qk_norm=family.qk_norm,
            windows=family.windows(raw, num_layers),
            bos_token_id=next(iter(_token_ids(raw, "bos_token_id")), None),
            eos_token_ids=_token_ids(generation or {}, "eos_token_id")
            or _token_ids(raw, "eos_token_id"),
            torch_dtype=raw.get("dtype") or raw.get("torch_dtype"),
        )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content  # pyright: ignore[reportUnknownVariableType]  # keys of a JSON object are str


def _no_windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    return (None,) * num_layers


def _mistral_windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    if raw.get("layer_types"):
        raise ConfigError("config.json: layer_types is not supported for MistralForCausalLM")
    window = raw.get("sliding_window", 4096)  # a missing key means 4096, null means none
    return (None if window is None else _count(raw, "sliding_window", 4096),) * num_layers


def _qwen_windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    if not raw.get("use_sliding_window", False) or raw.get("sliding_window", 4096) is None:
        return (None,) * num_layers
    window = _count(raw, "sliding_window", 4096)
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = int(raw.get("max_window_layers", 28))
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(layer_types) != num_layers:
        raise ConfigError(
            f"config.json: layer_types has {len(layer_types)} entries for {num_layers} layers"
        )
    window_of = {"full_attention": None, "sliding_attention": window}
    for layer_type in layer_types:
        if layer_type not in window_of:
            raise ConfigError(
                f"config.json: unknown layer type {layer_type!r}: "
                f"{did_you_mean(str(layer_type), window_of)}"
            )
    return tuple(window_of[layer_type] for layer_type in layer_types)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Where the families differ."""

    windows: Callable[[Mapping[str, Any], int], tuple[int | None, ...]]
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    always_qkv_bias: bool = False
    qk_norm: bool = False
    head_size: int | None = None  # where config.json does not tell; None: hidden_size / heads


_FAMILIES = {
    "LlamaForCausalLM": _Family(
        windows=_no_windows, reads_attention_bias=True, reads_mlp_bias=True
    ),
    "MistralForCausalLM": _Family(windows=_mistral_windows),
    "Qwen2ForCausalLM": _Family(windows=_qwen_windows, always_qkv_bias=True),
    "Qwen3ForCausalLM": _Family(
        windows=_qwen_windows, reads_attention_bias=True, qk_norm=True, head_size=128
    ),
}

# Keys that change what is computed, and the values at which they do not.
_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "hidden_act": lambda value: value in (None, "silu"),
    "quantization_config": lambda value: value is None,
    "partial_rotary_factor": lambda value: value in (None, 1.0),
}

_ROPE_KEYS: dict[RopeKind, dict[str, str]] = {
    RopeKind.PLAIN: {},
    RopeKind.LINEAR: {"factor": "factor"},
    RopeKind.LLAMA3: {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_len",
    },
    RopeKind.YARN: {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_len",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
    },
}
_ROPE_REQUIRED = {"factor", "low_freq_factor", "high_freq_factor"}


def _rope(raw: Mapping[str, Any], max_model_len: int) -> RopeConfig:
    """From rope_parameters (transformers 5), or rope_theta and rope_scaling (before)."""
    values: dict[str, Any] = dict(raw.get("rope_scaling") or {})
    values.update(raw.get("rope_parameters") or {})
    theta = float(values.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
    old_name = values.pop("type", None)
    name = str(values.pop("rope_type", None) or old_name or RopeKind.PLAIN)
    if name not in set(RopeKind):
        raise ConfigError(
            f"config.json: unknown rope type {name!r}: {did_you_mean(name, RopeKind)}"
        )
    kind = RopeKind(name)
    if values.pop("partial_rotary_factor", None) not in (None, 1.0):
        raise ConfigError("config.json: partial_rotary_factor is not supported")
    known = _ROPE_KEYS[kind]
    if kind is RopeKind.PLAIN:
        return RopeConfig(theta=theta)
    for key in values:
        if key not in known:
            raise ConfigError(
                f"config.json: rope type {name!r} with {key!r} is not supported: "
                f"{did_you_mean(key, known)}"
            )
    missing = sorted(
        _ROPE_REQUIRED & known.keys() - {k for k, v in values.items() if v is not None}
    )
    if missing:
        raise ConfigError(f"config.json: rope type {name!r} needs {', '.join(missing)}")
    fields = {known[key]: value for key, value in values.items() if value is not None}
    fields.setdefault("original_max_len", max_model_len)
    return RopeConfig(kind=kind, theta=theta, **fields)


def _max_model_len(raw: Mapping[str, Any], rope: RopeConfig) -> int:
    """Checkpoints whose yarn was switched on by hand still tell the length before it."""
    trained = _count(raw, "max_position_embeddings")
    if rope.kind is RopeKind.YARN:
        return max(trained, int(rope.factor * rope.original_max_len))
    return trained


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    supported = ", ".join(sorted(_FAMILIES))
    if len(names) != 1:
        raise ConfigError(
            f"config.json must name one architecture, got {names}; supported: {supported}"
        )
    if names[0] not in _FAMILIES:
        raise ConfigError(f"architecture {names[0]!r} is not supported; supported: {supported}")
    return str(names[0])


def _head_size(raw: Mapping[str, Any], family: _Family, hidden_size: int, num_heads: int) -> int:
    head_size = _count(raw, "head_dim", family.head_size or hidden_size // num_heads)
    if head_size % 2:
        raise ConfigError(f"config.json: head_dim must be even, got {head_size}")
    return head_size


def _count(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {key} must be a positive whole number, got {value!r}")
    return value


def _token_ids(raw: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """One id, a list of ids, or nothing."""
    value = raw.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ConfigError(f"{key} must be a token id or a list of them, got {value!r}")
    return tuple(dict.fromkeys(ids))
