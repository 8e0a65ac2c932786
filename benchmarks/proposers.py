"""What does a host-side draft cost? Microseconds a request and step, by batch and context length.

    python benchmarks/proposers.py [--json out.json]

The text is made of phrases that come again, as with edits and agents: most steps find a match.
Each step gives every request one to five new tokens and asks for a draft; the first read of the
prompt is timed apart. Proposers take turns, several times, so that a busy neighbour slows all of
them; numbers are medians over all their steps. `scan` is prompt lookup over a Python list, as
engines did it first. Before anything is timed, the drafts of small texts are compared with those of
the reference, which scans texts.
"""

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from outdraft.bench.side_by_side import HOST_DRAFT_TOKENS, make_phrases, phrases_text, time_drafts
from outdraft.config.speculation import NgramConfig, SuffixConfig
from outdraft.core.draft import Draft, DraftAsk
from outdraft.drafting.host_sources import HostProposer
from outdraft.drafting.proposers import NgramProposer, SuffixProposer
from outdraft.kernels.choose import choose_kernels
from outdraft.kernels.torch.table import reference_kernels

KERNELS = choose_kernels("auto", torch.device("cpu"), torch.float32)
REFERENCE = reference_kernels()
CONTEXT_LENS = (1024, 32768)
BATCH_SIZES = (1, 64)
BRANCHINGS = (1, 4)
SCAN_STEPS = 4
NUM_FINISHED = 100
FINISHED_TOKENS = 1000


def scan(ask: DraftAsk, min_n: int = 2, max_n: int = 5) -> Draft:
    """Prompt lookup without an index."""
    tokens: list[int] = ask.token_ids.tolist()
    for n in range(max_n, min_n - 1, -1):
        suffix = tokens[-n:]
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == suffix:
                return Draft.chain(tokens[end : end + ask.max_tokens])
    return Draft()


def proposers(
    rng: np.random.Generator, phrases: list[np.ndarray]
) -> dict[str, Callable[[], HostProposer]]:
    """How to make each one; the last ones know finished requests already."""
    finished = [phrases_text(rng, phrases, FINISHED_TOKENS) for _ in range(NUM_FINISHED)]

    def knowing(branching: int) -> HostProposer:
        proposer = SuffixProposer(SuffixConfig(branching=branching), KERNELS)
        for i, text in enumerate(finished):
            proposer.finish(str(i), text)
        while proposer.num_to_learn:
            proposer.propose([])
        return proposer

    made: dict[str, Callable[[], HostProposer]] = {}
    for width in BRANCHINGS:
        made[f"ngram x{width}"] = lambda n=width: NgramProposer(NgramConfig(branching=n), KERNELS)
        made[f"suffix x{width}"] = lambda n=width: SuffixProposer(
            SuffixConfig(branching=n), KERNELS
        )
        made[f"suffix x{width}, {NUM_FINISHED} finished"] = lambda n=width: knowing(n)
    return made


def check() -> int:
    """Compare drafts of small texts with those of scans; return how many were the same."""
    rng = np.random.default_rng(2)
    num_checked = 0
    for width in BRANCHINGS:
        for _ in range(5):
            text = rng.integers(0, 3, 80).astype(np.int32)
            pairs = [
                [NgramProposer(NgramConfig(branching=width), k) for k in (KERNELS, REFERENCE)],
                [SuffixProposer(SuffixConfig(branching=width), k) for k in (KERNELS, REFERENCE)],
            ]
            for length in range(2, len(text), 5):
                ask = DraftAsk("r", text[:length], HOST_DRAFT_TOKENS)
                for ours, scanning in pairs:
                    got, want = ours.propose([ask]), scanning.propose([ask])
                    if got != want:
                        raise SystemExit(f"{ours.source} drafts {got}, a scan {want}")
                    num_checked += 1
    return num_checked


def run(num_steps: int, num_repeats: int) -> list[dict[str, object]]:
    """One row for each proposer, batch size and context length."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, object]] = []
    for context_len in CONTEXT_LENS:
        phrases = make_phrases(rng, context_len)
        makers = proposers(rng, phrases)
        all_texts = [
            phrases_text(rng, phrases, context_len + 5 * num_steps + 5)
            for _ in range(max(BATCH_SIZES))
        ]
        for batch_size in BATCH_SIZES:
            texts = all_texts[:batch_size]
            runs: dict[str, list[dict[str, list[float]]]] = {}
            for _ in range(num_repeats):
                for name, make in makers.items():
                    result = time_drafts(make().propose, texts, context_len, num_steps)
                    runs.setdefault(name, []).append(result)
                if batch_size == 1:  # it costs as much for each request of a batch
                    scanned = time_drafts(
                        lambda asks: [scan(ask) for ask in asks], texts, context_len, SCAN_STEPS
                    )
                    runs.setdefault("scan", []).append(scanned)
            for name, results in runs.items():
                where = {"context_len": context_len, "batch_size": batch_size}
                rows.append({"proposer": name, **where, **summary(results, context_len)})
    return rows


def summary(results: list[dict[str, list[float]]], context_len: int) -> dict[str, object]:
    """Medians over the steps of all repetitions, and those of each repetition."""
    steps_us = [time_us for result in results for time_us in result["times_us"][1:]]
    return {
        "step_us": statistics.median(steps_us),
        "p90_us": statistics.quantiles(steps_us, n=10)[-1],
        "repetitions_us": [statistics.median(result["times_us"][1:]) for result in results],
        "prompt_us_per_token": statistics.median(r["times_us"][0] for r in results) / context_len,
        "drafted_per_step": statistics.mean(x for r in results for x in r["drafted"]),
    }


def main() -> None:
    """Measure, print a table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="steps of a repetition")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    num_checked = check()
    print(f"{num_checked} drafts are those of scans")
    rows = run(args.steps, args.repeats)
    print(f"{'proposer':24} context batch  us/request   p90 us  us/prompt token  drafted")
    for row in rows:
        print(
            f"{row['proposer']:24} {row['context_len']:7} {row['batch_size']:5} "
            f"{row['step_us']:11.1f} {row['p90_us']:8.1f} {row['prompt_us_per_token']:16.2f} "
            f"{row['drafted_per_step']:8.1f}"
        )
    if args.json:
        config = {"max_tokens": HOST_DRAFT_TOKENS, "steps": args.steps, "repeats": args.repeats}
        host = {"machine": platform.machine(), "python": platform.python_version()}
        at_32k = {
            f"{row['proposer']}, batch {row['batch_size']}": row["step_us"]
            for row in rows
            if row["context_len"] == CONTEXT_LENS[-1]
        }
        found = {"drafts_equal_to_scans": num_checked, "draft_us_per_request_32k": at_32k}
        args.json.write_text(
            json.dumps({"config": config, "host": host, **found, "rows": rows}, indent=2)
        )


if __name__ == "__main__":
    main()
