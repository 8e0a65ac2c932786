"""Acceptance of a trained draft head on held-out prompts, by plain forwards.

Accepted drafts are the text itself, so one forward of the head over a text that the target wrote
tells at every place what a chain drafted there would come to: no chain has to be drafted. The
texts are those of the embedded pair's measurement: 24 held-out prompts, continued greedily; and
the same prompts, continued at temperature 1.

Dimension key: L tokens of a prompt and of what the target writes after it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from acceptance import Judge, acceptance_length
from distill_drafter import load_target
from heads import HEADS, read_head
from held_out_prompts import held_out_prompts
from tokenizers import Tokenizer
from torch import Tensor
from train import NUM_DRAFTS
from transformers import LlamaForCausalLM


@torch.inference_mode()
def written(target: LlamaForCausalLM, prompt: list[int], max_tokens: int, greedy: bool) -> Tensor:
    """[1, L] the prompt and `max_tokens` tokens after it."""
    ids = torch.tensor([prompt])
    return target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=not greedy,
        temperature=None if greedy else 1.0,
        top_k=None if greedy else 0,
        top_p=None if greedy else 1.0,
    )


def texts_to_judge(target: LlamaForCausalLM, args: argparse.Namespace) -> list[dict[str, Any]]:
    """What the target writes after each prompt, the same for all heads: from `--texts`, if made."""
    texts: Path = args.texts
    if not texts.exists():
        tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
        torch.manual_seed(args.seed)
        entries = []
        for prompt in held_out_prompts(args.data, args.prompts):
            ids = tokenizer.encode(prompt.text).ids
            entry: dict[str, Any] = {"prompt_length": len(ids)}
            for kind in ("greedy", "sampled"):
                text = written(target, ids, args.max_tokens, greedy=kind == "greedy")
                entry[kind] = text[0].tolist()
            entries.append(entry)
        texts.with_suffix(".new").write_text(json.dumps(entries))
        texts.with_suffix(".new").replace(texts)
    return json.loads(texts.read_text())


def lengths_by_drafts(chances: list[Tensor]) -> dict[str, float]:
    """Acceptance length with chains of 1, 2, ... drafts; each of `chances` is [1, T, S]."""
    tokens = sum(each.shape[1] for each in chances)
    lengths = {}
    for num_drafts in range(1, chances[0].shape[-1] + 1):
        kept = [each[..., :num_drafts] for each in chances]
        steps = sum(each.shape[1] / acceptance_length(each) for each in kept)
        lengths[str(num_drafts)] = round(tokens / steps, 3)
    return lengths


def mean_rates(chances: list[Tensor]) -> list[float]:
    return [round(rate, 4) for rate in torch.cat(chances, dim=1).mean((0, 1)).tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("head", choices=list(HEADS))
    parser.add_argument("--data", type=Path, required=True, help="folder of the embedded pair")
    parser.add_argument("--model", type=Path, required=True, help="folder of the trained head")
    parser.add_argument("--texts", type=Path, required=True, help="to read, or to write at first")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=256, help="written after each prompt")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    target = load_target(args.data / "target" / "model")
    head = read_head(args.head, args.model)
    found: dict[str, list[Tensor]] = {"greedy": [], "sampled": [], "overlap": []}
    texts = texts_to_judge(target, args)
    for text in texts:
        for kind in ("greedy", "sampled"):
            judge = Judge(target, torch.tensor([text[kind]]), text["prompt_length"], NUM_DRAFTS)
            chances = judge.accept_chances(head)
            found[kind].append(chances[kind])
            if kind == "sampled":
                found["overlap"].append(chances["overlap"])
    report = {
        "prompts": len(texts),
        "tokens": sum(each.shape[1] for each in found["greedy"]),
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "greedy_rates": mean_rates(found["greedy"]),
        "sampled_rates": mean_rates(found["overlap"]),
        "greedy_acceptance_length": lengths_by_drafts(found["greedy"]),
        "sampled_acceptance_length": lengths_by_drafts(found["sampled"]),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
