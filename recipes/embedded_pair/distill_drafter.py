"""Distils the embedded drafter from the trained target: KL(target || drafter), full distributions.

A drafter is judged on text that the target itself writes, so every second step learns from windows
of the training files that the target has continued, greedily and at temperature 1 in turn; the
others learn from the files as they are (Agarwal et al. 2024 and Zhou et al. 2024 on why the text
should be the model's own). A run that is stopped goes on from its last checkpoint, and from the
continuations written so far, when the same command is given again.

Dimension key: B sequences, L tokens in each, V vocabulary.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_target import Muon, learning_rate_share, sample_batch
from transformers import LlamaConfig, LlamaForCausalLM

# Less than a tenth of the target's parameters. Two layers, because one cannot copy from the
# context (an induction head takes two), and every further layer is paid for at every draft.
DRAFTER = {
    "vocab_size": 4096,
    "hidden_size": 192,
    "intermediate_size": 272,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
PROMPT_LENGTH, CONTINUED_LENGTH = 128, 192
PART_ROWS = 64  # continued windows that are generated together and saved as one file


def load_target(folder: Path) -> LlamaForCausalLM:
    """The target as it is shipped (bf16 values), computing in float32; it never ends a text."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.requires_grad_(False)
    model.config.use_cache = model.generation_config.use_cache = True
    # The corpus goes on with the next file after an end token, and so may a continuation.
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def continued(target: LlamaForCausalLM, prompts: Tensor, greedy: bool) -> Tensor:
    """[B, L + CONTINUED_LENGTH]: the prompts [B, L] and what the target writes after them."""
    return target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=CONTINUED_LENGTH,
        do_sample=not greedy,
        temperature=None if greedy else 1.0,
        top_k=None if greedy else 0,
        top_p=None if greedy else 1.0,
        cache_implementation="static",
        disable_compile=True,
    )


def continued_parts(
    target: LlamaForCausalLM, tokens: np.ndarray, folder: Path, parts: int, seed: int
) -> np.ndarray:
    """[parts * PART_ROWS, L] windows continued by the target; parts on disk are not made again.

    Even parts are greedy, odd ones are sampled at temperature 1.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for part in range(parts):
        path = folder / f"{part:03d}.npy"
        if not path.exists():
            began = time.time()
            torch.manual_seed(seed * 1_000_003 + part)
            prompts = sample_batch(tokens, part, PART_ROWS, PROMPT_LENGTH - 1, seed)
            text = continued(target, prompts, greedy=part % 2 == 0).numpy().astype(np.uint16)
            with path.with_suffix(".new").open("wb") as file:
                np.save(file, text)
            path.with_suffix(".new").replace(path)
            speed = PART_ROWS * CONTINUED_LENGTH / (time.time() - began)
            print(json.dumps({"continued": str(path), "tokens_per_s": round(speed)}), flush=True)
        rows.append(np.load(path))
    return np.concatenate(rows)


def distillation_loss(target_logits: Tensor, drafter_logits: Tensor) -> Tensor:
    """KL(target || drafter) in nats a token; both [B, L, V]."""
    target_log_probs = target_logits.flatten(0, 1).log_softmax(-1)
    drafter_log_probs = drafter_logits.flatten(0, 1).log_softmax(-1)
    return F.kl_div(drafter_log_probs, target_log_probs, reduction="batchmean", log_target=True)


class HeldOut:
    """What the drafter is measured on: held-out files, and the target's continuations of them."""

    def __init__(self, target: LlamaForCausalLM, tokens: np.ndarray, continuations: np.ndarray):
        starts = np.linspace(0, len(tokens) - 514, 16).astype(int)
        rows = np.stack([tokens[s : s + 513] for s in starts]).astype(np.int64)
        self.windows = torch.from_numpy(rows)
        with torch.inference_mode():
            self.target_logits = torch.cat([target(row[None, :-1]).logits for row in self.windows])
        self.greedy_texts = torch.from_numpy(continuations.astype(np.int64))

    @torch.inference_mode()
    def measure(self, drafter: nn.Module) -> dict[str, float]:
        """Nats and shares. `own_text_agreement` is the chance that one greedy draft is right."""
        logits = drafter(self.windows[:, :-1]).logits
        choices = logits.argmax(-1)
        own = drafter(self.greedy_texts[:, PROMPT_LENGTH - 1 : -1]).logits.argmax(-1)
        loss = F.cross_entropy(logits.flatten(0, 1), self.windows[:, 1:].flatten())
        agreement = (choices == self.target_logits.argmax(-1)).float().mean()
        own_agreement = (own == self.greedy_texts[:, PROMPT_LENGTH:]).float().mean()
        values = {
            "held_out_kl": distillation_loss(self.target_logits, logits),
            "held_out_loss": loss,
            "argmax_agreement": agreement,
            "own_text_agreement": own_agreement,
        }
        return {name: round(value.item(), 4) for name, value in values.items()}


