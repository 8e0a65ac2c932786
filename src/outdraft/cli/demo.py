"""`outdraft demo`: the embedded pair completes held-out prompts, plain and with every method."""

import json
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from outdraft import assets
from outdraft.cli.command import Json, held_out
from outdraft.cli.threads import use_physical_cores

if TYPE_CHECKING:
    from outdraft.config.engine import EngineConfig
    from outdraft.engine.llm import LLM

SHOWN = "combined"  # the method whose text is printed
# Text at this temperature does not repeat itself: repetition is easy to draft.
TEMPERATURE = 0.8


def demo(
    json_: Json = False,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens to complete a prompt by.")] = 96,
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 4,
    temperature: Annotated[
        float,
        typer.Option(min=0, help="0 is greedy, which a small model answers by repeating itself."),
    ] = TEMPERATURE,
    dtype: Annotated[str, typer.Option(help="What to compute in: float32 or bfloat16.")] = "auto",
) -> None:
    """Measure what speculation gains on this machine's CPU.

    Exits with 1 if any method changes a single token of what plain decoding gives.
    """
    *texts, warm_up = held_out(prompts)
    use_physical_cores(os.environ)
    from outdraft.bench.side_by_side import PLAIN, are_identical
    from outdraft.cli.comparison import as_json, compare, method_configs
    from outdraft.cli.demo_view import DemoView

    started_s = time.monotonic()
    heads = {method: assets.head_path(method) for method in assets.available_heads()}
    llms = load(method_configs(assets.target_path(), assets.drafter_path(), heads, dtype))
    view = None if json_ else DemoView(Console(highlight=False), llms[SHOWN], texts)
    if view is not None:
        view.header()
    compared = compare(
        {name: llm.engine for name, llm in llms.items()},
        warm_up.text,
        [text.text for text in texts],
        max_tokens,
        temperature,
        lambda name, output: view.show(output) if view and name == SHOWN else None,
    )
    if view is None:
        typer.echo(json.dumps({"temperature": temperature} | as_json(compared)))
    else:
        view.footer(compared, temperature, time.monotonic() - started_s)
    if not all(are_identical(samples, compared[PLAIN]) for samples in compared.values()):
        raise typer.Exit(1)


def load(configs: Mapping[str, "EngineConfig"]) -> dict[str, "LLM"]:
    """An engine for each configuration, all over the same weights, loaded once."""
    from outdraft.bench.side_by_side import share_target
    from outdraft.engine.llm import LLM

    models = share_target(configs)
    return {name: LLM.from_config(config, models[name]) for name, config in configs.items()}
