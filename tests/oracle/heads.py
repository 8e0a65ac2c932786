"""Random draft heads for any tiny target, in published formats; weights that bfloat16 holds."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

NUM_HEADS, DRAFT_SHARE = 4, 0.7
BLOCK_SIZE, PAIR_RANK = 5, 6
SAMPLED_LOGITS = 2.0  # spread of the logits: some tokens are likelier, none is sure


def random_head(kind: str, target: Path, folder: Path) -> Path:
    """A checkpoint of "eagle", "eagle3", "p-eagle", "medusa", "mlp_speculator", "dflash"
    or "dspark"."""
    config = _shape_of(target)
    makers = {
        "eagle": _eagle,
        "eagle3": _eagle3,
        "p-eagle": _p_eagle,
        "medusa": _medusa,
        "mlp_speculator": _mlp_speculator,
        "dflash": _dflash,
        "dspark": _dspark,
    }
    written, tensors = makers[kind](config)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(written))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _shape_of(target: Path) -> dict[str, Any]:
    """The keys of config.json that heads have, whatever the target calls them."""
    config = AutoConfig.from_pretrained(target)
    defaults = {
        "num_key_value_heads": config.num_attention_heads,
        "intermediate_size": 2 * config.hidden_size,
        "rms_norm_eps": 1e-5,
    }
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    known = {name: getattr(config, name) for name in (*names, "max_position_embeddings")}
    return {**defaults, **config.to_dict(), **known}


class _Noise:
    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def weight(self, *shape: int, scale: float = 1.0) -> Tensor:
        noise = torch.randn(shape, generator=self._generator)
        return (scale * noise * shape[-1] ** -0.5).bfloat16()

    def norm(self, size: int) -> Tensor:
        return (1 + 0.2 * torch.randn(size, generator=self._generator)).bfloat16()


def _layer(noise: _Noise, config: dict[str, Any], width: int) -> dict[str, Tensor]:
    size, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = size // heads
    return {
        "self_attn.q_proj.weight": noise.weight(size, width),
        "self_attn.k_proj.weight": noise.weight(kv_heads * head_size, width),
        "self_attn.v_proj.weight": noise.weight(kv_heads * head_size, width),
        "self_attn.o_proj.weight": noise.weight(size, size),
        "mlp.gate_proj.weight": noise.weight(inner, size),
        "mlp.up_proj.weight": noise.weight(inner, size),
        "mlp.down_proj.weight": noise.weight(size, inner),
        "post_attention_layernorm.weight": noise.norm(size),
    }


def _llama(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    keys = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "vocab_size",
    )
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rope_theta": 10000.0,
        **{key: config[key] for key in keys},
    }


def _eagle(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    noise, size = _Noise(11), config["hidden_size"]
    layer = _layer(noise, config, size)
    tensors = {f"layers.0.{name}": tensor for name, tensor in layer.items()}
    tensors["fc.weight"] = noise.weight(size, 2 * size)
    return _llama(config, "LlamaForCausalLMEagle"), tensors


def _eagle3(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """With a vocabulary of its own."""
    noise, size, vocab_size = _Noise(12), config["hidden_size"], config["vocab_size"]
    num_drafts = max(2, int(DRAFT_SHARE * vocab_size))
    ids = torch.arange(vocab_size)[:: max(1, vocab_size // num_drafts)][:num_drafts]
    layer = _layer(noise, config, 2 * size)
    tensors = {f"midlayer.{name}": tensor for name, tensor in layer.items()}
    tensors |= {
        "fc.weight": noise.weight(size, 3 * size),
        "midlayer.input_layernorm.weight": noise.norm(size),
        "midlayer.hidden_norm.weight": noise.norm(size),
        "norm.weight": noise.norm(size),
        "lm_head.weight": noise.weight(len(ids), size, scale=SAMPLED_LOGITS),
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True),
    }
    layers = config["num_hidden_layers"]
    written = _llama(config, "LlamaForCausalLMEagle3") | {
        "draft_vocab_size": len(ids),
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, layers]},
    }
    return written, tensors


def _p_eagle(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    written, tensors = _eagle3(config)
    mask = _Noise(13).weight(1, 3 * config["hidden_size"], scale=5.0)
    return written | {"pard_token": 0}, tensors | {"mask_hidden": mask}


def _medusa(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    noise, size = _Noise(14), config["hidden_size"]
    tensors: dict[str, Tensor] = {}
    for head in range(NUM_HEADS):
        tensors[f"blocks.{head}.layers.0.weight"] = noise.weight(size, size)
        tensors[f"blocks.{head}.layers.0.bias"] = noise.weight(size)
        shape = config["vocab_size"], size
        tensors[f"lm_heads.{head}.weight"] = noise.weight(*shape, scale=SAMPLED_LOGITS)
    written = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": size,
        "vocab_size": config["vocab_size"],
        "num_heads": NUM_HEADS,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
    }
    return written, tensors


def _mlp_speculator(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    noise, size, inner = _Noise(15), config["hidden_size"], 16
    tensors: dict[str, Tensor] = {}
    for head in range(NUM_HEADS):
        vocabulary = config["vocab_size"], inner
        tensors |= {
            f"speculator.emb.{head}.weight": noise.weight(*vocabulary, scale=inner**0.5),
            f"speculator.proj.{head}.weight": noise.weight(inner, inner if head else size),
            f"speculator.ln.{head}.weight": noise.norm(inner),
            f"speculator.ln.{head}.bias": noise.weight(inner),
            f"speculator.head.{head}.weight": noise.weight(*vocabulary, scale=SAMPLED_LOGITS),
        }
    written = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": config["vocab_size"],
        "emb_dim": size,
        "inner_dim": inner,
        "n_predict": NUM_HEADS,
        "n_candidates": 3,
        "top_k_tokens_per_head": [3] * NUM_HEADS,
        "tie_weights": False,
        "scale_input": True,
    }
    return written, tensors


def _dflash(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As its authors write it; two layers that see whole blocks."""
    noise, size, head_size = _Noise(16), config["hidden_size"], 8
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = {
        "fc.weight": noise.weight(size, 2 * size),
        "hidden_norm.weight": noise.norm(size),
        "norm.weight": noise.norm(size),
    }
    for layer in range(2):
        own = _layer(noise, config, size) | {
            "self_attn.q_proj.weight": noise.weight(heads * head_size, size),
            "self_attn.k_proj.weight": noise.weight(kv_heads * head_size, size),
            "self_attn.v_proj.weight": noise.weight(kv_heads * head_size, size),
            "self_attn.o_proj.weight": noise.weight(size, heads * head_size),
            "self_attn.q_norm.weight": noise.norm(head_size),
            "self_attn.k_norm.weight": noise.norm(head_size),
            "input_layernorm.weight": noise.norm(size),
        }
        tensors |= {f"layers.{layer}.{name}": tensor for name, tensor in own.items()}
    written = _llama(config, "DFlashDraftModel") | {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "head_dim": head_size,
        "block_size": BLOCK_SIZE,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 1]},
    }
    return written, tensors


