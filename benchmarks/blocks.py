"""Drafts of blocks beside EAGLE-3's, for the embedded target: `python benchmarks/blocks.py`.

Every method drafts as many tokens in every step, by chains. They share the target, their prompts
are in the prefix cache, and they take turns in rounds, for one request and for several at once.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from outdraft import assets
from outdraft.bench.report import compute, environment
from outdraft.bench.side_by_side import share_target
from outdraft.config.engine import EngineConfig
from outdraft.core.sampling import SamplingParams
from outdraft.engine.llm import LLM

PLAIN = "plain"
PROMPT_CHARACTERS = 1500  # the end of each held-out prompt


def main() -> None:
    args = _arguments()
    llms = _engines(args)
    prompts = [text[-PROMPT_CHARACTERS:] for _, text in assets.prompts()[: max(args.requests)]]
    samples: dict[str, list[dict[str, float]]] = {}
    for llm in llms.values():
        _measure(llm, prompts, SamplingParams(temperature=0, max_tokens=8))
    if args.wait:
        print("ready", flush=True)
        sys.stdin.readline()
    for _ in range(args.rounds):
        for number in args.requests:
            for temperature in (0.0, 1.0):
                params = SamplingParams(
                    temperature=temperature, max_tokens=args.max_tokens, ignore_eos=True
                )
                for name, llm in llms.items():
                    key = f"{name}, {number} requests, temperature {temperature:g}"
                    found = _measure(llm, prompts[:number], params)
                    samples.setdefault(key, []).append(found)
    result: dict[str, Any] = {
        "environment": environment() | compute(),
        "options": {key: str(value) for key, value in vars(args).items()},
        "medians": {
            key: {what: statistics.median(one[what] for one in rounds) for what in rounds[0]}
            for key, rounds in samples.items()
        },
        "rounds": samples,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    for key, medians in result["medians"].items():
        print(key, {what: round(number, 3) for what, number in medians.items()})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument(
        "--head", action="append", default=[], metavar="METHOD=FOLDER", help="one more to measure"
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--drafts", type=int, default=4, help="a step")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--wait", action="store_true", help="wait for a line before anything is measured"
    )
    return parser.parse_args()


def _engines(args: argparse.Namespace) -> dict[str, LLM]:
    """Plain decoding, EAGLE-3, the embedded heads of blocks, and what was asked for."""
    heads = {"eagle3": str(assets.head_path("eagle3"))}
    for method in ("dflash", "dspark"):
        if method in assets.available_heads():
            heads[method] = str(assets.head_path(method))
    heads |= dict(one.split("=", 1) for one in args.head)
    drafting: dict[str, dict[str, Any] | None] = {PLAIN: None}
    for method, path in heads.items():
        fixed = {"control": "fixed", "num_speculative_tokens": args.drafts}
        drafting[method] = {"method": method, "model": path, **fixed}
    configs = {
        name: EngineConfig.from_options(
            model=str(assets.target_path()),
            dtype=args.dtype,
            device="cpu",
            max_num_seqs=max(args.requests),
            num_blocks=512,
            speculative_config=values,
        )
        for name, values in drafting.items()
    }
    models = share_target(configs)
    return {name: LLM.from_config(config, models[name]) for name, config in configs.items()}


def _measure(llm: LLM, prompts: list[str], params: SamplingParams) -> dict[str, float]:
    """Tokens a second, what a step took, and what a request got of a step that drafted for it."""
    stats = llm.engine.stats
    before = stats.num_steps, stats.draft_s, stats.verify_s, stats.num_drafts
    accepted = stats.num_accepted_tokens
    start_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start_s
    steps, num_drafts = stats.num_steps - before[0], stats.num_drafts - before[3]
    return {
        "tokens_per_s": sum(len(one.outputs[0].token_ids) for one in outputs) / seconds,
        "draft_ms": 1e3 * (stats.draft_s - before[1]) / steps,
        "verify_ms": 1e3 * (stats.verify_s - before[2]) / steps,
        "acceptance_length": 1 + (stats.num_accepted_tokens - accepted) / max(1, num_drafts),
    }


if __name__ == "__main__":
    main()
