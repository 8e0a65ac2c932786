"""What a step takes longer where requests ask for more than the likeliest tokens.

One engine decodes the same prompts in one way after the other, in another order each round:
greedy, drawn, with penalties, with log-probabilities, within a grammar. A step's time is that of
the steps in which all requests decode; it is compared with that of greedy steps of the same round.

The result is JSON: `python benchmarks/parameters.py --json FILE`. A directory of another model, say
one with a large vocabulary, is `--model DIRECTORY`; then there is no drafter.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outdraft import LLM, SamplingParams, StructuredOutputsParams, assets
from outdraft.bench.report import compute, environment
from outdraft.cli.command import use_physical_cores
from outdraft.engine.engine import Engine

GREEDY = "greedy"
WAYS: dict[str, dict[str, Any]] = {
    GREEDY: {},
    "temperature": {"temperature": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 50},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "presence_penalty": {"presence_penalty": 0.5},
    "penalty, drawn": {"temperature": 1.0, "repetition_penalty": 1.1, "top_p": 0.9},
    "logit_bias": {"logit_bias": {5: 1.0}},
    "logprobs": {"logprobs": 0},
    "logprobs=5": {"logprobs": 5},
    "regex": {"structured_outputs": StructuredOutputsParams(regex="(.|\\n)*")},
}
WARM_STEPS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--model", type=Path, help="default: the embedded target, and its drafter")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--requests", default="1,8")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    use_physical_cores(os.environ)
    engines = {"plain": make_engine(args, None)}
    if args.model is None:
        drafter = {"method": "draft_model", "model": str(assets.drafter_path())}
        drafter |= {"num_speculative_tokens": args.drafts, "control": "fixed"}
        engines[f"{args.drafts} drafts"] = make_engine(args, drafter)
    cells = [
        cell(name, engine, number, args)
        for name, engine in engines.items()
        for number in map(int, args.requests.split(","))
    ]
    result = {
        "environment": environment() | compute(),
        "options": {key: str(value) for key, value in vars(args).items()},
        "cells": cells,
    }
    written = json.dumps(result, indent=1)
    if args.json:
        args.json.write_text(written + "\n")
    print(written)


def make_engine(args: argparse.Namespace, speculation: dict[str, Any] | None) -> Engine:
    return LLM(
        str(args.model or assets.target_path()),
        dtype=args.dtype,
        speculative_config=speculation,
        enable_prefix_caching=False,
        max_num_seqs=max(map(int, args.requests.split(","))),
        gpu_memory_utilization=0.4,
    ).engine


def cell(name: str, engine: Engine, number: int, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a greedy step, and what other steps take of it."""
    texts = [text for _, text in assets.prompts()]
    order, times_ms = list(WAYS), {way: list[float]() for way in WAYS}
    for turn in range(args.rounds + 1):
        random.Random(turn).shuffle(order)
        part = [texts[(turn * number + i) % len(texts)] for i in range(number)]
        for way in order:
            taken_ms = step_ms(engine, part, SamplingParams(**ways_params(way, args.max_tokens)))
            if turn > 0:  # the first one warms up
                times_ms[way].append(taken_ms)
    ratios = {
        way: [one / base for one, base in zip(own, times_ms[GREEDY], strict=True)]
        for way, own in times_ms.items()
        if way != GREEDY
    }
    return {
        "engine": name,
        "requests": number,
        "greedy_ms_per_step": statistics.median(times_ms[GREEDY]),
        "ratios": {way: statistics.median(own) for way, own in ratios.items()},
        "samples_ms": times_ms,
    }


def ways_params(way: str, max_tokens: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | WAYS[way]


def step_ms(engine: Engine, texts: Sequence[str], params: SamplingParams) -> float:
    """The mean step in which all requests decode."""
    for index, text in enumerate(texts):
        engine.add_request(str(index), text, params)
    while len(engine.running_requests()) < len(texts):
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    num_steps, started_s = 0, time.perf_counter()
    while len(engine.running_requests()) == len(texts):
        engine.step()
        num_steps += 1
    taken_s = time.perf_counter() - started_s
    while engine.has_work:
        engine.step()
    assert num_steps, "no step decoded all requests: give them more tokens"
    return 1e3 * taken_s / num_steps


if __name__ == "__main__":
    main()
