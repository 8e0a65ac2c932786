"""Acceptance length of greedy speculative decoding with the embedded pair, by plain forwards.

Greedy verification emits exactly the target's own greedy text. A chain of drafts therefore stands
on the target's text as far as it is accepted, and one forward of the drafter over that text tells
at every place at once whether the draft made there would be right: no chain has to be drafted.

Dimension key: L tokens that the target writes after one prompt.
"""

import argparse
import json
from pathlib import Path

import torch
from held_out_prompts import held_out_prompts
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

MAX_DRAFTS = 8


def verification_steps(right_L: list[bool], num_drafts: int) -> int:
    """How many steps emit L tokens when right_L[i] says that a draft of token i would be right.

    A step accepts the right drafts it begins with, at most num_drafts, and emits the target's own
    next token after them: the recovered or the bonus token.
    """
    steps, emitted = 0, 0
    while emitted < len(right_L):
        accepted = 0
        while accepted < num_drafts and emitted + accepted < len(right_L):
            if not right_L[emitted + accepted]:
                break
            accepted += 1
        emitted += accepted + 1
        steps += 1
    return steps


@torch.inference_mode()
def right_drafts(
    target: LlamaForCausalLM, drafter: LlamaForCausalLM, prompt: list[int], max_tokens: int
) -> list[bool]:
    """Per token of the target's greedy text, whether the drafter's argmax before it agrees."""
    ids = torch.tensor([prompt])
    text = target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
    )
    choices = drafter(text[:, :-1]).logits[0, len(prompt) - 1 :].argmax(-1)
    return (choices == text[0, len(prompt) :]).tolist()


def load(folder: Path) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.use_cache = model.generation_config.use_cache = True
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder written by corpus.py")
    parser.add_argument("--target", type=Path, required=True, help="folder of a saved model")
    parser.add_argument("--drafter", type=Path, required=True, help="folder of a saved model")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=256, help="written after each prompt")
    args = parser.parse_args()
    target, drafter = load(args.target), load(args.drafter)
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    texts = [
        right_drafts(target, drafter, tokenizer.encode(prompt.text).ids, args.max_tokens)
        for prompt in held_out_prompts(args.data, args.prompts)
    ]
    num_tokens = sum(map(len, texts))
    lengths = {
        str(num_drafts): round(
            num_tokens / sum(verification_steps(text, num_drafts) for text in texts), 3
        )
        for num_drafts in range(1, MAX_DRAFTS + 1)
    }
    report = {
        "prompts": len(texts),
        "tokens": num_tokens,
        "first_draft_acceptance_rate": round(sum(map(sum, texts)) / num_tokens, 4),
        "acceptance_length": lengths,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
