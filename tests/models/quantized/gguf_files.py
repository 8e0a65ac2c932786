"""GGUF files of tiny models, written by the gguf package as llama.cpp's converter does."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedModel

from outdraft.core.weights import WeightFormat
from tests.kernels.gguf_blocks import random_rows

# Hidden sizes that every kind of block divides.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}
ARCHITECTURES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
NAMES = {  # what llama.cpp calls families that it knows by another name
    "gemma3_text": "gemma3",
    "mistral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
PLAIN = {Kind.F32: np.float32, Kind.F16: np.float16}


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    kind_of: Callable[[str], Kind],
    vocabulary: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    **values: Sequence[float],
) -> Path:
    """Write the model.

    Args:
        kind_of: the kind of a tensor by its name in GGUF; norms are F32 always.
        vocabulary: tokens, types and merges of a byte-level tokenizer; it may have its template,
            how it splits texts (pre), and whether they begin with a token (adds_bos).
        more: metadata of the architecture, such as rope.scaling.factor.
        values: rope_factors, rope_factors_long and rope_factors_short.
    """
    config = model.config
    name = NAMES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(int(head_size * rope.get("partial_rotary_factor", 1)))
    writer.add_vocab_size(config.vocab_size)
    _add_vocabulary(writer, vocabulary or _letters(config.vocab_size))
    names = gguf.get_tensor_name_map(ARCHITECTURES[name], config.num_hidden_layers)
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part_name, part in _in_parts(hf_name, tensor):
            ours = names.get_name(part_name, try_suffixes=(".weight", ".bias"))
            assert ours is not None, part_name
            kept = _as_converted(name, ours, part, config)
            is_plain = kept.dim() == 1 or "_inp" in ours  # norms, biases, and routers
            _add(writer, ours, kept, Kind.F32 if is_plain else kind_of(ours))
    for key, value in (more or {}).items():
        adds = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool}
        add: Any = (adds | {list: writer.add_array}).get(type(value))
        (add or writer.add_float32)(f"{name}.{key}", value)
    for factors, numbers in values.items():
        tensor_name = "rope_freqs" if factors == "rope_factors" else factors
        writer.add_tensor(f"{tensor_name}.weight", np.array(numbers, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _in_parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor of the network, or those that the published checkpoints have in its place."""
    if name.endswith("experts.gate_up_proj"):
        for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True):
            yield name.replace("gate_up_proj", f"{part}.weight"), half
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor
    else:
        yield name, tensor


def _as_converted(family: str, name: str, tensor: Tensor, config: Any) -> Tensor:
    """What the converter makes of a tensor's numbers."""
    if family == "llama" and (".attn_q." in name or ".attn_k." in name):
        is_query = ".attn_q." in name
        heads = config.num_attention_heads if is_query else config.num_key_value_heads
        return _permuted(tensor, heads)
    if family in ("gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
        return tensor + 1
    return tensor[0] if name.endswith("ffn_gate_inp_shexp.weight") else tensor


def _permuted(weight: Tensor, num_heads: int) -> Tensor:
    """As llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute."""
    rest = weight.shape[1:]
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *rest)
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: Kind) -> None:
    numbers = tensor.float().numpy()
    if kind in PLAIN:
        writer.add_tensor(name, numbers.astype(PLAIN[kind]))
    else:
        try:
            blocks = gguf.quantize(numbers, kind)
        except NotImplementedError:
            blocks = _random_blocks(numbers, kind)
        writer.add_tensor(name, blocks, raw_dtype=kind)


def _random_blocks(numbers: np.ndarray, kind: Kind) -> np.ndarray:
    """Blocks of a kind that the package can only read, with numbers of about the same size."""
    format = WeightFormat(kind.name.lower())
    sizes = math.prod(numbers.shape[:-1]), numbers.shape[-1]
    spread = random_rows(format, *sizes, size=1.0).numbers().std().item()
    size = float(numbers.std()) / spread
    rows_EB = random_rows(format, *sizes, seed=len(numbers), size=size).rows_EB
    return rows_EB.reshape(*numbers.shape[:-1], -1)


def byte_level(texts: Sequence[str]) -> tuple[Tokenizer, dict[str, Any]]:
    """A tokenizer trained on the texts, and the vocabulary that a file of it has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"]
    )
    tokenizer.train_from_iterator(texts, trainer)
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return tokenizer, {
        "tokens": tokens,
        "types": [3, 3, *[1] * (len(tokens) - 2)],
        "merges": [" ".join(pair) for pair in merges],
        "template": "{{ bos_token }}{{ messages[0].content }}",
    }


def _letters(count: int) -> dict[str, Any]:
    return {"tokens": [f"t{index}" for index in range(count)], "types": [1] * count, "merges": []}


def _add_vocabulary(writer: gguf.GGUFWriter, vocabulary: dict[str, Any]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.get("pre", "default"))
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    if vocabulary["merges"]:
        writer.add_token_merges(vocabulary["merges"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if "adds_bos" in vocabulary:
        writer.add_add_bos_token(vocabulary["adds_bos"])
    if "template" in vocabulary:
        writer.add_chat_template(vocabulary["template"])


def same_numbers(path: Path, model: PreTrainedModel) -> PreTrainedModel:
    """The model with the numbers that the gguf package reads from the file."""
    reader, config = gguf.GGUFReader(path), model.config
    name = NAMES.get(config.model_type, config.model_type)
    names = gguf.get_tensor_name_map(ARCHITECTURES[name], config.num_hidden_layers)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    with torch.no_grad():
        for hf_name, weight in model.named_parameters():
            ours = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
            stored = tensors[ours]
            numbers = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type).copy())
            if name == "llama" and (".attn_q." in ours or ".attn_k." in ours):
                is_query = ".attn_q." in ours
                heads = config.num_attention_heads if is_query else config.num_key_value_heads
                size = len(weight) // heads
                turned = numbers.reshape(heads, size // 2, 2, *weight.shape[1:])
                numbers = turned.swapaxes(1, 2).reshape(weight.shape)
            weight.copy_(numbers)
    return model
