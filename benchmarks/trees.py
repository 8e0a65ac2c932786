"""Do drafted trees beat chains of as many rows? The embedded pair, one request at a time.

    python benchmarks/trees.py [--temperature 1] [--json out.json]

For each number of rows the best chain of at most as many (block verification) is compared with the
best tree of exactly as many: in accepted tokens a step, which the machine does not change, and in
tokens a second, measured side by side prompt by prompt. Best is what does best in the whole
measurement, for chains and for trees alike, which flatters both a little.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from outdraft import assets
from outdraft.bench.driver import PHASES, EngineRun
from outdraft.bench.report import compute, environment
from outdraft.bench.side_by_side import (
    PLAIN,
    complete_in_turn,
    median_speed,
    ms_per_step,
    share_target,
    sum_of_drafts,
    variants,
)
from outdraft.config.engine import EngineConfig
from outdraft.core.sampling import SamplingParams
from outdraft.engine.build import build_engine

CHAINS = (2, 4, 8, 10, 12, 16, 20)
TREES = {
    4: ((2, 1, 1), (2, 2)),
    8: ((2, 1, 1, 1, 1, 1, 1),),
    12: ((3, 2, 1, 1, 1, 1, 1, 1, 1),),
    16: ((4, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1),),
    24: ((5, 4, 3, 2, 2, 2, 2, 1, 1, 1, 1),),
}
SURE = 2.0  # standard errors

Samples = dict[str, list[EngineRun]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2, help="completions of each prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    texts = [text for _, text in assets.prompts()]
    if args.prompts >= len(texts):
        parser.error(f"--prompts must be below {len(texts)}: one more is for warming up")
    samples = measure(texts[args.prompts], texts[: args.prompts], args)
    sizes = [compare(samples, num_rows) for num_rows in TREES]
    print(table(sizes))
    print(verdict(sizes))
    if args.json:
        result = {
            "environment": environment() | compute(),
            "options": {key: str(value) for key, value in vars(args).items() if key != "json"},
            "sizes": sizes,
            "verdict": verdict(sizes),
            "all": {name: summary(own, samples[PLAIN]) for name, own in samples.items()},
        }
        args.json.write_text(json.dumps(result, indent=1))


def measure(warm_up: str, prompts: Sequence[str], args: argparse.Namespace) -> Samples:
    """Every chain and tree, prompt by prompt in turn, as often as `repeats` says."""
    speculation: dict[str, dict[str, Any] | None] = {PLAIN: None}
    speculation |= {chain_name(length): {"num_speculative_tokens": length} for length in CHAINS}
    for shapes in TREES.values():
        speculation |= {tree_name(levels): {"tree_levels": levels} for levels in shapes}
    base = EngineConfig.from_options(
        model=str(assets.target_path()),
        dtype="float32",
        device="cpu",
        max_num_seqs=1,
    )
    drafter = {
        "method": "draft_model",
        "model": str(assets.drafter_path()),
        "control": "fixed",
    }
    configs = variants(base, {name: own and drafter | own for name, own in speculation.items()})
    models = share_target(configs)
    engines = {name: build_engine(config, models[name])[0] for name, config in configs.items()}
    samples: Samples = {name: [] for name in configs}
    with tqdm(total=args.repeats * len(configs) * (1 + len(prompts)), leave=False) as bar:
        params = SamplingParams(  # without a seed: verified as the engines are configured
            temperature=args.temperature,
            max_tokens=args.max_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        for _ in range(args.repeats):
            found = complete_in_turn(
                engines, warm_up, prompts, [params] * len(prompts), lambda: bar.update()
            )
            for name, own in found.items():
                samples[name] += own
    return samples


def chain_name(length: int) -> str:
    return f"chain {length}"


def tree_name(levels: Sequence[int]) -> str:
    return "tree " + "-".join(map(str, levels))


def compare(samples: Samples, num_rows: int) -> dict[str, Any]:
    """The best chain of at most `num_rows` rows and the best tree of as many."""
    chains = [chain_name(length) for length in CHAINS if length <= num_rows]
    trees = [tree_name(levels) for levels in TREES[num_rows]]

    def accepted(name: str) -> float:
        return sum_of_drafts(samples[name]).acceptance_length - 1

    def speed(name: str) -> float:
        return median_speed(samples[name], samples[PLAIN])[0]

    chain, tree = max(chains, key=accepted), max(trees, key=accepted)
    fast_chain, fast_tree = max(chains, key=speed), max(trees, key=speed)
    return {
        "num_rows": num_rows,
        "accepted": {
            "chain": chain,
            "tree": tree,
            "chain_accepted": accepted(chain),
            "tree_accepted": accepted(tree),
            "ratio": accepted(tree) / accepted(chain),
            "ratio_with_bonus": (1 + accepted(tree)) / (1 + accepted(chain)),
            "standard_errors": errors_apart(samples[tree], samples[chain]),
        },
        "time": {
            "chain": fast_chain,
            "tree": fast_tree,
            "chain_tokens_per_s": speed(fast_chain),
            "tree_tokens_per_s": speed(fast_tree),
            "ratio": median_speed(samples[fast_tree], samples[fast_chain])[1],
        },
    }


def errors_apart(own: Sequence[EngineRun], other: Sequence[EngineRun]) -> float:
    """Difference in accepted tokens a step, prompt by prompt, in its standard errors."""
    gaps = [
        a.decode_stats.acceptance_length - b.decode_stats.acceptance_length
        for a, b in zip(own, other, strict=True)
    ]
    if len(gaps) < 2 or not (spread := statistics.stdev(gaps)):
        return 0.0
    return statistics.mean(gaps) / (spread / math.sqrt(len(gaps)))


def summary(samples: Sequence[EngineRun], plain: Sequence[EngineRun]) -> dict[str, Any]:
    """One chain's or tree's numbers, and those of each completion."""
    tokens_per_s, ratio = median_speed(samples, plain)
    return {
        "accepted_per_step": sum_of_drafts(samples).acceptance_length - 1,
        "tokens_per_s": tokens_per_s,
        "ratio_to_plain": ratio,
        "ms_per_step": {phase: ms_per_step(samples, phase) for phase in PHASES},
        "samples": [
            {
                "num_drafts": sample.decode_stats.num_drafts,
                "num_accepted": sample.decode_stats.num_accepted_tokens,
                "num_decoded": sample.num_decoded,
                "decode_s": sample.decode_s,
            }
            for sample in samples
        ],
    }


def table(sizes: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'rows':>4}  {'best chain':10} {'accepted':>8} {'best tree':22} {'accepted':>8} "
        f"{'ratio':>6} {'+bonus':>6} {'errors':>6}   {'fastest':10} {'tok/s':>6} "
        f"{'fastest tree':22} {'tok/s':>6} {'ratio':>6}"
    ]
    for size in sizes:
        a, t = size["accepted"], size["time"]
        lines.append(
            f"{size['num_rows']:4}  {a['chain']:10} {a['chain_accepted']:8.3f} {a['tree']:22} "
            f"{a['tree_accepted']:8.3f} {a['ratio']:6.2f} {a['ratio_with_bonus']:6.2f} "
            f"{a['standard_errors']:+6.1f}   {t['chain']:10} {t['chain_tokens_per_s']:6.1f} "
            f"{t['tree']:22} {t['tree_tokens_per_s']:6.1f} {t['ratio']:6.2f}"
        )
    return "\n".join(lines)


def verdict(sizes: Sequence[dict[str, Any]]) -> str:
    """In plain words: where trees accept more, where less, and whether time follows."""
    parts: list[str] = []
    for size in sizes:
        accepted, time = size["accepted"], size["time"]
        errors, is_faster = accepted["standard_errors"], time["ratio"] > 1
        kind = "no surely different number of"
        if abs(errors) > SURE:
            kind = "more" if errors > 0 else "fewer"
        link = "and" if is_faster == (accepted["ratio"] > 1) else "but"
        parts.append(
            f"{size['num_rows']} rows: the best tree has {kind} drafts accepted a step "
            f"({accepted['ratio']:.2f} times the best chain's), {link} the fastest tree is "
            f"{'faster' if is_faster else 'slower'} than the fastest chain ({time['ratio']:.2f} "
            "times its tokens a second)"
        )
    return ".\n".join(parts) + "."


if __name__ == "__main__":
    main()
