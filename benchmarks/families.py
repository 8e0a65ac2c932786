"""Which families run, who computes them, with which drafters, and how fast beside transformers.

    python -m benchmarks.families [--json FILE] [--families NAME ...] [--write]

The models are tiny and random, made by transformers. Ids are compared in float32 with those of its
`generate`, for prompts of several lengths at a time; they are those of the library's network, also
where this engine has one itself. Speed is that of one request, decoded greedily by a model of a few
layers of real widths, computed by what runs unless asked; the two take turns. `--write` puts the
table of benchmarks/results/families.json into docs/models.md.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pages import write

from outdraft import LLM, SamplingParams
from outdraft.bench.report import environment
from outdraft.config.engine import EngineConfig
from outdraft.core.errors import ConfigError
from outdraft.kernels.choose import automatic_dtype
from outdraft.models.choose import uses_transformers
from tests.models.families import CONFIGS, family_model
from tests.oracle.engines import (
    LIBRARY,
    engine,
    greedy,
    greedy_oracle,
    ids,
    pair,
    prompts_of,
    run,
)

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "families.json"
METHODS = ("plain", "draft_model", "perfect-tree", "suffix-tree", "eagle3")
LENGTHS, NUM_TOKENS = (3, 21, 40, 9, 33), 30
REAL = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "head_dim": 64,
}
PROMPT, TIMED_TOKENS, TURNS = 32, 32, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--families", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.write:
        write(ROOT / "docs" / "models.md", "families", page_text(json.loads(RESULT.read_text())))
        return
    rows = dict[str, Any]()
    for name in options.families:
        rows[name] = measured(name)
        print("\n".join(table({name: rows[name]})[2:]), flush=True)
    print("\n".join(table(rows)))
    if options.json is not None:
        result = {"environment": environment(), "families": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def measured(name: str) -> dict[str, Any]:
    """What the table says of a family."""
    own = not uses_transformers(pair(LIBRARY + name).target)
    row: dict[str, Any] = {
        "architecture": type(family_model(name)).__name__,
        "by": "outdraft" if own else "transformers",
        "equal": {method: are_equal(name, method) for method in METHODS},
    }
    return row | speeds(name)


def are_equal(name: str, method: str) -> bool:
    """Whether the ids are those of transformers; False also where the engine refuses."""
    family = LIBRARY + name
    try:
        llm = engine(family, method)
    except ConfigError as error:
        print(f"{name}, {method}: {error}")
        return False
    outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    return ids(outputs) == greedy_oracle(family, LENGTHS, NUM_TOKENS)


def speeds(name: str) -> dict[str, Any]:
    """Tokens a second of this engine and of transformers, in the dtype that is fastest here."""
    known = CONFIGS[name]()
    sizes = REAL
    if hasattr(known, "qk_rope_head_dim"):  # DeepSeek's heads have several sizes
        sizes = {key: REAL[key] for key in ("hidden_size", "intermediate_size")}
    sizes = {key: value for key, value in sizes.items() if _can_set(known, key, value)}
    model: Any = family_model(name, **sizes).bfloat16().eval()
    dtype = automatic_dtype("auto", torch.device("cpu"), torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = LLM.from_config(
            EngineConfig.from_options(
                model=folder, device="cpu", num_blocks=64, cost_table="roofline"
            )
        )
    model = model.to(dtype)
    prompt = prompts_of((PROMPT,))[0]
    ways: dict[str, Callable[[int], None]] = {
        "outdraft": lambda count: _decode(llm, prompt, count),
        "transformers": lambda count: _generate(model, prompt, count),
    }
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(TURNS + 1):
        for way, decode in ways.items():
            seconds = _seconds(decode, TIMED_TOKENS + 1) - _seconds(decode, 1)
            if turn > 0:  # the first one warms up
                samples[way].append(TIMED_TOKENS / seconds)
    medians = {way: statistics.median(found) for way, found in samples.items()}
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "tokens_per_s": samples,
        "ratio": medians["outdraft"] / medians["transformers"],
    }


def _can_set(config: Any, key: str, value: int) -> bool:
    try:
        setattr(config, key, value)
    except AttributeError:  # it follows from other sizes
        return False
    return True


def _decode(llm: LLM, prompt: list[int], count: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    llm.generate([prompt], params, use_tqdm=False)


def _generate(model: Any, prompt: list[int], count: int) -> None:
    whole = torch.tensor([prompt])
    model.generate(
        whole,
        attention_mask=torch.ones_like(whole),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )


def _seconds(decode: Callable[[int], None], count: int) -> float:
    start_s = time.perf_counter()
    decode(count)
    return time.perf_counter() - start_s


def table(rows: dict[str, Any]) -> list[str]:
    """Markdown."""
    lines = [
        f"| family | architecture | computed by | {' | '.join(METHODS)} | tokens/s against "
        "transformers |",
        "|" + "---|" * (len(METHODS) + 4),
    ]
    for name, row in rows.items():
        equal = ["yes" if row["equal"][method] else "**no**" for method in METHODS]
        cells = [name, f"`{row['architecture']}`", row["by"], *equal, f"{row['ratio']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def page_text(result: dict[str, Any]) -> str:
    """The table, and where it was measured."""
    where = result["environment"]
    said = f"{where['processor']}, {where['cores']} cores; commit {where['commit'][:9]}."
    return "\n".join([said, "", *table(result["families"]), ""])


if __name__ == "__main__":
    main()
