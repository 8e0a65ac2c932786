"""What drafts bring on a GPU: `python benchmarks/gpu.py --json FILE`.

The pairs have random weights, in the shapes of two Qwen3 models, see `peers/make_big.py`: drafts
are often right by construction, so the pair shows what the same drafts cost here. Engines of a pair
share the target and take turns in rounds, each round in an order of its own.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from peers.make_big import Shape, make_pair
from torch.profiler import ProfilerActivity, profile

from outdraft import assets
from outdraft.bench.report import compute, environment
from outdraft.bench.side_by_side import share_target
from outdraft.config.engine import EngineConfig
from outdraft.core.sampling import SamplingParams
from outdraft.engine.llm import LLM

NUM_BLOCKS = 4096  # of each engine's cache
VOCABULARY = 32768  # of a size that a head has on a GPU; the tokenizer knows the first ones
WARM_ROUNDS, PROFILED_TOKENS = 2, 24


SIZES = {
    "0.6b": Shape(1024, 3072, VOCABULARY, layers=28, heads=16, drafter_layers=2),
    "8b": Shape(4096, 12288, VOCABULARY, layers=36, heads=32, drafter_layers=3),
}


def main() -> None:
    args = _arguments()
    kept = {name: value for name, value in vars(args).items() if name not in ("json", "folder")}
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "environment": environment() | compute(),
        "options": kept,
    }
    for name in args.sizes:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            paths = Path(folder) / "target", Path(folder) / "drafter"
            make_pair(SIZES[name], *paths, device="cuda")
            for found in _measured(paths, args):
                results[name] = found
                if args.json:
                    written = json.dumps(results, indent=1) + "\n"
                    args.json.write_text(written, encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--folder", type=Path, help="for weights, until they are measured")
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=["0.6b", "8b"])
    parser.add_argument("--drafts", nargs="+", default=["4", "auto"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--enforce-eager", action="store_true", help="no step is a graph")
    return parser.parse_args()


def _measured(paths: tuple[Path, Path], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Tokens a second of each engine, and for the fewest requests what its steps launch; as far as
    it is measured."""
    llms = _engines(paths, args)
    prompts = [text[-1500:] for _, text in assets.prompts()[: max(args.requests)]]
    found: dict[str, Any] = {"steps": {}, "medians": {}, "rounds": {}}
    for temperature in args.temperatures:
        for number in args.requests:
            params = SamplingParams(
                temperature=temperature, max_tokens=args.max_tokens, ignore_eos=True
            )
            for llm in llms.values():
                for _ in range(WARM_ROUNDS):  # what lengths are worth is learned
                    _run(llm, prompts[:number], params)
            samples: dict[str, list[dict[str, float]]] = {name: [] for name in llms}
            for round_number in range(args.rounds):
                order = Random(round_number).sample(list(llms), len(llms))
                for name in order:
                    samples[name].append(_run(llms[name], prompts[:number], params))
            key = f"temperature {temperature:g}, {number} requests"
            found["rounds"][key] = samples
            found["medians"][key] = {name: _medians(rounds) for name, rounds in samples.items()}
            _show(key, found["medians"][key])
            if number == min(args.requests):
                for name, llm in llms.items():
                    steps = _profile(llm, prompts[:number], temperature)
                    found["steps"][f"{key}, {name}"] = steps
                    print("  ", name, steps, flush=True)
            yield found


def _engines(paths: tuple[Path, Path], args: argparse.Namespace) -> dict[str, LLM]:
    target, drafter = paths
    configs: dict[str, EngineConfig] = {}
    for drafts in ("0", *args.drafts):
        speculative: dict[str, Any] | None = None
        if drafts != "0":
            speculative = {"method": "draft_model", "model": str(drafter)}
            speculative |= {"num_speculative_tokens": drafts if drafts == "auto" else int(drafts)}
            if drafts != "auto":
                speculative["control"] = "fixed"
        configs["plain" if drafts == "0" else drafts] = EngineConfig.from_options(
            model=str(target),
            device="cuda",
            speculative_config=speculative,
            enforce_eager=args.enforce_eager,
            num_blocks=NUM_BLOCKS,
        )
    models = share_target(configs)
    return {name: LLM.from_config(configs[name], models[name]) for name in configs}


def _run(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> dict[str, float]:
    """Tokens a second, prompts in the cache included, and tokens of a step."""
    before = llm.engine.stats.num_steps
    started = time.perf_counter()
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    seconds = time.perf_counter() - started
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    steps = llm.engine.stats.num_steps - before
    return {"tokens_per_s": num_tokens / seconds, "steps": steps, "step_ms": 1000 * seconds / steps}


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {what: statistics.median(one[what] for one in rounds) for what in rounds[0]}


def _show(key: str, medians: Mapping[str, Mapping[str, float]]) -> None:
    plain = medians["plain"]["tokens_per_s"]
    print(key, flush=True)
    for name, one in medians.items():
        ratio = one["tokens_per_s"] / plain
        print(f"  {name:6} {one['tokens_per_s']:9.1f} tokens/s {ratio:5.2f} {one}", flush=True)


def _profile(llm: LLM, prompts: Sequence[str], temperature: float) -> dict[str, float]:
    """How many kernels a step has on average, what is launched for them, and the time they take."""
    params = SamplingParams(temperature=temperature, max_tokens=PROFILED_TOKENS, ignore_eos=True)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        steps = _run(llm, prompts, params)["steps"]
        torch.cuda.synchronize()
    launches = kernels = busy = 0.0
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA":
            kernels += 1
            busy += event.device_time
        elif event.name.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")):
            launches += 1
    return {
        "launches": launches / steps,
        "kernels": kernels / steps,
        "kernel_ms": busy / 1000 / steps,
    }


if __name__ == "__main__":
    main()
