"""GGUF files of families that the transformers library computes.

The library's tables say what keys and tensors of a file are called in its configurations and
networks. It leaves out what it does not know, and a network without one of its settings gives
plausible nonsense. So keys that its table lacks are added, as llama.cpp reads them
(src/llama-model.cpp), and a key or a tensor that nothing reads is an error. The library reads all
of a file at once, as numbers; here tensors stay unread, and codes stay codes.

Dimension key: X experts, D inputs, E outputs.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outdraft.core.errors import ConfigError
from outdraft.models.checkpoints.config_json import read_config
from outdraft.models.checkpoints.files import listed
from outdraft.models.checkpoints.gguf_file import GgufFile, GgufTensor, open_gguf
from outdraft.models.checkpoints.gguf_metadata import (
    ARCHITECTURE,
    ATTENTION_FACTOR,
    EMBEDDING,
    HEAD,
    ROPE_KEYS,
    common_config,
    has_own_network,
    numbers_of,
    refuse_unread,
    rope_of,
    values_of_model,
)
from outdraft.models.checkpoints.gguf_weights import gguf_weights, stored_tensor
from outdraft.models.checkpoints.reader import Checkpoint
from outdraft.models.checkpoints.stored import StoredWeight

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
_EXPERTS = re.compile(r"(blk\.\d+\.ffn_(gate|up|down)_exps)\.weight")
_IN_MODEL = re.compile(r"(.*\.experts)\.(?:gate_up_proj|down_proj)")
# Names that a family's checkpoints have for the products of one expert, in place of the usual ones.
_PARTS = {"minimax_m2": {"gate": "w1", "up": "w3", "down": "w2"}}


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
    refuse_unread(file, unread - (_positions(kind(), config, file) | _of_family(config, file)))
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


def library_config(path: Path) -> PretrainedConfig:
    """The library's configuration for the network of a GGUF file; raises as read_config."""
    raw = read_config(path)
    plain = {key: value for key, value in raw.items() if key != "quantization_config"}
    return CONFIG_MAPPING[raw["model_type"]].from_dict(plain)


def open_gguf_checkpoint(path: Path, model: PreTrainedModel) -> Checkpoint:
    """The tensors of a GGUF file; none of them is read.

    Args:
        model: the network, whose weights need no memory.

    Raises:
        ConfigError: the file is damaged, or does not fit the network.
    """
    if has_own_network(path):
        found = gguf_weights(path)
    else:
        found = _mapped_weights(path, model)
        _check_rotary_size(path, model)
    return Checkpoint(found, release=open_gguf(path).release)


def _mapped_weights(path: Path, model: PreTrainedModel) -> dict[str, StoredWeight]:
    """The weights of a file by the names of a checkpoint of the library."""
    file, config = open_gguf(path), read_config(path)
    processor = TENSOR_PROCESSORS.get(file.values[ARCHITECTURE], TensorProcessor)(config=config)
    names: dict[str, str] = get_gguf_hf_weights_map(model, processor)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    parts = _PARTS.get(config["model_type"], {})
    found: dict[str, StoredWeight] = {}
    unknown = list[str]()
    for tensor in file.tensors.values():
        experts = _EXPERTS.fullmatch(tensor.name)
        name = names.get(experts[1] if experts else tensor.name)
        if tensor.name in (LONG, SHORT):  # the configuration has them
            continue
        if name is None:
            unknown.append(tensor.name)
        elif experts is not None:
            found |= _experts(tensor, name, parts.get(experts[2], f"{experts[2]}_proj"))
        else:
            found[name] = _weight(tensor, processor, shapes[name])
    if unknown:
        raise ConfigError(
            f"{path} has tensors that {type(model).__name__} has no use for: {listed(unknown)}"
        )
    return found


def _experts(tensor: GgufTensor, name: str, part: str) -> Iterator[tuple[str, StoredWeight]]:
    """The experts of one tensor [X, E, D], one by one.

    Args:
        name: of the network's parameter that holds all of them.
        part: what one's product is called.
    """
    match = _IN_MODEL.fullmatch(name)
    if match is None or len(tensor.shape) != 3:
        raise ConfigError(f"GGUF: experts that are {name} in the network are not supported")
    num_experts, num_rows, num_inputs = tensor.shape
    raw = tensor.raw.reshape(num_experts, num_rows, -1)
    for expert in range(num_experts):
        one = replace(tensor, shape=(num_rows, num_inputs), raw=raw[expert])
        yield f"{match[1]}.{expert}.{part}.weight", stored_tensor(one, None)


def _weight(tensor: GgufTensor, processor: TensorProcessor, shape: tuple[int, ...]) -> StoredWeight:
    """A tensor as it is, or with numbers that the library makes of it.

    Args:
        shape: that of the network's parameter.
    """
    stored = stored_tensor(tensor, None)
    if tensor.name in (EMBEDDING, HEAD) or not _is_changed(tensor, processor):
        return stored
    return StoredWeight(
        shape=shape,
        label=stored.label,
        group_inputs=shape[-1],
        reason="the network has other numbers than the file",
        is_plain=stored.is_plain,
        read=partial(_changed, stored, tensor.name, processor),
    )


def _is_changed(tensor: GgufTensor, processor: TensorProcessor) -> bool:
    """Is true if the library gives back something else than it gets. Takes no memory."""
    zeros = np.broadcast_to(np.float32(0), tensor.shape)
    return processor.process(zeros, tensor.name).weights is not zeros


def _changed(stored: StoredWeight, name: str, processor: TensorProcessor) -> Tensor:
    numbers: np.ndarray = processor.process(stored.numbers().float().numpy(), name).weights
    return torch.from_numpy(np.ascontiguousarray(numbers))


def _check_rotary_size(path: Path, model: PreTrainedModel) -> None:
    """Raise ConfigError if the network rotates more or less of each head than the file says."""
    of_model: Mapping[str, Any] = values_of_model(open_gguf(path))
    expected = of_model.get("rope.dimension_count", of_model.get("attention.key_length"))
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and expected not in (None, 2 * len(buffer)):
            raise ConfigError(
                f"{path}: {type(model).__name__} turns {2 * len(buffer)} numbers of each head, but "
                f"the file says {expected}"
            )
