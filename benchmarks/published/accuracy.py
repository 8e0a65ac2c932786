"""How far are the logits of published models with rows of 8 bits from those with rows of 16 bits?

    PYTHONPATH=. python benchmarks/published/accuracy.py --models FOLDER [--json out.json]

The models read the same texts, the embedded held-out prompts one after the other, in windows of
1,000 tokens. For each token: the error of its logits, over their standard deviation; whether both
have the same first choice; and the probability of the token that really comes, which gives the
perplexity.
"""

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from fetch import MODELS, fetch
from torch import Tensor

from outdraft import assets
from outdraft.bench.report import compute, environment
from outdraft.kernels.choose import automatic_dtype, choose_kernels
from outdraft.models.base import LanguageModel
from outdraft.models.choose import load_language_model
from outdraft.text.tokenizer import load_tokenizer
from tests.models.checkpoints import chunked_logits

WINDOW = 1000  # tokens
CHUNK = 250  # whose logits exist at a time
DTYPES = ("float", "int8")


@dataclass(frozen=True, slots=True)
class Accuracy:
    """What rows of 8 bits change, over all tokens.

    Attributes:
        error: mean of the logits' root mean square error, over their standard deviation.
        equal_choices: share of tokens whose first choice is the same.
        divergence: mean of KL(float || int8), in nats.
        perplexities: by activation dtype.
    """

    model: str
    tokens: int
    error: float
    equal_choices: float
    divergence: float
    perplexities: dict[str, float]


def measure(name: str, path: Path, num_tokens: int) -> Accuracy:
    """Read the texts with both, and compare."""
    device = torch.device("cpu")
    dtype = automatic_dtype("auto", device, torch.float32)
    models = {
        kind: load_language_model(
            path, dtype, device, choose_kernels("auto", device, dtype, activation_dtype=kind)
        )
        for kind in DTYPES
    }
    token_ids_T = ids_of_texts(path, num_tokens)
    errors, equals, divergences = list[Tensor](), list[Tensor](), list[Tensor]()
    losses: dict[str, list[Tensor]] = {kind: [] for kind in DTYPES}
    for window_T in token_ids_T.split(WINDOW):
        both = {kind: logits_of(model, window_T) for kind, model in models.items()}
        wanted_TV, got_TV = both["float"], both["int8"]
        error_T = (got_TV - wanted_TV).square().mean(1).sqrt() / wanted_TV.std(1)
        scores = {kind: logits_TV.log_softmax(1) for kind, logits_TV in both.items()}
        difference_TV = scores["float"] - scores["int8"]
        errors.append(error_T)
        equals.append(wanted_TV.argmax(1) == got_TV.argmax(1))
        divergences.append((scores["float"].exp() * difference_TV).sum(1))
        for kind, scores_TV in scores.items():
            losses[kind].append(-scores_TV[:-1].gather(1, window_T[1:, None])[:, 0])
    return Accuracy(
        name,
        len(token_ids_T),
        torch.cat(errors).mean().item(),
        torch.cat(equals).float().mean().item(),
        torch.cat(divergences).mean().item(),
        {kind: math.exp(torch.cat(own).mean().item()) for kind, own in losses.items()},
    )


def ids_of_texts(path: Path, num_tokens: int) -> Tensor:
    """The first tokens of the held-out prompts, one after the other, int64 [T]."""
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    text = "\n\n".join(text for _, text in assets.prompts())
    token_ids = tokenizer.encode(text).ids
    assert len(token_ids) >= num_tokens, f"the texts have {len(token_ids)} tokens"
    return torch.tensor(token_ids[:num_tokens])


@torch.inference_mode()
def logits_of(model: LanguageModel, window_T: Tensor) -> Tensor:
    """float32 [T, V]."""
    sizes = [len(part) for part in window_T.split(CHUNK)]
    return chunked_logits(model, window_T, sizes, block_size=16).float()


def main() -> None:
    """Measure one model after the other, print a line for each, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=Path, required=True, help="folder of the models' files")
    parser.add_argument("--targets", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    found = list[Accuracy]()
    print(f"{'model':10} {'tokens':>6} {'error':>7} {'same choice':>11} {'KL':>8}  perplexities")
    for name in args.targets:
        one = measure(name, fetch(name, args.models), args.tokens)
        found.append(one)
        perplexities = "  ".join(f"{kind} {value:.4f}" for kind, value in one.perplexities.items())
        print(
            f"{name:10} {one.tokens:>6} {one.error:>7.4f} {one.equal_choices:>11.2%} "
            f"{one.divergence:>8.5f}  {perplexities}",
            flush=True,
        )
    if args.json:
        rows = [asdict(one) for one in found]
        result = {"environment": environment() | compute(), "rows": rows}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
