"""Tiny random checkpoints of each family, made and answered by transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from outdraft.core.weights import WeightFormat
from outdraft.kv.cache import KVCache
from outdraft.models.decoder.causal_lm import CausalLM
from outdraft.models.modules import linears_of
from tests.attention.causal import causal_metadata

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 24,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**TINY | changes))


def mistral(**changes: Any) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**TINY | changes))


def qwen2(**changes: Any) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**TINY | changes))


def qwen3(**changes: Any) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**TINY | {"head_dim": 16} | changes))


WINDOWED = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
VARIANTS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: llama(rms_norm_eps=1e-5),
    "llama-one-head-each": lambda: llama(num_key_value_heads=4),
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "llama-wide-heads": lambda: llama(head_dim=24, rope_parameters={"rope_theta": 500.0}),
    "llama-linear-rope": lambda: llama(rope_parameters=LINEAR),
    "llama-llama3-rope": lambda: llama(rope_parameters=LLAMA3),
    "llama-yarn-rope": lambda: llama(rope_parameters=YARN),
    "mistral-window": lambda: mistral(sliding_window=7),
    "mistral-no-window": lambda: mistral(sliding_window=None),
    "qwen2": lambda: qwen2(),
    "qwen2-window": lambda: qwen2(**WINDOWED),
    "qwen3": lambda: qwen3(tie_word_embeddings=True),
    "qwen3-window": lambda: qwen3(attention_bias=True, **WINDOWED),
}


def randomised(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Weights so large that every part of the network shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 2:
                weight.copy_(noise * weight.shape[1] ** -0.5)
            else:
                weight.copy_(noise * 0.3 + (1.0 if "norm" in name else 0.0))
        model.get_input_embeddings().weight.mul_(4.0)
    return model.eval()


def save(model: PreTrainedModel, path: Path, **options: Any) -> Path:
    model.save_pretrained(path, **options)
    return path


def random_tokens(num_tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, TINY["vocab_size"], (num_tokens,), generator=generator)


def chunked_logits(
    model: CausalLM,
    token_ids_T: Tensor,
    chunk_sizes: list[int],
    block_size: int = 4,
    logits_of: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """[T, V]: a prompt that is fed in chunks, over blocks in no order; `logits_of` hidden states:
    other ones than the model's."""
    config, num_blocks = model.shard, len(token_ids_T) // block_size + 2
    cache = KVCache(
        config.cache_shapes,
        num_blocks,
        block_size,
        model.dtype,
        model.device,
    )
    generator = torch.Generator().manual_seed(1)
    table_P = torch.randperm(num_blocks, generator=generator).to(torch.int32).to(model.device)
    token_ids_T = token_ids_T.to(model.device)
    assert sum(chunk_sizes) == len(token_ids_T)
    logits, start = [], 0
    for size in chunk_sizes:
        positions_T = torch.arange(start, start + size, device=model.device)
        slots_T = table_P[positions_T // block_size].long() * block_size + positions_T % block_size
        metadata = causal_metadata(start, size, slots_T, table_P)
        hidden_TD = model(token_ids_T[start : start + size], cache.layers, metadata)
        logits.append((logits_of or model.logits)(hidden_TD))
        start += size
    return torch.cat(logits)


def are_bfloat16(module: nn.Module) -> bool:
    """Whether all products of a module keep their weights as bfloat16."""
    return all(part.format is WeightFormat.BFLOAT16 for part in linears_of(module))
