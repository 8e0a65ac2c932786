"""Makes `big`, random weights in the shape of a 0.6B Qwen3, and `big_drafter`, in a given folder.

The drafter is the model's own first two layers, and later layers write with a small gain, so that
four drafts and the target's own token bring 3.4 tokens a round. The gain was tuned to that number,
so weights of another scale need another gain. Acceptance is made by construction and says nothing
about any engine: the pair compares what the same drafts cost in different engines. The tokenizer is
the embedded pair's, padded to the vocabulary by tokens that no text holds.
"""

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outdraft import assets

SEED = 20261122
SCALE = 0.04  # standard deviation, at 1024 wide, of all weights but those of norms
LATER_GAIN = 0.025  # of what the layers behind the drafter's write
HEAD_SIZE, KV_HEADS = 128, 8


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a Qwen3 target, the first layers of which are its drafter."""

    hidden: int
    intermediate: int
    vocabulary: int
    layers: int
    heads: int
    drafter_layers: int

    def config(self, num_layers: int) -> dict[str, Any]:
        """config.json of the first layers."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": num_layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_SIZE,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "max_position_embeddings": 4096,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": "bfloat16",
        }


BIG = Shape(1024, 3072, 8192, layers=28, heads=16, drafter_layers=2)


def make_pair(shape: Shape, target: Path, drafter: Path, device: str = "cpu") -> None:
    """Write both as checkpoints; the same ones each time on one device, which draws the numbers."""
    weights = _make_weights(shape, device)
    _write(target, shape, weights, shape.layers)
    _write(drafter, shape, weights, shape.drafter_layers)


def _make_weights(shape: Shape, device: str) -> dict[str, Tensor]:
    """The whole model by the names of a checkpoint, on the host."""
    generator = torch.Generator(device).manual_seed(SEED)
    ones = partial(torch.ones, dtype=torch.bfloat16)
    scale = SCALE * (BIG.hidden / shape.hidden) ** 0.5
    queries, keys = shape.heads * HEAD_SIZE, KV_HEADS * HEAD_SIZE

    def normal(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        drawn = torch.randn(rows, columns, generator=generator, device=device)
        return (drawn * (scale * gain)).to(torch.bfloat16).cpu()

    weights = {"model.embed_tokens.weight": normal(shape.vocabulary, shape.hidden)}
    for layer in range(shape.layers):
        gain = 1.0 if layer < shape.drafter_layers else LATER_GAIN
        parts = {
            "input_layernorm": ones(shape.hidden),
            "self_attn.q_proj": normal(queries, shape.hidden),
            "self_attn.k_proj": normal(keys, shape.hidden),
            "self_attn.v_proj": normal(keys, shape.hidden),
            "self_attn.o_proj": normal(shape.hidden, queries, gain),
            "self_attn.q_norm": ones(HEAD_SIZE),
            "self_attn.k_norm": ones(HEAD_SIZE),
            "post_attention_layernorm": ones(shape.hidden),
            "mlp.gate_proj": normal(shape.intermediate, shape.hidden),
            "mlp.up_proj": normal(shape.intermediate, shape.hidden),
            "mlp.down_proj": normal(shape.hidden, shape.intermediate, gain),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": part for name, part in parts.items()}
    return weights | {"model.norm.weight": ones(shape.hidden)}


def _write(folder: Path, shape: Shape, weights: dict[str, Tensor], num_layers: int) -> None:
    """A checkpoint of the first layers, as transformers and all engines read it."""
    folder.mkdir(parents=True, exist_ok=True)
    left_out = tuple(f"model.layers.{layer}." for layer in range(num_layers, shape.layers))
    kept = {name: one for name, one in weights.items() if not name.startswith(left_out)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = json.loads((assets.target_path() / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    for token_id in range(len(vocabulary), shape.vocabulary):
        vocabulary[f"unused{token_id}"] = token_id  # no merge leads to it
    for name, values in (
        ("config", shape.config(num_layers)),
        ("generation_config", {"bos_token_id": 0, "eos_token_id": 1}),
        ("tokenizer", tokenizer),
        ("tokenizer_config", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")


if __name__ == "__main__":
    models = Path(sys.argv[1])
    make_pair(BIG, models / "big", models / "big_drafter")
