"""Writes the trained pair where the package finds it, with its prompts and its model card.

Everything the card says comes from the logs and from a measurement made here. Dimension key: V
vocabulary.
"""

import argparse
import json
import platform
from dataclasses import asdict
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch
from corpus import BEGIN, END
from held_out_prompts import held_out_prompts, with_further_prompts
from safetensors.torch import save_file
from train_target import next_token_loss
from transformers import LlamaForCausalLM

NUM_PROMPTS = 24  # one of a file; they come first
NUM_ALL_PROMPTS = 400
# Names that Llama readers of every age understand; `rope_theta` is the older spelling.
CONFIG_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_model(model: LlamaForCausalLM, tokenizer: Path, out: Path) -> None:
    """A folder in Hugging Face's layout; the tied output matrix is not stored twice."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    write_json(
        out / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **{name: config[name] for name in CONFIG_FIELDS},
            "rope_theta": config["rope_parameters"]["rope_theta"],
            "torch_dtype": "bfloat16",
        },
    )
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    write_json(out / "generation_config.json", ids)
    (out / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
        },
    )


@torch.inference_mode()
def whole_loss(model: LlamaForCausalLM, tokens: np.ndarray, length: int) -> float:
    """Nats a token over all of `tokens`, in windows that do not overlap."""
    nats = 0.0
    for begin in range(0, len(tokens) - 1, length):
        window = torch.from_numpy(tokens[None, begin : begin + length + 1].astype(np.int64))
        nats += next_token_loss(model, window).item() * (window.shape[1] - 1)
    return nats / (len(tokens) - 1)


def last_record(log: Path) -> dict[str, Any]:
    return json.loads(log.read_text().splitlines()[-1])


def model_facts(
    role: str, model: LlamaForCausalLM, nats_per_token: float, tokens_per_byte: float, trained: int
) -> dict[str, str]:
    """What the card says of one model, under names that begin with its role."""
    config = model.config
    heads = f"{config.num_attention_heads} ({config.num_key_value_heads}) of {config.head_dim}"
    facts = {
        "architecture": "LlamaForCausalLM",
        "shape": f"{config.num_hidden_layers}, {config.hidden_size}, {heads}",
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "tokens": f"{trained:,}",
        "nats_per_token": f"{nats_per_token:.3f}",
        "nats_per_byte": f"{nats_per_token * tokens_per_byte:.3f}",
    }
    return {f"{role}_{name}": value for name, value in facts.items()}


def corpus_facts(corpus: dict[str, dict[str, int]]) -> dict[str, str]:
    facts = {"python": platform.python_version()}
    for split, counts in corpus.items():
        facts[f"{split}_files"] = f"{counts['files']:,}"
        facts[f"{split}_bytes"] = f"{counts['bytes']:,}"
        facts[f"{split}_corpus_tokens"] = f"{counts['tokens']:,}"
    return facts


def acceptance_facts(acceptance: dict[str, Any]) -> dict[str, str]:
    lengths = acceptance["acceptance_length"]
    return {
        "acceptance_prompts": str(acceptance["prompts"]),
        "acceptance_written": f"{acceptance['tokens']:,}",
        "first_draft_acceptance_rate": f"{acceptance['first_draft_acceptance_rate']:.1%}",
        "acceptance_header": " | ".join(lengths),
        "acceptance_rule": "---|" * len(lengths),
        "acceptance_row": " | ".join(f"{length:.2f}" for length in lengths.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of run.sh")
    parser.add_argument("--out", type=Path, required=True, help="the package's assets folder")
    args = parser.parse_args()
    data: Path = args.data
    held_out = np.load(data / "held_out.npy")
    corpus = json.loads((data / "corpus.json").read_text())
    tokens_per_byte = corpus["held_out"]["tokens"] / corpus["held_out"]["bytes"]
    drafter_log = last_record(data / "drafter" / "log.jsonl")
    earlier = data / "before.json"
    before = json.loads(earlier.read_text()) if earlier.exists() else {}
    trained = {
        "target": last_record(data / "target" / "log.jsonl")["tokens"],
        "drafter": drafter_log["tokens"],
    }
    trained = {role: tokens + before.get(role, 0) for role, tokens in trained.items()}
    facts = corpus_facts(corpus)
    facts |= acceptance_facts(json.loads((data / "acceptance.json").read_text()))
    facts["held_out_kl"] = f"{drafter_log['held_out_kl']:.3f}"
    for name in ("argmax_agreement", "own_text_agreement"):
        facts[name] = f"{drafter_log[name]:.1%}"
    for role, tokens in trained.items():
        model = LlamaForCausalLM.from_pretrained(data / role / "model", dtype=torch.float32).eval()
        facts["context"] = str(model.config.max_position_embeddings)
        facts["vocabulary"] = str(model.config.vocab_size)
        write_model(model, data / "tokenizer.json", args.out / role)
        nats = whole_loss(model, held_out, model.config.max_position_embeddings)
        facts |= model_facts(role, model, nats, tokens_per_byte, tokens)
    prompts = with_further_prompts(data, held_out_prompts(data, NUM_PROMPTS), NUM_ALL_PROMPTS)
    write_json(args.out / "prompts.json", [asdict(prompt) for prompt in prompts])
    card = Template((Path(__file__).parent / "model_card.md").read_text(encoding="utf-8"))
    (args.out / "README.md").write_text(card.substitute(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