def training_batch(
    tokens: np.ndarray, continuations: np.ndarray, step: int, args: argparse.Namespace
) -> Tensor:
    """[B, L] of about `--batch-tokens` tokens that depend on (seed, step) alone."""
    if step % 2 == 0:
        rows = args.batch_tokens // args.length
        return sample_batch(tokens, step, rows, args.length - 1, args.seed)
    rows = args.batch_tokens // continuations.shape[1]
    chosen = np.random.default_rng([args.seed, step]).integers(0, len(continuations), rows)
    return torch.from_numpy(continuations[chosen].astype(np.int64))


def make_optimizers(
    model: nn.Module, matrix_lr: float, embedding_lr: float
) -> list[tuple[torch.optim.Optimizer, float]]:
    """Each with its highest learning rate: Muon for matrices, AdamW for the rest."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    return [
        (Muon(matrices, lr=matrix_lr), matrix_lr),
        (torch.optim.AdamW(others, embedding_lr, (0.9, 0.95), weight_decay=0.0), embedding_lr),
    ]


def train(
    drafter: LlamaForCausalLM,
    target: LlamaForCausalLM,
    corpus: np.ndarray,
    continuations: np.ndarray,
    held_out: HeldOut,
    args: argparse.Namespace,
) -> None:
    """From the last checkpoint, if there is one, to `--steps`."""
    optimizers = make_optimizers(drafter, args.matrix_lr, args.embedding_lr)
    start, tokens, checkpoint = 0, 0, args.out / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        drafter.load_state_dict(saved["model"])
        for (optimizer, _), state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        start, tokens = saved["step"], saved["tokens"]
    began, seen, running = time.time(), 0, math.nan
    for step in range(start, args.steps):
        share = learning_rate_share(step, args.steps, args.warmup_steps, args.decay_steps)
        for optimizer, peak in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * share
        ids = training_batch(corpus, continuations, step, args)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                wanted = target(ids, use_cache=False).logits
            drafted = drafter(ids).logits
        loss = distillation_loss(wanted.float(), drafted.float())
        loss.backward()
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen += ids.numel()
        running = loss.item() if math.isnan(running) else 0.98 * running + 0.02 * loss.item()
        if (step + 1) % args.evaluate_every == 0 or step + 1 == args.steps:
            progress = {"step": step + 1, "tokens": tokens + seen}
            states = [optimizer.state_dict() for optimizer, _ in optimizers]
            state = {**progress, "model": drafter.state_dict(), "optimizers": states}
            # A run may be stopped while this writes: the new file replaces a complete old one.
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
            record = progress | {"train_kl": round(running, 4)} | held_out.measure(drafter)
            record["tokens_per_s"] = round(seen / (time.time() - began))
            record["minutes"] = round((time.time() - began) / 60, 1)
            with (args.out / "log.jsonl").open("a") as log:
                log.write(json.dumps(record) + "\n")
            print(json.dumps(record), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder written by corpus.py")
    parser.add_argument("--target", type=Path, required=True, help="model of train_target.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and log")
    parser.add_argument("--init", type=Path, help="a trained drafter to go on from")
    parser.add_argument("--parts", type=int, default=12, help=f"of {PART_ROWS} continued windows")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--warmup-steps", type=int, default=40)
    parser.add_argument("--decay-steps", type=int, default=650)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--length", type=int, default=1024, help="of windows taken from files")
    parser.add_argument("--matrix-lr", type=float, default=0.02)
    parser.add_argument("--embedding-lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate-every", type=int, default=100)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    corpus = np.load(args.data / "train.npy", mmap_mode="r")
    held_out_tokens = np.load(args.data / "held_out.npy", mmap_mode="r")

    target = load_target(args.target)
    parts_folder = args.out / "continued"
    continuations = continued_parts(target, corpus, parts_folder, args.parts, args.seed)
    held_out_texts = continued_parts(
        target, held_out_tokens, args.out / "continued_held_out", 1, args.seed
    )
    torch.manual_seed(args.seed)
    if args.init is None:
        drafter = LlamaForCausalLM(LlamaConfig(**DRAFTER, use_cache=False))
    else:
        drafter = LlamaForCausalLM.from_pretrained(args.init, dtype=torch.float32).train()
        drafter.config.use_cache = False
    held_out = HeldOut(target, held_out_tokens, held_out_texts)
    train(drafter, target, corpus, continuations, held_out, args)
    drafter.to(torch.bfloat16).save_pretrained(args.out / "model")


if __name__ == "__main__":
    main()
