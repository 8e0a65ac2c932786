"""The configuration in a GGUF file of a family that the transformers library computes.

The library's table says what the keys of a file are called in its configurations. It leaves out
what it does not know, and a network without one of its settings gives plausible nonsense. So keys
that its table lacks are added, as llama.cpp reads them (src/llama-model.cpp), and a key that
nothing reads is an error.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outdraft.core.errors import ConfigError
from outdraft.models.checkpoints.gguf_file import GgufFile, open_gguf
from outdraft.models.checkpoints.gguf_metadata import (
    ARCHITECTURE,
    ATTENTION_FACTOR,
    ROPE_KEYS,
    common_config,
    numbers_of,
    refuse_unread,
    rope_of,
    values_of_model,
)

# Families whose name in a file is not the library's.
_MODEL_TYPES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gpt-oss": "gpt_oss",
    "minimax-m2": "minimax_m2",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
}
# What the library's table leaves out: names that a family's configuration may have for a key.
_MORE_NAMES = {
    "attention.head_count_kv": ("num_kv_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "context_length": ("n_positions",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
    "feed_forward_length": ("n_inner", "ffn_hidden_size"),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_VALUE_SIZE, _WINDOW = "attention.value_length", "attention.sliding_window"
_LOCAL_BASE, _PARTIAL = "rope.freq_base_swa", "partial_rotary_factor"
# Layers of Gemma's models of 27B: their queries are scaled by the mean size of a head.
_LAYERS_27B = {"gemma2": 46, "gemma3_text": 62}


def mapped_config(path: Path) -> dict[str, Any]:
    """The content of a config.json for the same model.

    Raises:
        ConfigError: as open_gguf; the architecture is not supported, or the file has a value that
            the network would not get.
    """
    file = open_gguf(path)
    name, of_model = file.values.get(ARCHITECTURE), values_of_model(file)
    model_type = _MODEL_TYPES.get(str(name), str(name))
    names = GGUF_CONFIG_MAPPING.get(model_type.removesuffix("_text"))
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if names is None or architecture is None:
        known = sorted(set(GGUF_CONFIG_MAPPING) - {"general", "tokenizer"})
        raise ConfigError(
            f"{path}: architecture {name!r} is not supported; supported in GGUF files: "
            f"{', '.join(known)}"
        )
    kind = CONFIG_MAPPING[model_type]
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        **GGUF_CONFIG_DEFAULTS_MAPPING.get(model_type, {}),
        **common_config(file),
        "pad_token_id": file.values.get("tokenizer.ggml.padding_token_id"),
    }
    known_names = {"head_dim", *kind.__dataclass_fields__, *kind.attribute_map}
    if "attention_bias" in known_names:
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    unread = set[str]()
    for key, value in of_model.items():
        candidates = names.get(key), *_MORE_NAMES.get(key, ())
        found = next((one for one in candidates if one in known_names), None)
        if found is None:
            unread.add(key)
        elif found != "vocab_size":  # the table of vectors has as many rows
            config[found] = _of_all_layers(key, value)
    read = _positions(kind(), config, file) | _of_family(config, file)
    refuse_unread(file, unread - read)
    return config


def _of_all_layers(key: str, value: Any) -> Any:
    """A number of the network, which a file may have for each layer."""
    if not isinstance(value, np.ndarray):
        return value
    if len(set(value.tolist())) != 1:
        raise ConfigError(f"GGUF: {key} that differs from layer to layer is not supported")
    return value[0].item()


def _head_size(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _positions(defaults: PretrainedConfig, config: dict[str, Any], file: GgufFile) -> set[str]:
    """Add rotary frequencies to the configuration; return the keys that they were read from.

    Args:
        defaults: the family's configuration.
    """
    of_model, head_size = values_of_model(file), _head_size(config)
    if of_model.get(_VALUE_SIZE, head_size) != head_size:
        raise ConfigError(f"GGUF: {_VALUE_SIZE} that is not attention.key_length is not supported")
    old: Any = getattr(defaults, "rope_parameters", None)
    if old is None:
        return {_VALUE_SIZE}
    has_factors = LONG in file.tensors and SHORT in file.tensors
    scale = float(of_model.pop(ATTENTION_FACTOR, 1.0)) if has_factors else 1.0
    rope = rope_of(of_model)
    share = of_model.get("rope.dimension_count", head_size) / head_size
    if _PARTIAL in old:
        rope[_PARTIAL] = share
    elif share != 1:
        raise ConfigError("GGUF: rope.dimension_count of a part of each head is not supported")
    if has_factors:
        length = of_model.get(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        )
        config["original_max_position_embeddings"] = int(length)
        rope |= {
            "rope_type": "longrope",
            "long_factor": numbers_of(file, LONG),
            "short_factor": numbers_of(file, SHORT),
            "attention_factor": scale,
            "original_max_position_embeddings": int(length),
        }
    config["rope_parameters"] = rope
    return {_VALUE_SIZE, *ROPE_KEYS}


def _of_family(config: dict[str, Any], file: GgufFile) -> set[str]:
    """Add settings from llama.cpp's code that are under no key; return the keys read besides."""
    model_type, of_model, read = config["model_type"], values_of_model(file), set[str]()
    if (num_layers := _LAYERS_27B.get(model_type)) is not None:
        is_27b = config["num_hidden_layers"] == num_layers
        mean_size = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = mean_size if is_27b else _head_size(config)
    if model_type == "gemma3_text":
        local_base = float(of_model.get(_LOCAL_BASE, 10000.0))
        config["rope_parameters"] = {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local_base},
        }
        read.add(_LOCAL_BASE)
        if not of_model.get(_WINDOW):
            config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    if model_type == "stablelm":
        config["use_qkv_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in file.tensors
        read.add("use_parallel_residual")
    return read
