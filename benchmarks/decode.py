"""Batch-1 decoding of the embedded pair: plain, every method, and transformers, side by side.

Each method runs twice: it drafts in every step as much as it may, and as much as the engine
chooses, as engines do by default. All engines complete the same prompt, 0.1 s in turn, so that a
machine whose speed drifts treats them alike; transformers has its turn when they are done. The
result is JSON with raw samples: `python benchmarks/decode.py --json FILE`.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from report import CHOSEN
from transformers import AutoModelForCausalLM, AutoTokenizer

from outdraft import assets
from outdraft.bench.driver import EngineRun, take_turns
from outdraft.bench.report import compute, environment
from outdraft.bench.side_by_side import PLAIN, method_configs, share_target
from outdraft.config.engine import EngineConfig
from outdraft.core.sampling import SamplingParams
from outdraft.engine.build import build_engine
from outdraft.engine.engine import Engine
from outdraft.engine.stats import StatsTotal

REPETITIONS_OF_BANDWIDTH = 5
TRANSFORMERS = "transformers"
REPEATED_LENGTH = 8  # tokens; a text that repeats so many goes round in circles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=23)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    engines, weight_bytes = make_engines(args)
    # No seed: a request with one is verified by shared noise, which accepts less.
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    by_transformers = transformers_variant(args)
    texts = [text for _, text in assets.prompts()]
    if args.prompts >= len(texts):
        parser.error(f"--prompts must be below {len(texts)}: the last one is for warming up")
    # Threads and memory come with the first call.
    complete_in_turns(engines, texts[-1], params, 0)
    by_transformers(texts[-1])
    for engine in engines.values():
        engine.stats = StatsTotal()
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in (*engines, TRANSFORMERS)}
    for number, text in enumerate(texts[: args.prompts]):
        for name, sample in complete_in_turns(engines, text, params, number).items():
            samples[name].append(sample)
        samples[TRANSFORMERS].append(by_transformers(text))
    result = {
        "environment": environment() | compute(),
        "options": {key: str(value) for key, value in vars(args).items()},
        "weight_bytes": weight_bytes,
        "read_bandwidth_gb_per_s": read_bandwidth(weight_bytes),
        "summary": {name: summary(samples, name, engines.get(name)) for name in samples},
        "samples": samples,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(json.dumps({k: v for k, v in result.items() if k != "samples"}, indent=1))


def make_engines(args: argparse.Namespace) -> tuple[dict[str, Engine], int]:
    """By name, and the bytes of the target's weights."""
    heads = {method: assets.head_path(method) for method in assets.available_heads()}
    fixed = method_configs(assets.target_path(), assets.drafter_path(), heads, args.dtype)
    configs = fixed | {
        CHOSEN.format(name): with_chosen_lengths(config)
        for name, config in fixed.items()
        if name != PLAIN
    }
    models = share_target(configs)
    engines = {name: build_engine(config, models[name])[0] for name, config in configs.items()}
    return engines, models[PLAIN].target.weight_bytes


def complete_in_turns(
    engines: dict[str, Engine], text: str, params: SamplingParams, number: int
) -> dict[str, dict[str, Any]]:
    """Every engine completes the prompt. `number`: of the prompt."""
    asked = [("prompt", text, params, 0)]
    runs = {name: EngineRun(engine, asked) for name, engine in engines.items()}
    take_turns(runs, number)
    return {
        name: {
            "num_decoded": run.num_decoded,
            "decode_s": run.decode_s,
            "token_ids": run.output.outputs[0].token_ids,
        }
        for name, run in runs.items()
    }


def with_chosen_lengths(config: EngineConfig) -> EngineConfig:
    """Let the engine choose the lengths of drafts, as it does by default."""
    speculation = replace(config.speculation, num_speculative_tokens="auto", control="adaptive")
    return replace(config, speculation=speculation)


def transformers_variant(args: argparse.Namespace) -> Callable[[str], dict[str, Any]]:
    """Plain decoding by transformers' own generate, on the same weights and dtype."""
    tokenizer = AutoTokenizer.from_pretrained(assets.target_path())
    model: Any = AutoModelForCausalLM.from_pretrained(
        assets.target_path(), dtype=getattr(torch, args.dtype)
    ).eval()

    class FirstToken:
        """A streamer: called with the prompt, then with every token."""

        def __init__(self) -> None:
            self.times_s: list[float] = []

        def put(self, value: torch.Tensor) -> None:
            self.times_s.append(time.perf_counter())

        def end(self) -> None:
            pass

    def complete(text: str) -> dict[str, Any]:
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        streamer = FirstToken()
        with torch.inference_mode():
            whole = model.generate(
                **inputs,
                max_new_tokens=args.max_tokens,
                do_sample=args.temperature > 0,
                temperature=args.temperature or None,
                streamer=streamer,
            )
        _, first_s, *rest_s = streamer.times_s
        ids = whole[0, inputs["input_ids"].shape[1] :].tolist()
        decode_s = rest_s[-1] - first_s if rest_s else 0.0
        return {"num_decoded": len(rest_s), "decode_s": decode_s, "token_ids": ids}

    return complete


def read_bandwidth(num_bytes: int) -> float:
    """GB/s at which all threads read as many bytes as the weights take, median."""
    data = torch.ones(num_bytes // 4)
    seconds = []
    for _ in range(REPETITIONS_OF_BANDWIDTH):
        started_s = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - started_s)
    return num_bytes / statistics.median(seconds) / 1e9


def repeated_share(token_ids: list[int]) -> float:
    """How many of a text's places begin REPEATED_LENGTH tokens that stand earlier in it."""
    strings = [
        tuple(token_ids[start : start + REPEATED_LENGTH])
        for start in range(len(token_ids) - REPEATED_LENGTH + 1)
    ]
    return 1 - len(set(strings)) / len(strings) if strings else 0.0


def summary(
    samples: dict[str, list[dict[str, Any]]], name: str, engine: Engine | None
) -> dict[str, Any]:
    """Medians over prompts, ratios prompt by prompt, and the time split of an engine."""
    tpots = [1000 * one["decode_s"] / max(1, one["num_decoded"]) for one in samples[name]]
    plain = [1000 * one["decode_s"] / max(1, one["num_decoded"]) for one in samples[PLAIN]]
    ratios = [base / own for base, own in zip(plain, tpots, strict=True)]
    total_s = sum(one["decode_s"] for one in samples[name])
    base_s = sum(one["decode_s"] for one in samples[PLAIN])
    tokens = [sum(one["num_decoded"] for one in samples[key]) for key in (name, PLAIN)]
    identical = [
        one["token_ids"] == other["token_ids"]
        for one, other in zip(samples[name], samples[PLAIN], strict=True)
    ]
    numbers: dict[str, Any] = {
        "tpot_ms_median": statistics.median(tpots),
        "tokens_per_s": tokens[0] / total_s,
        "speedup_over_plain": (tokens[0] / total_s) / (tokens[1] / base_s),
        "speedup_over_plain_median_of_prompts": statistics.median(ratios),
        "texts_equal_to_plain": f"{sum(identical)}/{len(identical)}",
        "repeated_share": statistics.mean(
            repeated_share(one["token_ids"]) for one in samples[name]
        ),
    }
    if engine is not None:
        stats = engine.stats
        numbers |= {
            "acceptance_length": stats.acceptance_length,
            "acceptance_rate": stats.acceptance_rate,
            "us_per_step": {
                phase: 1e6 * getattr(stats, f"{phase}_s") / stats.num_steps
                for phase in ("draft", "verify", "sample", "host")
            },
        }
    return numbers


if __name__ == "__main__":
    main()
