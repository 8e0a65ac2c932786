"""Costs of a loaded drafter while no request drafts: steps against those of an engine without one.

All engines decode the same prompts greedily, so every step computes the same. They take their turn
step by step, in another order each time, and steps are compared pair by pair. A second engine
without a drafter shows what such a comparison cannot tell. Ways to be off:

- forbidden: no request may draft;
- dear: the controller believes that the network takes a second to draft, so it has given it up.
  Its own time is part of the steps.

The result is JSON: `python benchmarks/off.py --json FILE`.
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from outdraft import assets
from outdraft.bench.report import compute, environment
from outdraft.bench.side_by_side import method_configs, share_target
from outdraft.control.controller import Controller
from outdraft.core.sampling import SamplingParams, SpeculationParams
from outdraft.engine.build import build_engine
from outdraft.engine.engine import Engine

PLAIN, AGAIN, DEAR_S, BLOCK = "plain", "plain again", 1.0, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", default="draft_model,eagle3,medusa")
    args = parser.parse_args()
    engines = make_engines(args)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    texts = [text for _, text in assets.prompts()]
    parts = [texts[i : i + args.requests] for i in range(0, len(texts), args.requests)]
    run_round(engines, parts[0], args.max_tokens, 0)  # warms up
    warm = num_drafts(engines)
    for number, part in enumerate(parts[1 : args.rounds + 1], 1):
        for name, pairs in run_round(engines, part, args.max_tokens, number).items():
            samples[name] += pairs
    result = {
        "environment": environment() | compute(),
        "options": {key: str(value) for key, value in vars(args).items()},
        "drafts": {name: count - warm[name] for name, count in num_drafts(engines).items()},
        "plain_ms_per_step": {
            kind: 1e3 * statistics.median(pair[place] for pair in samples[PLAIN])
            for place, kind in enumerate(("cpu", "wall"))
        },
        "ratios": {
            name: {
                kind: ratio([pair[place] for pair in own], [pair[place] for pair in samples[PLAIN]])
                for place, kind in enumerate(("cpu", "wall"))
            }
            for name, own in samples.items()
            if name != PLAIN
        },
    }
    written = json.dumps(result, indent=1)
    if args.json:
        args.json.write_text(written)
    print(written)


def make_engines(args: argparse.Namespace) -> dict[str, Engine]:
    heads = {method: assets.head_path(method) for method in assets.available_heads()}
    configs = method_configs(assets.target_path(), assets.drafter_path(), heads, args.dtype)
    chosen = {PLAIN: configs[PLAIN], AGAIN: configs[PLAIN]}
    for method in args.methods.split(","):
        chosen |= {f"{method}, {way}": configs[method] for way in ("forbidden", "dear")}
    for name, config in chosen.items():
        scheduler = replace(config.scheduler, max_num_seqs=args.requests)
        speculation = replace(config.speculation, control="adaptive")
        chosen[name] = replace(config, scheduler=scheduler, speculation=speculation)
    models = share_target(chosen)
    engines = {name: build_engine(config, models[name])[0] for name, config in chosen.items()}
    for name, engine in engines.items():
        if name.endswith("dear"):
            controller = engine.drafting.control
            assert isinstance(controller, Controller)
            table = controller.costs.table
            dear = {n: replace(one, start_s=DEAR_S) for n, one in table.drafters.items()}
            max_drafts = engine.drafting.config.max_drafts
            engine.drafting.control = Controller(replace(table, drafters=dear), max_drafts)
    return engines


def run_round(
    engines: dict[str, Engine], texts: list[str], max_tokens: int, seed: int
) -> dict[str, list[tuple[float, float]]]:
    """CPU time and wall time of each step behind the prompts, in seconds, by engine."""
    order, samples = list(engines), {name: list[tuple[float, float]]() for name in engines}
    shuffle = random.Random(seed).shuffle
    for name, engine in engines.items():
        speculation = SpeculationParams(enabled=not name.endswith("forbidden"))
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, speculation=speculation
        )
        for index, text in enumerate(texts):
            engine.add_request(str(index), text, params)
        while any(request.num_output == 0 for request in requests_of(engine)):
            engine.step()
    while all(engine.has_work for engine in engines.values()):
        shuffle(order)
        for name in order:
            started_s, started_cpu_s = time.perf_counter(), time.process_time()
            engines[name].step()
            used_s = time.process_time() - started_cpu_s
            samples[name].append((used_s, time.perf_counter() - started_s))
    for engine in engines.values():
        while engine.has_work:
            engine.step()
    return samples


def num_drafts(engines: dict[str, Engine]) -> dict[str, int]:
    """Tokens that each engine drafted so far: one that is off drafts no more."""
    return {name: engine.stats.num_draft_tokens for name, engine in engines.items()}


def requests_of(engine: Engine) -> list:
    return [*engine.scheduler.running, *engine.scheduler.waiting]


def ratio(own: list[float], base: list[float]) -> dict[str, float]:
    """The median over blocks of steps, and a 95 % interval of it by the bootstrap."""
    blocks = range(0, min(len(own), len(base)) - BLOCK + 1, BLOCK)
    ratios = np.array([sum(own[i : i + BLOCK]) / sum(base[i : i + BLOCK]) for i in blocks])
    drawn = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return {"median": float(np.median(ratios)), "low": float(low), "high": float(high)}


if __name__ == "__main__":
    main()
