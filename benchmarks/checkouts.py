"""Decode speed of two checkouts of this project, by turns.

    python benchmarks/checkouts.py OLD NEW --model FILE [--draft-model FILE] [--turns 20]

Each checkout loads the model in a process of its own, with the packages of this interpreter and its
own compiled kernels. They answer the same prompts greedily, one after the other, in changing order:
so what the machine does meanwhile meets both. Prints for 1 and for 4 requests the median tokens a
second of each, and the median and the quartiles of new / old over the turns. Without a model both
run the embedded one.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

PROMPTS = [
    "def quicksort(items):\n    ",
    "class Stack:\n    def __init__(self):\n        ",
    "# Reads a CSV file\nimport csv\n",
    "def fibonacci(n):\n    ",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--model", help="a published model; default: the embedded one")
    parser.add_argument("--draft-model", help="drafts for it; 'embedded': the embedded drafter")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer:
        answer(args)
        return
    options = [*sys.argv[1:], "--answer"]
    sides = [start(root, options) for root in (args.old, args.new)]
    for num_requests in (1, len(PROMPTS)):
        rates: list[list[float]] = [[], []]
        for turn in range(args.turns):
            for side in (0, 1) if turn % 2 else (1, 0):
                rates[side].append(rate(sides[side], num_requests))
        ratios = [new / old for old, new in zip(*rates, strict=True)]
        old, new = map(statistics.median, rates)
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{num_requests} requests: {old:.1f} and {new:.1f} tokens/s, new / old "
            f"{middle:.3f} ({low:.3f} to {high:.3f})",
            flush=True,
        )
    for side in sides:
        side.communicate()  # the end of its input ends it


def start(root: Path, options: list[str]) -> "subprocess.Popen[str]":
    """The process of a checkout, once its model is loaded."""
    environ = os.environ | {"PYTHONPATH": str(root.resolve() / "src")}
    command = [sys.executable, str(Path(__file__).resolve()), *options]
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise SystemExit(f"{root} did not start")
    return process


def rate(process: "subprocess.Popen[str]", num_requests: int) -> float:
    """Tokens a second of the first prompts."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(num_requests, file=process.stdin, flush=True)
    return float(process.stdout.readline())


def answer(args: argparse.Namespace) -> None:
    """Answer as many prompts as each line of the input says; print tokens a second."""
    from outdraft import LLM, SamplingParams, assets

    speculative = None
    if args.draft_model is not None:
        is_embedded = args.draft_model == "embedded"
        drafter = str(assets.drafter_path()) if is_embedded else args.draft_model
        speculative = {"method": "draft_model", "model": drafter}
    llm = LLM(
        args.model or str(assets.target_path()),
        speculative_config=speculative,
        max_model_len=1024,
        seed=0,
    )
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    llm.generate(PROMPTS, [params] * len(PROMPTS), use_tqdm=False)
    print("ready", flush=True)
    for line in sys.stdin:
        number, start_s = int(line), time.perf_counter()
        llm.generate(PROMPTS[:number], [params] * number, use_tqdm=False)
        print(args.max_tokens * number / (time.perf_counter() - start_s), flush=True)


if __name__ == "__main__":
    main()
