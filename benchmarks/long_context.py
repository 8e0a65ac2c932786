"""Self-speculation at long contexts: the target over a part of a text, beside others.

    python benchmarks/long_context.py --contexts 8192 16384 32768 65536 --json FILE

Two targets: the embedded one with local attention (local_target.py), and the embedded one with its
rotary positions stretched by YaRN from the 1,024 tokens of its training. The prompt is this
repository's own source, and drafts are accepted as the model really accepts them.

All methods of a context share one prefill, by the prefix cache, and take turns. With
`--prefill-window` the rows of a prompt see only so many tokens before their chunk: a whole prefill
grows with the square of the context. What is measured attends to the whole text in any case.
"""

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from local_target import write_local_target

from outdraft import assets
from outdraft.attention.base import AttentionMetadata
from outdraft.bench.driver import complete_alone
from outdraft.bench.report import compute, environment
from outdraft.config.engine import EngineConfig
from outdraft.control.policy import FixedLength, LengthPolicy
from outdraft.core.sampling import SamplingParams, SpeculationParams
from outdraft.engine.build import build_engine
from outdraft.engine.engine import Engine
from outdraft.loading.models import load_models
from outdraft.runner.model_runner import ModelRunner

ROOT = Path(__file__).parents[1]
MORE_BLOCKS = 64  # than the prompt takes
WARM_UP = 8  # tokens


def main() -> None:
    args = _arguments()
    longest = max(args.contexts)
    with TemporaryDirectory() as folder:
        write = write_local_target if args.target == "local" else _stretched
        model = write(Path(folder), longest + args.max_tokens + 64)
        engine, prompt = _engine(args, model, longest)
    fixed, off = FixedLength(args.drafts), SpeculationParams(enabled=False)
    own = SpeculationParams(method="self")
    methods: dict[str, tuple[LengthPolicy, SpeculationParams]] = {
        "plain": (fixed, off),
        "suffix": (fixed, SpeculationParams(method="suffix")),
        "self": (fixed, own),
        "self, lengths chosen": (engine.drafting.control, own),
    }
    with _narrow_prompts(engine, args.prefill_window):
        _complete(engine, prompt, *methods["plain"], 2)  # fills the prefix cache
    if args.wait:
        print("ready", flush=True)
        sys.stdin.readline()
    measured = {
        context: _measured(args, engine, prompt[:context], methods) for context in args.contexts
    }
    result: dict[str, Any] = {
        "environment": environment() | compute(),
        "options": {key: str(value) for key, value in vars(args).items()},
        "contexts": measured,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(measured, indent=1))


def _measured(
    args: argparse.Namespace,
    engine: Engine,
    prompt: list[int],
    methods: dict[str, tuple[LengthPolicy, SpeculationParams]],
) -> dict[str, Any]:
    """What the methods did in turns, by their names."""
    for control, speculation in methods.values():
        _complete(engine, prompt, control, speculation, WARM_UP)
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}
    for _ in range(args.rounds):
        for name, (control, speculation) in methods.items():
            sample = _complete(engine, prompt, control, speculation, args.max_tokens)
            samples[name].append(sample)
    return {name: _summary(rounds, samples["plain"]) for name, rounds in samples.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--target", choices=("local", "stretched"), default="local")
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192], help="tokens of prompts")
    parser.add_argument(
        "--prefill-window", type=int, help="tokens before a prompt's chunk that its rows see"
    )
    parser.add_argument("--kv-budget", type=int, default=512)
    parser.add_argument("--quantization", help="of the weights that draft")
    parser.add_argument("--cost-table", default="auto", help="as outdraft serve's")
    parser.add_argument("--drafts", type=int, default=4, help="a step, where lengths are fixed")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--wait", action="store_true", help="wait for a line before anything is measured"
    )
    return parser.parse_args()


