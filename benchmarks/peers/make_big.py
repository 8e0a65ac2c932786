"""Makes `big`, random weights in the shape of a 0.6B Qwen3, and `big_drafter`, in a given folder.

The drafter is the model's own first two layers, and later layers write with a small gain, so that
four drafts and the target's own token bring 3.4 tokens a round. That is made by construction and
says nothing about any engine: the pair compares what the same drafts cost in different engines. The
tokenizer is the embedded pair's, padded to the vocabulary by tokens that no text holds.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from outdraft import assets

SEED = 20261122
SCALE = 0.04  # standard deviation of all weights but those of norms
LATER_GAIN = 0.025  # of what the layers behind the drafter's write
LAYERS, DRAFTER_LAYERS = 28, 2
HIDDEN, INTERMEDIATE, VOCABULARY = 1024, 3072, 8192
HEADS, KV_HEADS, HEAD_SIZE = 16, 8, 128
CONFIG = f"""{{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
"vocab_size": {VOCABULARY}, "hidden_size": {HIDDEN}, "intermediate_size": {INTERMEDIATE},
"num_attention_heads": {HEADS}, "num_key_value_heads": {KV_HEADS}, "head_dim": {HEAD_SIZE},
"rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "max_position_embeddings": 4096,
"attention_bias": false, "tie_word_embeddings": true, "bos_token_id": 0, "eos_token_id": 1,
"torch_dtype": "bfloat16"}}"""


def make_weights() -> dict[str, Tensor]:
    """The whole model by the names of a checkpoint; the same every time."""
    generator = torch.Generator().manual_seed(SEED)
    ones = partial(torch.ones, dtype=torch.bfloat16)

    def normal(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        drawn = torch.randn(rows, columns, generator=generator)
        return (drawn * (SCALE * gain)).to(torch.bfloat16)

    weights = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        gain = 1.0 if layer < DRAFTER_LAYERS else LATER_GAIN
        parts = {
            "input_layernorm": ones(HIDDEN),
            "self_attn.q_proj": normal(HEADS * HEAD_SIZE, HIDDEN),
            "self_attn.k_proj": normal(KV_HEADS * HEAD_SIZE, HIDDEN),
            "self_attn.v_proj": normal(KV_HEADS * HEAD_SIZE, HIDDEN),
            "self_attn.o_proj": normal(HIDDEN, HEADS * HEAD_SIZE, gain),
            "self_attn.q_norm": ones(HEAD_SIZE),
            "self_attn.k_norm": ones(HEAD_SIZE),
            "post_attention_layernorm": ones(HIDDEN),
            "mlp.gate_proj": normal(INTERMEDIATE, HIDDEN),
            "mlp.up_proj": normal(INTERMEDIATE, HIDDEN),
            "mlp.down_proj": normal(HIDDEN, INTERMEDIATE, gain),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": part for name, part in parts.items()}
    return weights | {"model.norm.weight": ones(HIDDEN)}


def write(folder: Path, weights: dict[str, Tensor], num_layers: int) -> None:
    """A checkpoint of the first layers, as transformers and all engines read it."""
    folder.mkdir(parents=True, exist_ok=True)
    left_out = tuple(f"model.layers.{layer}." for layer in range(num_layers, LAYERS))
    kept = {name: one for name, one in weights.items() if not name.startswith(left_out)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = json.loads((assets.target_path() / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    for token_id in range(len(vocabulary), VOCABULARY):
        vocabulary[f"unused{token_id}"] = token_id  # no merge leads to it
    for name, values in (
        ("config", json.loads(CONFIG) | {"num_hidden_layers": num_layers}),
        ("generation_config", {"bos_token_id": 0, "eos_token_id": 1}),
        ("tokenizer", tokenizer),
        ("tokenizer_config", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")


if __name__ == "__main__":
    made = make_weights()
    write(Path(sys.argv[1]) / "big", made, LAYERS)
    write(Path(sys.argv[1]) / "big_drafter", made, DRAFTER_LAYERS)
