"""What a checkpoint's config.json says, in one shape for all families.

The families are one network; they differ in biases, query-key norms and sliding windows only. A
setting that is not understood is refused by name: a network that runs without one of its settings
gives plausible nonsense.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from outdraft.core.errors import ConfigError, did_you_mean
from outdraft.models.checkpoints.counts import read_count, read_positive, read_token_ids
from outdraft.models.checkpoints.gguf_file import is_gguf
from outdraft.models.checkpoints.gguf_metadata import config_of_gguf, has_own_network
from outdraft.models.checkpoints.quantization import Quantization, read_quantization
from outdraft.models.decoder.rope_config import RopeConfig, read_rope
from outdraft.models.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ModelShape):
    """One decoder-only model of the families that have a network here.

    Attributes:
        windows: per layer, how many positions back a row sees (itself included), None for all.
        quantization: of the checkpoint; None: its weights are plain.
        mtp_prefix: how the names of tensors begin that only draft (models/drafters/mtp.py); None:
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

    @property
    def depends_on_context(self) -> bool:
        return self.rope.depends_on_context

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
        head_size = _head_size(raw, family, hidden_size, num_heads)
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
        """For texts of up to so many tokens; None: for the longest that it can read."""
        if max_model_len is None:
            return self
        context_len = min(max_model_len, self.max_model_len)
        return replace(self, rope=replace(self.rope, context_len=context_len))


def is_known(raw: Mapping[str, Any]) -> bool:
    """Whether the content of config.json names a family that has a network here."""
    names = raw.get("architectures") or []
    return len(names) == 1 and names[0] in _FAMILIES


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of a checkpoint directory, or what a GGUF file says in its place.

    Raises:
        ConfigError: there is none, or a GGUF file cannot be read.
    """
    if not is_gguf(path):
        return read_json(path / "config.json")
    if has_own_network(path):
        return config_of_gguf(path)
    try:
        of_library = import_module("outdraft.models.library.gguf_config")
    except ImportError as error:
        raise ConfigError(
            f"{path} is of an architecture that outdraft runs through the transformers library: "
            f"pip install 'outdraft[gguf,transformers]' ({error})"
        ) from error
    return of_library.mapped_config(path)


def read_generation_config(path: Path) -> dict[str, Any]:
    """The generation_config.json of a checkpoint directory; empty if there is none."""
    file = path / "generation_config.json"
    return read_json(file) if file.is_file() else {}


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
    return (
        None if window is None else read_count(raw, "sliding_window", default=4096),
    ) * num_layers


def _qwen_windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    if not raw.get("use_sliding_window", False) or raw.get("sliding_window", 4096) is None:
        return (None,) * num_layers
    window = read_count(raw, "sliding_window", default=4096)
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = raw.get("max_window_layers", 28)
        if type(first) is not int:
            raise ConfigError(
                f"config.json: max_window_layers must be a whole number, got {first!r:.80}"
            )
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(layer_types, list):
        raise ConfigError(f"config.json: layer_types must be a list, got {layer_types!r:.80}")
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
    head_size = read_count(raw, "head_dim", default=family.head_size or hidden_size // num_heads)
    if head_size % 2:
        raise ConfigError(f"config.json: head_dim must be even, got {head_size}")
    return head_size
