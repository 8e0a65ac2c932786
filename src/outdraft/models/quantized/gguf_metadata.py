"""What a GGUF file says besides its tensors: the configuration, and what its texts are made of.

Names of keys are those of the GGUF specification (ggml-org/ggml, docs/gguf.md). Needs no torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outdraft.core.errors import ConfigError
from outdraft.models.quantized.gguf_file import open_gguf
from outdraft.models.quantized.gguf_vocabulary import end_tokens

EMBEDDING, HEAD, FREQUENCIES = "token_embd.weight", "output.weight", "rope_freqs.weight"
# What llama.cpp calls the families; it has Mistral under llama.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Keys of scaled frequencies, with the values at which they change nothing.
_UNSCALED = {
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
# Plain numbers; the dtype of a file is that of its smallest plain matrices.
_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


def config_of_gguf(path: Path) -> dict[str, Any]:
    """What the config.json of the same model would hold.

    Raises:
        ConfigError: as open_gguf; or the architecture or a value is not supported.
    """
    file = open_gguf(path)
    values, tensors = file.values, file.tensors
    name = values.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise ConfigError(
            f"{path}: architecture {name!r} is not supported; supported in GGUF files: "
            f"{', '.join(_ARCHITECTURES)}"
        )
    if EMBEDDING not in tensors:
        raise ConfigError(f"{path} lacks the tensor {EMBEDDING}")
    of_model = {
        key.removeprefix(f"{name}."): value
        for key, value in values.items()
        if key.startswith(f"{name}.")
    }
    kinds = {tensor.kind for tensor in tensors.values() if len(tensor.shape) == 2}
    plain = next((kind for kind in _DTYPES if kind in kinds), "BF16")
    is_plain = kinds <= _DTYPES.keys()
    rope = _rope(of_model)
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[name]],
        **_sizes(of_model),
        "vocab_size": tensors[EMBEDDING].shape[0],
        "tie_word_embeddings": HEAD not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "rope_parameters": rope,
        "torch_dtype": _DTYPES[plain] if is_plain else "bfloat16",
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(end_tokens(file)),
    }
    if FREQUENCIES in tensors:  # what Llama 3.1 divides the frequencies by
        if "rope_type" in rope:
            raise ConfigError(f"{path}: rope.scaling beside {FREQUENCIES} is not supported")
        factors = tensors[FREQUENCIES].raw.view("<f4").ravel().tolist()
        config["rope_parameters"] = rope | {
            "rope_type": "longrope",
            "long_factor": factors,
            "short_factor": factors,
            "attention_factor": 1.0,
        }
    if not is_plain:
        config["quantization_config"] = {"quant_method": "gguf"}
    return config


def tokenizer_config_of_gguf(path: Path) -> dict[str, Any]:
    """What the tokenizer_config.json of the same model would hold; raises as open_gguf."""
    values = open_gguf(path).values
    tokens = values.get("tokenizer.ggml.tokens") or []
    found = {"chat_template": values.get("tokenizer.chat_template")}
    for ours, theirs in _SPECIAL.items():
        token = values.get(f"tokenizer.ggml.{theirs}_token_id")
        if token is not None and token < len(tokens):
            found[ours] = tokens[token]
    return {key: value for key, value in found.items() if value is not None}


def _sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of the network; ModelConfig checks them."""
    names = {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "max_position_embeddings": "context_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    }
    found = {ours: values[theirs] for ours, theirs in names.items() if theirs in values}
    if "head_dim" not in found and "rope.dimension_count" in values:
        found["head_dim"] = values["rope.dimension_count"]
    return found


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """As llama.cpp's load_hparams: files of 2023 tell a factor without a type."""
    rope: dict[str, Any] = {"rope_theta": float(values.get("rope.freq_base", 10000.0))}
    num_turned = values.get("rope.dimension_count")
    if num_turned not in (None, values.get("attention.key_length", num_turned)):
        raise ConfigError(f"GGUF: rope.dimension_count {num_turned} of a part of each head")
    factor = float(values.get("rope.scaling.factor") or values.get("rope.scale_linear") or 1.0)
    kind = values.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise ConfigError(f"GGUF: rope.scaling.type {kind!r} is not supported")
    if kind == "none" or factor == 1.0:
        return rope
    for key, default in _UNSCALED.items():
        if values.get(key, default) != default:
            raise ConfigError(f"GGUF: {key} {values[key]} is not supported")
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        if length := values.get("rope.scaling.original_context_length"):
            rope["original_max_position_embeddings"] = int(length)
        for name in ("beta_fast", "beta_slow"):
            if (beta := values.get(f"rope.scaling.yarn_{name}")) is not None:
                rope[name] = float(beta)
    return rope
