"""Trains the embedded target: a small Llama on the token files of corpus.py.

Matrices are updated by Muon (Jordan et al. 2024: momentum, orthogonalised by a Newton-Schulz
iteration), embeddings and norms by AdamW. The learning rate is a trapezoid: it falls linearly to
zero over the last `--decay-steps` steps, so a run can be prolonged by resuming with more steps.
A run that is stopped goes on from its last checkpoint when the same command is given again.

Dimension key: B sequences, L tokens in each.
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
from transformers import LlamaConfig, LlamaForCausalLM

TARGET = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1280,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# Quintic coefficients chosen so that three iterations bring singular values near one.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalised(update: Tensor, iterations: int = 3) -> Tensor:
    """Approximately U V^T of update = U S V^T, shape kept."""
    a, b, c = NEWTON_SCHULZ
    wide = update if update.shape[0] <= update.shape[1] else update.T
    # bfloat16 is enough: singular values near one are all that is asked for.
    x = (wide / (wide.norm() + 1e-7)).bfloat16()
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + torch.addmm(b * gram, gram, gram, alpha=c) @ x
    return (x if update.shape[0] <= update.shape[1] else x.T).to(update.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised, for matrices."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                average = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalised(parameter.grad.lerp(average, group["momentum"]))
                scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.add_(update, alpha=-group["lr"] * scale)


def sample_batch(tokens: np.ndarray, step: int, batch: int, length: int, seed: int) -> Tensor:
    """[B, L + 1] windows that depend on (seed, step) alone, so a resumed run sees the same data."""
    rng = np.random.default_rng([seed, step])
    starts = rng.integers(0, len(tokens) - length - 1, size=batch)
    return torch.from_numpy(np.stack([tokens[s : s + length + 1] for s in starts]).astype(np.int64))


def epoch_batch(tokens: np.ndarray, step: int, batch: int, length: int, seed: int) -> Tensor:
    """[B, L + 1] windows that depend on (seed, step) alone; an epoch shows every window once."""
    windows = (len(tokens) - 1) // length
    epoch, first = divmod(step * batch, windows)
    rows: list[np.ndarray] = []
    for number in range(first, first + batch):
        later, place = divmod(number, windows)
        order = np.random.default_rng([seed, epoch + later]).permutation(windows)
        start = order[place] * length
        rows.append(tokens[start : start + length + 1])
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def next_token_loss(model: nn.Module, windows: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=torch.is_grad_enabled()):
        logits = model(windows[:, :-1]).logits  # [B, L, V]
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(
    model: nn.Module, tokens: np.ndarray, length: int = 512, windows: int = 64
) -> float:
    """Nats a token over evenly spaced windows of the held-out files."""
    starts = np.linspace(0, len(tokens) - length - 2, windows).astype(int)
    losses = []
    for begin in range(0, windows, 8):
        rows = np.stack([tokens[s : s + length + 1] for s in starts[begin : begin + 8]])
        losses.append(next_token_loss(model, torch.from_numpy(rows.astype(np.int64))).item())
    return float(np.mean(losses))


def learning_rate_share(step: int, total: int, warmup: int, decay: int) -> float:
    return max(0.0, min(1.0, (step + 1) / warmup, (total - step) / decay))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder written by corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and log")
    parser.add_argument("--init", type=Path, help="a trained model to go on from")
    parser.add_argument("--steps", type=int, default=1030)
    parser.add_argument("--decay-steps", type=int, default=600)
    parser.add_argument("--long-steps", type=int, default=100, help="last steps, at length 1024")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--matrix-lr", type=float, default=0.02)
    parser.add_argument("--embedding-lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate-every", type=int, default=100)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train = np.load(args.data / "train.npy", mmap_mode="r")
    held_out = np.load(args.data / "held_out.npy", mmap_mode="r")

    torch.manual_seed(args.seed)
    if args.init is None:
        model = LlamaForCausalLM(LlamaConfig(**TARGET, use_cache=False))
    else:
        model = LlamaForCausalLM.from_pretrained(args.init, dtype=torch.float32).train()
        model.config.use_cache = False
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    optimizers: list[tuple[torch.optim.Optimizer, float]] = [
        (Muon(matrices, lr=args.matrix_lr), args.matrix_lr),
        (
            torch.optim.AdamW(others, args.embedding_lr, (0.9, 0.95), weight_decay=0.0),
            args.embedding_lr,
        ),
    ]
    start, checkpoint = 0, args.out / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        for (optimizer, _), state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        start = saved["step"]

    began, seen, running = time.time(), 0, math.nan
    for step in range(start, args.steps + 1):
        last = step == args.steps
        if last or step % args.evaluate_every == 0:
            torch.save(
                {
                    "model": model.state_dict(),
                    "step": step,
                    "optimizers": [optimizer.state_dict() for optimizer, _ in optimizers],
                },
                checkpoint.with_suffix(".new"),
            )
            checkpoint.with_suffix(".new").replace(checkpoint)
            record = {
                "step": step,
                "train_loss": round(running, 4),
                "held_out_loss": round(held_out_loss(model, held_out), 4),
                "tokens": step * args.batch_tokens,
                "tokens_per_s": round(seen / (time.time() - began)),
                "minutes": round((time.time() - began) / 60, 1),
            }
            with (args.out / "log.jsonl").open("a") as log:
                log.write(json.dumps(record) + "\n")
            print(record, flush=True)
        if last:
            break
        share = learning_rate_share(step, args.steps, 60, args.decay_steps)
        for optimizer, peak in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * share
        length = 1024 if step >= args.steps - args.long_steps else args.length
        windows = epoch_batch(train, step, args.batch_tokens // length, length, args.seed)
        loss = next_token_loss(model, windows)
        loss.backward()
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen += windows.numel() - len(windows)
        running = loss.item() if math.isnan(running) else 0.98 * running + 0.02 * loss.item()
    model.to(torch.bfloat16).save_pretrained(args.out / "model")


if __name__ == "__main__":
    main()
