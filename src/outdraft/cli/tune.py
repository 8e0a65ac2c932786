"""`outdraft tune`: the best way to draft for a model, on this machine and for this traffic."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from outdraft import assets
from outdraft.cli.bench_methods import TREE_LEVELS
from outdraft.cli.command import Model, check_output, progress, table_of, use_physical_cores
from outdraft.cli.options import (
    EngineOptions,
    concurrencies,
    engine_config,
    takes_options,
    with_embedded_network,
)
from outdraft.config.benchmarks import PROBE_LENGTH, Dataset
from outdraft.config.fields import check_choice, check_whole, flag
from outdraft.config.speculation import NETWORK_SOURCES
from outdraft.core.draft import DraftSource
from outdraft.core.errors import ConfigError

if TYPE_CHECKING:
    from outdraft.bench.sweep import LevelResult

LENGTHS = (2, 3, 5)  # of networks that draft as much in every step
REQUESTS = 4  # of each candidate in a round, if no more run at once
FIXED, PROBE = "always ", f"always {PROBE_LENGTH}: "  # what their names begin with


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """Candidates, and the traffic that they are tried with.

    Attributes:
        draft: A drafter: a directory or hub name, with METHOD= before it if it is no draft_model;
            repeatable; mtp: the layer of the target's own checkpoint. Default for the embedded
            model: its own.
        concurrency: Requests that run at once.
        rounds: Most rounds of candidates that are almost as fast as the best.
        output: File for `outdraft serve --config`.
    """

    draft: list[str] | None = flag(metavar="[METHOD=]PATH")
    concurrency: str = flag(default="1,8", metavar="1,8")
    temperature: float = flag(default=0.0, min=0)
    rounds: int = 5
    output: Path | None = flag("--output", "-o")

    def __post_init__(self) -> None:
        check_whole("rounds", self.rounds, 1, 1000)


@takes_options
def tune(
    model: Model = None, *, options: TuneOptions, dataset: Dataset, engine: EngineOptions
) -> None:
    """Find what drafts best for a model here: methods, shapes, lengths, quantised drafters.

    Prints a table and, where speculation does not pay, the reason. Writes a file that
    `outdraft serve --config` takes.
    """
    if engine.speculative_config is not None:
        raise ConfigError("tune chooses the --speculative-config: name drafters with --draft")
    check_output(options.output, "--output")
    levels = concurrencies(options.concurrency)
    base = engine_config(model, replace(engine, speculative_config="null"))
    tried = candidates(drafters(model, options.draft or ()))
    complete = with_embedded_network if model is None else dict[str, Any]
    use_physical_cores(os.environ)
    from outdraft.bench.side_by_side import PLAIN, share_target, variants
    from outdraft.bench.sweep import Sweep
    from outdraft.bench.tune import race
    from outdraft.bench.workloads import load_requests
    from outdraft.kernels.choose import machine_limits

    speculation = {name: complete(values) for name, values in tried.items()}
    configs = variants(base, {PLAIN: None} | speculation)
    left_out: dict[str, str] = {}
    models = share_target(configs, left_out)
    with progress("runs", unit="run") as bar:
        plan = Sweep(
            configs={name: configs[name] for name in models},
            models=models,
            temperature=options.temperature,
            levels=levels,
            least_requests=REQUESTS,
            min_rounds=min(2, options.rounds),
            max_rounds=options.rounds,
            on_run=lambda name: bar.update(),
        )
        tokenizer = models[PLAIN].tokenizer
        results = race(plan, load_requests(dataset, plan.num_prompts, engine.seed or 0, tokenizer))
    target = models[PLAIN].target
    limits = machine_limits(target.dtype) if target.device.type == "cpu" else None
    ridge = limits[1] / limits[0] if limits is not None else None
    for name, reason in left_out.items():
        typer.echo(f"left out: {name}: {reason}")
    found = {name: values for name, values in tried.items() if name in models}
    _conclude(model, found, results, 2 / target.dtype.itemsize, ridge, options)


def drafters(model: str | None, given: Sequence[str]) -> dict[str, str | None]:
    """Methods of networks and where they are; None: the embedded model's own.

    Raises:
        ConfigError: a method is none, or it is given twice.
    """
    if model is None and not given:
        return dict.fromkeys(("draft_model", *assets.available_heads()))
    found: dict[str, str | None] = {}
    methods = tuple(map(str, NETWORK_SOURCES))
    for text in given:
        before, separator, after = text.partition("=")
        method, path = (before, after) if separator else ("draft_model", text)
        if text == DraftSource.MTP:
            method, path = text, None
        check_choice("--draft METHOD=", method, methods)
        if method in found:
            raise ConfigError(f"--draft names two drafters of method {method!r}")
        found[method] = path
    return found


def candidates(networks: Mapping[str, str | None]) -> dict[str, dict[str, Any]]:
    """speculative_configs by name; those whose names begin with PROBE also explain."""
    found: dict[str, dict[str, Any]] = {}
    for method in ("suffix", "ngram"):
        found[method] = {"method": method}
        found[PROBE + method] = _always(found[method], PROBE_LENGTH)
    for method, path in networks.items():
        own = {"method": method} | ({} if path is None else {"model": path})
        found[method] = own
        found |= {f"{method}, {bits}": own | {"quantization": bits} for bits in ("int8", "int4")}
        found[f"{method}, tree"] = own | {"tree_levels": list(TREE_LEVELS)}
        if method == "draft_model":
            found["combined"] = own | {"method": "combined"}
        found |= {f"{FIXED}{length}: {method}": _always(own, length) for length in LENGTHS}
    return found


def _always(values: dict[str, Any], length: int) -> dict[str, Any]:
    return values | {"num_speculative_tokens": length, "control": "fixed"}


def _conclude(
    model: str | None,
    tried: Mapping[str, dict[str, Any]],
    results: Sequence["LevelResult"],
    row_intensity: float,
    ridge: float | None,
    options: TuneOptions,
) -> None:
    """Show everything, and write the best."""
    from outdraft.bench.tune import WORTH_IT, config_file, gain, level_gain, winner

    console = Console(highlight=False, soft_wrap=True)
    ranked = sorted(tried, key=lambda name: gain(results, name), reverse=True)
    levels = [f"{result.concurrency} at once" for result in results]
    rows: list[list[str]] = []
    for name in ranked:
        gains = [*(level_gain(result, name) for result in results), gain(results, name)]
        rows.append([name, *(f"{one:.2f}" for one in gains)])
    console.print("Times plain decoding's speed, median of the rounds:")
    console.print(table_of(["candidate", *levels, "all"], rows))
    for name in ranked:
        if name.startswith(PROBE):
            _explain(console, name, results, row_intensity, ridge)
    best = winner(results, ranked, [name for name in ranked if name.startswith(FIXED)])
    is_worth_it = gain(results, best) > 1 + WORTH_IT
    by_level = {result.concurrency: level_gain(result, best) for result in results}
    pays = [level for level, one in by_level.items() if one > 1 + WORTH_IT]
    loses = [level for level, one in by_level.items() if one < 1 - WORTH_IT]
    disable_above = max(pays) if pays and loses and max(pays) < min(loses) else None
    verdict = (
        f"{best}: {gain(results, best):.2f} times plain decoding"
        if is_worth_it
        else f"speculation does not pay: the best, {best}, gives {gain(results, best):.2f}"
    )
    console.print(verdict[0].upper() + verdict[1:] + ".", style="bold")
    if disable_above is not None:
        console.print(
            f"It pays up to {disable_above} requests at once and loses from {min(loses)} on, "
            "of the numbers that were measured."
        )
    if options.output is not None:
        chosen = tried[best] if is_worth_it else None
        text = config_file(model, chosen, disable_above if is_worth_it else None, [verdict])
        options.output.write_text(text, encoding="utf-8")
        typer.echo(f"outdraft serve --config {options.output}")


def _explain(
    console: Console,
    name: str,
    results: Sequence["LevelResult"],
    row_intensity: float,
    ridge: float | None,
) -> None:
    """Print costs and gains of fixed drafts, level by level, and the acceptance of break-even."""
    from outdraft.bench.side_by_side import PLAIN
    from outdraft.bench.tune import balance

    for result in results:
        stats, level = result.stats, result.concurrency
        found = balance(stats[PLAIN], stats[name], level, row_intensity, ridge)
        chance = found.break_even_chance
        even = "at no acceptance" if chance > 1 else f"at an acceptance of {chance:.0%}"
        console.print(
            f"{name}, {level} at once: a step takes {found.step:.2f} plain ones and brings "
            f"{found.length:.2f} tokens; it breaks even {even}. "
            f"{(found.reason or 'it pays').capitalize()}."
        )
