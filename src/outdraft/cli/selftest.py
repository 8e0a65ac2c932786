"""`outdraft selftest`: whether speculation keeps its promises for the user's own models."""

import json
import os
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console
from tqdm import tqdm

from outdraft.cli.command import Model, held_out, use_physical_cores
from outdraft.cli.options import EngineOptions, engine_config, takes_options
from outdraft.config.engine import SchedulerConfig
from outdraft.config.fields import check_whole
from outdraft.config.speculation import SpeculationConfig
from outdraft.core.errors import ConfigError


@takes_options
def selftest(
    model: Model = None,
    *,
    prompts: int = 8,
    max_tokens: int = 64,
    samples: int = 512,
    sampled_prompts: int | None = None,
    json_: Annotated[bool, typer.Option("--json")] = False,
    engine: EngineOptions,
) -> None:
    """Check that drafts change nothing but the speed, with your models on your machine.

    Greedy texts must be plain decoding's, token by token, and drawn tokens must have the target's
    distribution. Exits with 1 if not, and says how undecided the target was at the first
    difference.

    SelfTest:
        prompts: Prompts of the package that are completed greedily.
        max_tokens: Tokens to complete each of them by.
        samples: Texts that are drawn for each of --sampled-prompts, with lengths as configured and
            as many more where every step drafts.
        sampled_prompts: Prompts with drawn texts, no more than --prompts. Default: 2, or the only
            one.
        json_: Print one JSON object and nothing else.
    """
    check_whole("prompts", prompts, 1, 300)
    check_whole("max_tokens", max_tokens, 2)
    check_whole("samples", samples, 100)
    num_sampled = min(2, prompts) if sampled_prompts is None else sampled_prompts
    check_whole("sampled_prompts", num_sampled, 1, prompts)
    config = engine_config(model, engine)
    if not config.speculation.sources:
        raise ConfigError("a self-test needs --speculative-config: it says what drafts")
    if not config.speculation.is_lossless:
        raise ConfigError(
            "rejection_sample_method 'lossy_typical' does not promise the target's distribution"
        )
    texts = [text for _, text in held_out(prompts)]
    use_physical_cores(os.environ)
    from outdraft.bench.selftest import ALWAYS, SPECULATIVE, self_test
    from outdraft.bench.side_by_side import PLAIN, build_together, share_target

    config = replace(config, scheduler=SchedulerConfig(max_num_seqs=16))
    always = replace(config.speculation, control="fixed")
    configs = {
        PLAIN: replace(config, speculation=SpeculationConfig()),
        SPECULATIVE: config,
        ALWAYS: replace(config, speculation=always, seed=config.seed + 1),
    }
    engines = build_together(configs, share_target(configs))
    with tqdm(desc="texts", leave=False, disable=True if json_ else None) as bar:
        result = self_test(engines, texts, max_tokens, samples, num_sampled, bar.update)
    if json_:
        typer.echo(json.dumps(result))
    else:
        show(result)
    if not result["passed"]:
        raise typer.Exit(1)


def show(result: dict[str, Any]) -> None:
    """The findings, one to a line."""
    from outdraft.bench.selftest import LEAST_P

    console = Console(highlight=False, soft_wrap=True)
    found, number = result["differences"], 2 * result["num_prompts"]
    console.print(
        f"{_mark(not found)} greedy: {number - len(found)} of {number} texts of "
        f"{result['max_tokens']} tokens are plain decoding's, token by token"
    )
    for one in found[:1]:
        gap = "far" if one["gap"] is None else f"{one['gap']:.2g} nats"
        console.print(
            "     prompt {prompt}, {engine}, parts at token {place}: {plain_id} became "
            "{speculative_id}, which the target likes less by {0}".format(gap, **one)
        )
    p_value = result["p_value"]
    console.print(
        f"{_mark(p_value >= LEAST_P)} temperature 1: {result['num_samples']} texts, the next token "
        f"after {result['num_beginnings']} beginnings: p = {p_value:.3g} (at least {LEAST_P:g})"
    )
    speed = result["speed"]
    console.print(
        f"     speed, greedy, one request: {speed['tokens_per_s']:.0f} tokens/s, "
        f"{speed['ratio_to_plain']:.2f} times plain decoding; where all steps draft: acceptance "
        f"length {speed['acceptance_length']:.2f}, {speed['acceptance_rate']:.0%} accepted"
    )


def _mark(is_good: bool) -> str:
    return "[green]ok  [/]" if is_good else "[bold red]FAIL[/]"