def _stretched(folder: Path, context: int) -> Path:
    """The embedded target with room for so many tokens."""
    target = shutil.copytree(assets.target_path(), folder / "target")
    config = json.loads((target / "config.json").read_text())
    trained = config["max_position_embeddings"]
    config["rope_scaling"] = {
        "rope_type": "yarn",
        "factor": context / trained,
        "original_max_position_embeddings": trained,
    }
    config["max_position_embeddings"] = context
    (target / "config.json").write_text(json.dumps(config))
    return target


def _engine(args: argparse.Namespace, model: Path, context: int) -> tuple[Engine, list[int]]:
    """An engine for one text at a time, and the prompt."""
    own = {"method": "self", "kv_budget": args.kv_budget}
    if args.quantization:
        own["quantization"] = args.quantization
    config = EngineConfig.from_options(
        model=str(model),
        max_num_seqs=1,
        max_num_batched_tokens=1024,
        num_blocks=context // 16 + MORE_BLOCKS,
        cost_table=args.cost_table,
        speculative_config={
            "sources": [{"method": "suffix", "suffix_decoding_max_cached_requests": 0}, own],
            "num_speculative_tokens": args.drafts,
        },
    )
    models = load_models(config)
    assert models.tokenizer is not None
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    ids = models.tokenizer.encode(sources, add_special_tokens=False).ids
    assert len(ids) >= context, f"the sources have {len(ids)} tokens"
    return build_engine(config, models)[0], ids[:context]


@contextmanager
def _narrow_prompts(engine: Engine, window: int | None) -> Iterator[None]:
    """Rows of prompts see at most so many tokens before their chunk; None: all."""
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    if window is None:
        yield
        return
    model: Any = runner.model
    block_size, forward, fused = runner.cache.block_size, model.forward_tapped, type(model).fused

    def narrowed(ids_T: Any, caches: Any, metadata: AttentionMetadata, *others: Any) -> Any:
        [context] = metadata.context_lens_B.tolist()
        num_blocks = max(0, context - window) // block_size
        less = num_blocks * block_size
        own = replace(
            metadata,
            context_lens_B=metadata.context_lens_B - less,
            block_table_BP=metadata.block_table_BP[:, num_blocks:].contiguous(),
            max_seq_len=metadata.max_seq_len - less,
        )
        return forward(ids_T, caches, own, *others)

    model.forward_tapped = narrowed  # positions stay, so keys are turned as in the whole text
    type(model).fused = None  # a step in one call would not call it
    yield
    model.forward_tapped, type(model).fused = forward, fused


def _complete(
    engine: Engine,
    prompt: list[int],
    control: LengthPolicy,
    speculation: SpeculationParams,
    max_tokens: int,
) -> dict[str, Any]:
    """The ids, tokens a second behind the first one, and what became of drafts."""
    engine.drafting.control = control
    before = engine.stats.num_draft_tokens, engine.stats.num_accepted_tokens, engine.stats.num_steps
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, speculation=speculation
    )
    done = complete_alone(engine, "text", prompt, params)
    stats = engine.stats
    return {
        "ids": done.output.outputs[0].token_ids,
        "tokens_per_s": done.num_decoded / done.decode_s,
        "drafted": stats.num_draft_tokens - before[0],
        "accepted": stats.num_accepted_tokens - before[1],
        "steps": stats.num_steps - before[2],
    }


def _summary(rounds: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians; the speedup is that of each round over plain decoding in the same round."""
    speedups = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(rounds, plain, strict=True)]
    drafted = sum(one["drafted"] for one in rounds)
    return {
        "tokens_per_s": statistics.median(one["tokens_per_s"] for one in rounds),
        "speedup": statistics.median(speedups),
        "speedup_range": [min(speedups), max(speedups)],
        "accepted_share": sum(one["accepted"] for one in rounds) / drafted if drafted else None,
        "drafted_per_step": drafted / sum(one["steps"] for one in rounds),
        "texts_identical": all(one["ids"] == plain[0]["ids"] for one in rounds),
        "rounds": [{key: one[key] for key in one if key != "ids"} for one in rounds],
    }


if __name__ == "__main__":
    main()