def _dspark(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As the speculators library writes it, with a vocabulary of its own."""
    noise, size, vocab_size = _Noise(17), config["hidden_size"], config["vocab_size"]
    dflash, tensors = _dflash(config)
    num_drafts = max(2, int(DRAFT_SHARE * vocab_size))
    ids = torch.arange(vocab_size)[:: max(1, vocab_size // num_drafts)][:num_drafts]
    tensors |= {
        "lm_head.weight": noise.weight(len(ids), size, scale=SAMPLED_LOGITS),
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True),
        "markov_head.markov_w1.weight": noise.weight(vocab_size, PAIR_RANK, scale=2.0),
        "markov_head.markov_w2.weight": noise.weight(len(ids), PAIR_RANK, scale=3.0),
        "confidence_head.proj.weight": noise.weight(1, size + PAIR_RANK),
        "confidence_head.proj.bias": noise.weight(1),
    }
    layer = {key: value for key, value in dflash.items() if "dflash" not in key}
    del layer["block_size"], layer["architectures"]
    written = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": layer,
        "block_size": BLOCK_SIZE - 1,
        "mask_token_id": 0,
        "aux_hidden_state_layer_ids": [1, 2],
        "draft_vocab_size": len(ids),
        "markov_rank": PAIR_RANK,
        "sample_from_anchor": True,
    }
    return written, tensors
