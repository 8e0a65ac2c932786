"""What does a host-side draft cost? Microseconds a request and step, by context length.

    python benchmarks/proposers.py [--json out.json]

The text is made of phrases that come again, as with edits and agents: most steps find a match.
Each step gives every request one to five new tokens and asks for a draft; the first read of the
prompt is timed apart. `scan` is prompt lookup over a Python list, as engines did it first.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from outdraft.config.speculation import NgramConfig, SuffixConfig
from outdraft.core.draft import Draft, DraftAsk
from outdraft.spec.ngram import NgramProposer
from outdraft.spec.proposer import HostProposer
from outdraft.spec.suffix import SuffixProposer

CONTEXT_LENS = (1024, 32768)
NUM_REQUESTS = 8
MAX_TOKENS = 8
NUM_FINISHED = 100
FINISHED_TOKENS = 1000
VOCABULARY = 32_000


def phrases_text(rng: np.random.Generator, phrases: list[np.ndarray], length: int) -> np.ndarray:
    """Phrases in random order, cut short at random: int32 [length]."""
    pieces: list[np.ndarray] = []
    while sum(map(len, pieces)) < length:
        phrase = phrases[rng.integers(len(phrases))]
        pieces.append(phrase[: rng.integers(2, len(phrase))])
    return np.concatenate(pieces)[:length].astype(np.int32)


def scan(ask: DraftAsk, min_n: int = 2, max_n: int = 5) -> Draft:
    """Prompt lookup without an index."""
    tokens: list[int] = ask.token_ids.tolist()
    for n in range(max_n, min_n - 1, -1):
        suffix = tokens[-n:]
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == suffix:
                return Draft.chain(tokens[end : end + ask.max_tokens])
    return Draft()


def measure(
    propose: Callable[[Sequence[DraftAsk]], list[Draft]],
    texts: list[np.ndarray],
    context_len: int,
    num_steps: int,
) -> dict[str, float]:
    """Medians over steps, and the first step, in microseconds a request."""
    rng = np.random.default_rng(1)
    lengths = [context_len] * len(texts)
    times_us: list[float] = []
    drafted = 0
    for _ in range(num_steps + 1):
        asks = [
            DraftAsk(str(i), text[:length], MAX_TOKENS)
            for i, (text, length) in enumerate(zip(texts, lengths, strict=True))
        ]
        start_s = time.perf_counter()
        drafts = propose(asks)
        times_us.append((time.perf_counter() - start_s) * 1e6 / len(texts))
        drafted += sum(map(len, drafts))
        lengths = [length + int(rng.integers(1, 6)) for length in lengths]
    steps_us = times_us[1:]
    return {
        "step_us": statistics.median(steps_us),
        "p90_us": statistics.quantiles(steps_us, n=10)[-1],
        "prompt_us_per_token": times_us[0] / context_len,
        "drafted_per_step": drafted / len(times_us) / len(texts),
    }


def proposers(rng: np.random.Generator, phrases: list[np.ndarray]) -> dict[str, HostProposer]:
    """Fresh ones; the last knows finished requests already."""
    knowing = SuffixProposer(SuffixConfig())
    for i in range(NUM_FINISHED):
        knowing.finish(str(i), phrases_text(rng, phrases, FINISHED_TOKENS))
    while knowing.num_to_learn:
        knowing.propose([])
    return {
        "ngram": NgramProposer(NgramConfig()),
        "suffix": SuffixProposer(SuffixConfig()),
        f"suffix, {NUM_FINISHED} finished": knowing,
    }


def run(num_steps: int) -> list[dict[str, object]]:
    """One row for each proposer and context length."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, object]] = []
    for context_len in (64, *CONTEXT_LENS):  # the first one compiles, and is not reported
        phrases = [rng.integers(0, VOCABULARY, 40) for _ in range(max(8, context_len // 200))]
        texts = [
            phrases_text(rng, phrases, context_len + 5 * num_steps + 5) for _ in range(NUM_REQUESTS)
        ]
        for name, proposer in proposers(rng, phrases).items():
            result = measure(proposer.propose, texts, context_len, num_steps)
            rows.append({"proposer": name, "context_len": context_len, **result})
        scanned = measure(
            lambda asks: [scan(ask) for ask in asks], texts, context_len, min(num_steps, 20)
        )
        rows.append({"proposer": "scan", "context_len": context_len, **scanned})
    return [row for row in rows if row["context_len"] in CONTEXT_LENS]


def main() -> None:
    """Measure, print a table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="steps to take the median of")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    rows = run(args.steps)
    print(f"{'proposer':24} context  us/step   p90 us  us/prompt token  drafted")
    for row in rows:
        print(
            f"{row['proposer']:24} {row['context_len']:7} {row['step_us']:8.1f} "
            f"{row['p90_us']:8.1f} {row['prompt_us_per_token']:16.2f} "
            f"{row['drafted_per_step']:8.1f}"
        )
    if args.json:
        config = {"requests": NUM_REQUESTS, "max_tokens": MAX_TOKENS, "steps": args.steps}
        host = {"machine": platform.machine(), "python": platform.python_version()}
        args.json.write_text(json.dumps({"config": config, "host": host, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
