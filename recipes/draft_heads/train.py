"""Trains a draft head of the embedded target: `train.py NAME`.

The head learns the target's distributions at all of its drafts' places, two steps of three on
windows that the target has continued itself (greedily and at temperature 1 in turn), else on the
files as they are. The first steps minimise the cross-entropy; as the learning rate falls, the
chance of rejection takes its place. A run that is stopped goes on from its last checkpoint when the
same command is given again.

Dimension key: B sequences, L tokens in each, R roots, V vocabulary, N the draft vocabulary.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from acceptance import Judge, confidence_loss, draft_loss, measure
from dflash import DFlash
from distill_drafter import PROMPT_LENGTH, continued_parts, load_target
from dspark import DSpark
from heads import HEADS, head_to_train_on, new_head, write_head
from target_states import target_states
from torch import Tensor, nn
from train_target import Muon, learning_rate_share, sample_batch
from transformers import LlamaForCausalLM

NUM_DRAFTS = 4
DEPTH_DISCOUNT = 0.8  # a draft matters only if those before it were accepted
JUDGED_ROWS = 8  # a glance; measure_acceptance.py takes a long look at the end


def training_batch(
    corpus: np.ndarray, continuations: np.ndarray, step: int, args: argparse.Namespace
) -> Tensor:
    """[B, L] of about `--batch-tokens` tokens that depend on (seed, step) alone."""
    if step % 3 == 0:
        rows = args.batch_tokens // args.length
        return sample_batch(corpus, step, rows, args.length - 1, args.seed)
    rows = args.batch_tokens // continuations.shape[1]
    chosen = np.random.default_rng([args.seed, step]).integers(0, len(continuations), rows)
    return torch.from_numpy(continuations[chosen].astype(np.int64))


def chain_loss(
    head: nn.Module,
    target: LlamaForCausalLM,
    ids_BL: Tensor,
    num_drafts: int,
    overlap_share: float,
) -> Tensor:
    """Over all roots and drafts; a draft counts DEPTH_DISCOUNT times as much as the one before."""
    roots_R = torch.arange(ids_BL.shape[1] - num_drafts)
    some = {}
    if isinstance(head, DFlash):
        roots_R = head.training_roots(ids_BL, num_drafts)
        some = {"roots_R": roots_R}
    odds: list[Tensor] = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states = target_states(target, ids_BL)
        if isinstance(head, DSpark):
            drafted, odds = head.drafts(states, ids_BL, num_drafts, roots_R)
        else:
            drafted = head(states, ids_BL, num_drafts, **some)
    wanted_BLN = states.logits.float().softmax(-1)
    if head.draft_ids is not None:
        wanted_BLN = wanted_BLN[..., head.draft_ids]
    total, weights = torch.zeros(()), 0.0
    for draft, logits in enumerate(drafted):
        wanted = wanted_BLN[:, roots_R + draft + 1]
        weight = DEPTH_DISCOUNT**draft
        total, weights = (
            total + weight * draft_loss(logits.float(), wanted, overlap_share),
            weights + weight,
        )
    told = (
        confidence_loss(one, logits.float(), wanted_BLN[:, roots_R + draft + 1])
        for draft, (one, logits) in enumerate(zip(odds, drafted, strict=False))
    )
    return total / weights + sum(told)


def make_optimizers(
    head: nn.Module, matrix_lr: float, vocabulary_lr: float
) -> list[tuple[torch.optim.Optimizer, float]]:
    """Each with its highest learning rate: Muon for matrices, AdamW for the rest."""
    matrices, others = [], []
    for name, parameter in head.named_parameters():
        over_vocabulary = any(part in name for part in ("head", "emb."))
        is_matrix = parameter.ndim == 2 and not over_vocabulary
        (matrices if is_matrix else others).append(parameter)
    return [
        (Muon(matrices, lr=matrix_lr), matrix_lr),
        (torch.optim.AdamW(others, vocabulary_lr, (0.9, 0.95), weight_decay=0.0), vocabulary_lr),
    ]


def train(
    head: nn.Module,
    target: LlamaForCausalLM,
    corpus: np.ndarray,
    continuations: np.ndarray,
    judges: tuple[Judge, Judge],
    args: argparse.Namespace,
) -> None:
    """From the last checkpoint, if there is one, to `--steps`."""
    optimizers = make_optimizers(head, args.matrix_lr, args.vocabulary_lr)
    start, tokens, checkpoint = 0, 0, args.out / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        head.load_state_dict(saved["head"])
        for (optimizer, _), state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        start, tokens = saved["step"], saved["tokens"]
    began, seen, running = time.time(), 0, math.nan
    for step in range(start, args.steps):
        share = learning_rate_share(step, args.steps, args.warmup_steps, args.decay_steps)
        for optimizer, peak in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * share
        decayed = max(0.0, 1 - (args.steps - step) / args.decay_steps)
        ids = training_batch(corpus, continuations, step, args)
        num_drafts = 1 if step < args.short_steps else NUM_DRAFTS
        overlap_share = min(args.overlap_share, 2 * decayed)
        loss = chain_loss(head, target, ids, num_drafts, overlap_share)
        loss.backward()
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen += ids.numel()
        running = loss.item() if math.isnan(running) else 0.98 * running + 0.02 * loss.item()
        if (step + 1) % args.evaluate_every == 0 or step + 1 == args.steps:
            progress = {"step": step + 1, "tokens": tokens + seen}
            states = [optimizer.state_dict() for optimizer, _ in optimizers]
            state = {**progress, "head": head.state_dict(), "optimizers": states}
            # A run may be stopped while this writes: the new file replaces a complete old one.
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
            record = progress | {"train_loss": round(running, 4)} | measure(head, *judges)
            record["tokens_per_s"] = round(seen / (time.time() - began))
            record["minutes"] = round((time.time() - began) / 60, 1)
            with (args.out / "log.jsonl").open("a") as log:
                log.write(json.dumps(record) + "\n")
            print(json.dumps(record), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("head", choices=list(HEADS))
    parser.add_argument("--data", type=Path, required=True, help="folder of the embedded pair")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and log")
    parser.add_argument(
        "--init", type=Path, help="a trained head to go on from; of DFlash for dspark"
    )
    parser.add_argument("--parts", type=int, default=48, help="files of continued windows")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--warmup-steps", type=int, default=20)
    parser.add_argument("--decay-steps", type=int, default=600)
    parser.add_argument("--short-steps", type=int, default=0, help="first steps, of one draft")
    parser.add_argument("--batch-tokens", type=int, default=1280)
    parser.add_argument("--length", type=int, default=640, help="of windows taken from files")
    parser.add_argument("--matrix-lr", type=float, default=0.02)
    parser.add_argument("--vocabulary-lr", type=float, default=2e-3)
    parser.add_argument("--overlap-share", type=float, default=0.8, help="of the loss, at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate-every", type=int, default=50)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    corpus = np.load(args.data / "train.npy", mmap_mode="r")
    held_out = np.load(args.data / "held_out.npy", mmap_mode="r")

    target = load_target(args.data / "target" / "model")
    texts = args.data / "drafter"
    continuations = continued_parts(target, corpus, texts / "continued", args.parts, args.seed)
    judged = continued_parts(target, held_out, texts / "continued_held_out", 2, args.seed)
    # The first part is greedy, the second sampled.
    rows = [torch.from_numpy(part[:JUDGED_ROWS].astype(np.int64)) for part in np.split(judged, 2)]
    judges = tuple(Judge(target, part, PROMPT_LENGTH, NUM_DRAFTS) for part in rows)
    torch.manual_seed(args.seed)
    if args.init is None:
        head = new_head(args.head, target, continuations[:, PROMPT_LENGTH:])
    else:
        head = head_to_train_on(args.head, args.init)
    train(head, target, corpus, continuations, judges, args)
    write_head(head, args.out / "model")


if __name__ == "__main__":
    main()
