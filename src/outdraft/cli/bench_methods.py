"""`outdraft bench methods`: every way to draft for one target, side by side."""

import json
import os
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from outdraft import assets
from outdraft.cli.command import (
    Json,
    Model,
    held_out,
    progress,
    table_of,
    use_physical_cores,
    wide_console,
)
from outdraft.cli.options import (
    FLAG,
    EngineOptions,
    engine_config,
    speculative_config,
    takes_options,
    with_embedded_network,
)
from outdraft.config.speculation import parse_speculative_config
from outdraft.core.errors import ConfigError

TREE_LEVELS = (2, 2, 1, 1)
# With a draft model, or for other targets.
OF_THE_HOST: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
}
EMBEDDED: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model"},
    "draft_model-tree": {"method": "draft_model", "tree_levels": TREE_LEVELS},
    "eagle3": {"method": "eagle3"},
    "eagle3-tree": {"method": "eagle3", "tree_levels": TREE_LEVELS},
    "medusa": {"method": "medusa"},
    "mlp_speculator": {"method": "mlp_speculator"},
    "dspark": {"method": "dspark"},
    **OF_THE_HOST,
    "combined": {"method": "combined"},
}


@takes_options
def methods(
    model: Model = None,
    *,
    json_: Json = False,
    prompts: Annotated[int, typer.Option(min=1)] = 6,
    max_tokens: Annotated[int, typer.Option(min=2)] = 64,
    chosen: Annotated[str | None, typer.Option("--methods", metavar="a,b,c")] = None,
    speculative_configs: Annotated[list[str] | None, typer.Option(FLAG)] = None,
    dtype: str = "float32",
    device: str | None = None,
    max_model_len: int | None = None,
) -> None:
    """Measure what each method brings and costs, one request at a time.

    All of them share the target, and take turns prompt by prompt with plain decoding. Exits with 1
    if any changes a single token of plain decoding's greedy texts.

    Args:
        prompts: Held-out prompts of the package.
        max_tokens: Tokens to complete a prompt by.
        chosen: Only these; default: all there are.
        speculative_configs: JSON with vLLM's keys: one more to measure; repeatable.
        dtype: In bfloat16 texts may part where the target is undecided.
        device: auto, cpu or cuda.
        max_model_len: Longest prompt + output, in tokens.
    """
    *texts, warm_up = [text for _, text in held_out(prompts)]
    selected = select(available(model, speculative_configs or ()), chosen)
    engine = EngineOptions(
        dtype=dtype, device=device, max_model_len=max_model_len, speculative_config="null"
    )
    base = engine_config(model, engine)
    use_physical_cores(os.environ)
    from outdraft.bench.report import compute, environment
    from outdraft.bench.side_by_side import PLAIN, TEMPERATURES, measure_methods, variants

    configs = variants(base, {PLAIN: None} | selected)
    count = len(TEMPERATURES) * len(configs) * (1 + prompts)
    with progress("requests", count, "req") as bar:
        result = measure_methods(configs, warm_up, texts, max_tokens, lambda: bar.update())
    for name, values in selected.items():
        result["methods"][name] = {"speculative_config": values} | result["methods"][name]
    if json_:
        typer.echo(json.dumps(result | {"environment": environment() | compute()}))
    else:
        show(result)
    if not result["all_identical"]:
        raise typer.Exit(1)


def available(model: str | None, more: Sequence[str]) -> dict[str, dict[str, Any]]:
    """List speculative_configs that can draft for the target, by name, those of the user last.

    Raises:
        ConfigError: one of the user's is wrong.
    """
    named = dict(OF_THE_HOST)
    if model is None:
        missing = set(assets.HEADS) - set(assets.available_heads())
        named = {
            name: with_embedded_network(values)
            for name, values in EMBEDDED.items()
            if values["method"] not in missing
        }
    for text in more:
        values = speculative_config(text, model)
        if values is None:
            raise ConfigError("--speculative-config must name a method: plain is measured anyway")
        name = _name(values)
        taken = sum(other == name or other.startswith(f"{name}#") for other in named)
        named[f"{name}#{taken + 1}" if taken else name] = values
    return named


def select(named: dict[str, dict[str, Any]], chosen: str | None) -> dict[str, dict[str, Any]]:
    """Those that --methods lists; all without it.

    Raises:
        ConfigError: there is none of such a name.
    """
    if chosen is None:
        return named
    names = [name.strip() for name in chosen.split(",")]
    for name in names:
        if name in named:
            continue
        if name.removesuffix("-tree") in assets.HEADS:
            assets.head_path(name.removesuffix("-tree"))
        raise ConfigError(f"--methods must be of {', '.join(named)}; got {name!r}")
    return {name: named[name] for name in names}


def _name(values: dict[str, Any]) -> str:
    """A short one: the methods, and whether they draft trees."""
    config = parse_speculative_config(values)
    joined = "+".join(map(str, config.methods))
    has_tree = config.network is not None and config.network.tree is not None
    return f"{joined}-tree" if has_tree else joined


def show(result: dict[str, Any]) -> None:
    """The table, and below it what its columns mean."""
    from outdraft.bench.side_by_side import PLAIN, TEMPERATURES

    console = wide_console(110)
    console.print(
        f"One request at a time: {result['num_prompts']} prompts of {result['max_tokens']} tokens, "
        f"{result['dtype']}, {result['device']}",
        style="bold",
    )
    lengths, speeds = (
        [f"{what}\nT = {temperature}" for temperature in TEMPERATURES]
        for what in ("length", "tokens/s")
    )
    more = "weights\nMiB", "KV KiB\nper 1k", "same\nids"
    rows: list[tuple[str, ...]] = []
    for name, numbers in ({PLAIN: result[PLAIN]} | result["methods"]).items():
        runs = [numbers[f"temperature_{temperature}"] for temperature in TEMPERATURES]
        is_plain = name == PLAIN
        row = (
            name,
            *("" if is_plain else f"{run['acceptance_length']:.2f}" for run in runs),
            "" if is_plain else f"{runs[0]['draft_ms']:.2f}",
            f"{runs[0]['verify_ms']:.2f}",
            *(f"{run['tokens_per_s']:.0f} {run['ratio_to_plain']:.2f}x" for run in runs),
            f"{numbers['weight_bytes'] / 2**20:.1f}",
            f"{numbers['kv_bytes_per_1k_tokens'] / 2**10:.0f}",
            "" if is_plain else "yes" if numbers["identical"] else "[bold red]NO[/]",
        )
        rows.append(row)
    headings = ["method", *lengths, "draft\nms", "verify\nms", *speeds, *more]
    console.print(table_of(headings, rows))
    console.print(
        "length: tokens a verified draft brought, the target's own one included. draft, verify: a "
        "step at T = 0. tokens/s: median of the prompts, and of their ratios to plain decoding. "
        "KV: of a thousand tokens, beside the target's. same ids: as plain decoding at T = 0.",
        style="dim",
    )
    searches = {
        name: numbers["draft_us_per_request_32k"]
        for name, numbers in result["methods"].items()
        if "draft_us_per_request_32k" in numbers
    }
    if searches:
        listed = ", ".join(f"{name} {us:.1f} us" for name, us in searches.items())
        console.print(f"A draft after a text of 32k tokens: {listed}.")
    if result["all_identical"]:
        console.print("At T = 0 every method gave plain decoding's tokens.")
    else:
        changed = [name for name, one in result["methods"].items() if not one["identical"]]
        console.print(f"[bold red]At T = 0 tokens were changed by {', '.join(changed)}.[/]")
