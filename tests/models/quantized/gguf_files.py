"""GGUF files of tiny models, written by the gguf package as llama.cpp's converter does."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedModel

from outdraft.core.weight_format import WeightFormat
from tests.kernels.gguf_blocks import random_rows

# Hidden sizes that every kind of block divides.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
PLAIN = {Kind.F32: np.float32, Kind.F16: np.float16}


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    kind_of: Callable[[str], Kind],
    vocabulary: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    **values: float,
) -> Path:
    """Write the model.

    Args:
        kind_of: the kind of a tensor by its name in GGUF; norms are F32 always.
        vocabulary: tokens, types and merges of a byte-level tokenizer; it may have its template,
            how it splits texts (pre), and whether they begin with a token (adds_bos).
        more: metadata of the architecture, such as rope.scaling.factor.
        values: rope_factors.
    """
    config = model.config
    name = "llama" if config.model_type == "mistral" else config.model_type
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_vocab_size(config.vocab_size)
    _add_vocabulary(writer, vocabulary or _letters(config.vocab_size))
    names = gguf.get_tensor_name_map(ARCHITECTURES[name], config.num_hidden_layers)
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        ours = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert ours is not None, hf_name
        if name == "llama" and (".attn_q." in ours or ".attn_k." in ours):
            is_query = ".attn_q." in ours
            heads = config.num_attention_heads if is_query else config.num_key_value_heads
            tensor = _permuted(tensor, heads)
        _add(writer, ours, tensor, Kind.F32 if tensor.dim() == 1 else kind_of(ours))
    for key, value in (more or {}).items():
        add: Any = {str: writer.add_string, int: writer.add_uint32}.get(type(value))
        (add or writer.add_float32)(f"{name}.{key}", value)
    if factors := values.pop("rope_factors", None):
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
    spread = random_rows(format, *numbers.shape, size=1.0).numbers().std().item()
    size = float(numbers.std()) / spread
    return random_rows(format, *numbers.shape, seed=len(numbers), size=size).rows_EB


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
    name = "llama" if config.model_type == "mistral" else config.model_type
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
