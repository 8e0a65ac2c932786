"""What a checkpoint's config.json says, in one shape for all families.

The four families are one network; they differ in biases, query-key norms and sliding windows
only. A setting that is not understood is refused by name: a network that runs without one of its
settings gives plausible nonsense.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from outdraft.core.errors import ConfigError, did_you_mean


class RopeKind(StrEnum):
    """How rotary frequencies are stretched beyond the trained context."""

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
        turned: share of a head's dimensions that turn; the others stay as they are.
        original_max_len: positions of the training before it was stretched.
        context_len: the longest text that is read. The frequencies of dynamic and longrope depend
            on it, and on no text's own length: keys in the cache would not fit otherwise.
        attention_factor: multiplies cos and sin; yarn and longrope only, None: the papers' value.
        truncate: yarn only: its ramp starts and ends at whole dimensions.
        short_factors, long_factors: longrope only: what divides each frequency, with contexts of up
            to original_max_len and with longer ones.
    """

    kind: RopeKind = RopeKind.PLAIN
    theta: float = 10000.0
    factor: float = 1.0
    turned: float = 1.0
    original_max_len: int = 0
    context_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def depends_on_context(self) -> bool:
        """Whether the frequencies are others with another context_len."""
        return self.kind in (RopeKind.DYNAMIC, RopeKind.LONGROPE)

    def num_turned(self, head_size: int) -> int:
        """Dimensions of a head that turn."""
        return int(head_size * self.turned)


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
        head_size = _head_size(raw, family, hidden_size, num_heads)
        rope = _rope(raw, head_size)
        attention_bias = bool(raw.get("attention_bias")) and family.reads_attention_bias
        return cls(
            architecture=architecture,
            vocab_size=_count(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_count(raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            max_model_len=rope.context_len,
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

    def for_context(self, max_model_len: int | None) -> "ModelConfig":
        """For texts of up to so many tokens; None: for the longest that it can read."""
        if max_model_len is None:
            return self
        context_len = min(max_model_len, self.max_model_len)
        return replace(self, rope=replace(self.rope, context_len=context_len))


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
}

_ROPE_KEYS: dict[RopeKind, dict[str, str]] = {
    RopeKind.PLAIN: {},
    RopeKind.LINEAR: {"factor": "factor"},
    RopeKind.DYNAMIC: {"factor": "factor", "original_max_position_embeddings": "original_max_len"},
    RopeKind.LLAMA3: {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_len",
    },
    RopeKind.LONGROPE: {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_len",
        "attention_factor": "attention_factor",
        "short_factor": "short_factors",
        "long_factor": "long_factors",
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
_ROPE_REQUIRED: dict[RopeKind, set[str]] = {
    RopeKind.PLAIN: set(),
    RopeKind.LINEAR: {"factor"},
    RopeKind.DYNAMIC: {"factor"},
    RopeKind.LLAMA3: {"factor", "low_freq_factor", "high_freq_factor"},
    RopeKind.LONGROPE: {"short_factor", "long_factor"},
    RopeKind.YARN: {"factor"},
}


def _rope(raw: Mapping[str, Any], head_size: int) -> RopeConfig:
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
    max_positions = _count(raw, "max_position_embeddings")
    turned = _turned(values.pop("partial_rotary_factor", raw.get("partial_rotary_factor")))
    fields = {} if kind is RopeKind.PLAIN else _rope_fields(kind, values)
    if kind is RopeKind.LONGROPE and raw.get("original_max_position_embeddings") is not None:
        fields["original_max_len"] = _count(raw, "original_max_position_embeddings")
    fields.setdefault("original_max_len", max_positions)
    if kind is RopeKind.LONGROPE:
        fields.setdefault("factor", max_positions / fields["original_max_len"])
    rope = RopeConfig(kind=kind, theta=theta, turned=turned, **fields)
    rope = replace(rope, context_len=_longest_context(rope, max_positions))
    _check_turned(rope, head_size)
    return rope


def _rope_fields(kind: RopeKind, values: Mapping[str, Any]) -> dict[str, Any]:
    """What the kind reads of rope_parameters, under the names of RopeConfig."""
    known = _ROPE_KEYS[kind]
    for key in values:
        if key not in known:
            raise ConfigError(
                f"config.json: rope type '{kind}' with {key!r} is not supported: "
                f"{did_you_mean(key, known)}"
            )
    given = {key: value for key, value in values.items() if value is not None}
    if missing := sorted(_ROPE_REQUIRED[kind] - given.keys()):
        raise ConfigError(f"config.json: rope type '{kind}' needs {', '.join(missing)}")
    return {
        known[key]: _factors(key, value) if key in ("short_factor", "long_factor") else value
        for key, value in given.items()
    }


def _factors(key: str, value: object) -> tuple[float, ...]:
    factors: list[Any] = value if isinstance(value, list) else []
    if not factors or not all(isinstance(one, int | float) and one > 0 for one in factors):
        raise ConfigError(
            f"config.json: {key} must be a list of numbers above 0, got {value!r:.80}"
        )
    return tuple(float(one) for one in factors)


def _turned(value: object) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(
            f"config.json: partial_rotary_factor must be above 0 and at most 1, got {value!r}"
        )
    return float(value)


def _check_turned(rope: RopeConfig, head_size: int) -> None:
    turned = rope.num_turned(head_size)
    least = 4 if rope.kind is RopeKind.DYNAMIC else 2
    if turned < least or turned % 2:
        raise ConfigError(
            f"config.json: partial_rotary_factor {rope.turned:g} turns {turned} of {head_size} "
            f"dimensions: it must be an even number of at least {least}"
        )
    for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
        if factors and len(factors) != turned // 2:
            raise ConfigError(
                f"config.json: {name} has {len(factors)} numbers, but {turned // 2} frequencies"
            )


def _longest_context(rope: RopeConfig, max_positions: int) -> int:
    """Checkpoints whose yarn or dynamic scaling was switched on by hand still tell the length
    before it."""
    if rope.kind in (RopeKind.YARN, RopeKind.DYNAMIC):
        return max(max_positions, int(rope.factor * rope.original_max_len))
    return max_positions


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
