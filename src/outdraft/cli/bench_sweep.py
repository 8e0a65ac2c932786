"""`outdraft bench sweep`: chosen draft lengths against plain decoding and fixed ones."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from outdraft.cli.command import (
    Model,
    check_output,
    progress,
    table_of,
    use_physical_cores,
    wide_console,
)
from outdraft.cli.options import (
    EngineOptions,
    concurrencies,
    engine_config,
    numbers,
    speculative_config,
    takes_options,
)
from outdraft.config.benchmarks import Dataset
from outdraft.config.engine import EngineConfig
from outdraft.config.fields import check_number, check_whole, flag
from outdraft.core.errors import ConfigError

SLACK = 0.03  # of the best variant's speed; what choosing may cost


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Variants to compare, and the length of the comparison.

    Attributes:
        concurrency: Requests that run at once.
        lengths: Fixed numbers of drafts to compare with.
        min_rounds: Fewest rounds of each level.
        max_rounds: Most rounds of each level.
        tolerance: Rounds are added until the ratio is known as well, to either side.
        synthetic_acceptance: Let coins decide what is accepted, with one of these chances a token
            for each request: for weights that mean nothing. Needs a temperature above 0.
        output_json: File for the result; a plot is written beside it.
    """

    concurrency: str = flag(default="1,2,4,8,16,32", metavar="1,2,4")
    lengths: str = "1,2,3,5,7"
    temperature: float = flag(default=0.0, min=0)
    min_rounds: int = 3
    max_rounds: int = 12
    tolerance: float = 0.02
    synthetic_acceptance: str | None = flag(metavar="0.5,0.8")
    output_json: Path | None = None

    def __post_init__(self) -> None:
        check_whole("max_rounds", self.max_rounds, 1, 1000)
        check_whole("min_rounds", self.min_rounds, 1, self.max_rounds)
        check_number("tolerance", self.tolerance, 0.001, 1)
        if self.synthetic_acceptance is not None and self.temperature == 0:
            raise ConfigError("--synthetic-acceptance needs a --temperature above 0")


@takes_options
def sweep(
    model: Model = None, *, options: SweepOptions, dataset: Dataset, engine: EngineOptions
) -> None:
    """Compare speculation that chooses its lengths with plain decoding and with fixed lengths.

    All variants share the models and complete the same prompts in turn, other ones at each
    concurrency. A ratio is the median of the rounds; more are added until it is known well enough.
    Requests generate half of their number of tokens up to all of it, so that they do not begin and
    end together.
    """
    from outdraft.bench.report import check_installed, compute, environment, write_json

    if options.output_json is not None:
        check_installed("matplotlib")
        check_output(options.output_json, "--output-json")
    base = engine_config(model, engine)
    default = {"method": "draft_model"} if model is None else None
    speculation = speculative_config(engine.speculative_config, model, default)
    if speculation is None:
        raise ConfigError("a sweep needs --speculative-config: it says what drafts")
    configs = variants(base, speculation, numbers(options.lengths, "--lengths", int))
    use_physical_cores(os.environ)
    from outdraft.bench.side_by_side import PLAIN, share_target
    from outdraft.bench.sweep import Sweep, level_report
    from outdraft.bench.workloads import load_requests, num_distinct_prompts, repetition_notes
    from outdraft.models.modules import dtype_name

    levels, chances = concurrencies(options.concurrency), _chances(options.synthetic_acceptance)
    results: list[dict[str, Any]] = []
    with progress("runs", unit="run") as bar:
        plan = Sweep(
            configs=configs,
            models=share_target(configs),
            temperature=options.temperature,
            levels=levels,
            min_rounds=options.min_rounds,
            max_rounds=options.max_rounds,
            tolerance=options.tolerance,
            acceptance=chances,
            on_run=lambda name: bar.update(),
        )
        first = plan.models[PLAIN]
        requests = load_requests(dataset, plan.num_prompts, engine.seed or 0, first.tokenizer)
        for level in plan.measure(requests):
            results.append(level_report(level, plan.tolerance))
            bar.write(line(results[-1]))
    whole = {
        "acceptance": "decided by coins" if chances else "decided by the target",
        "synthetic_acceptance": chances,
        "temperature": options.temperature,
        "speculation": {name: repr(config.speculation) for name, config in configs.items()},
        "levels": results,
        "notes": repetition_notes(num_distinct_prompts(requests), len(requests)),
    }
    show(whole)
    if (path := options.output_json) is not None:
        whole |= {"model_id": base.model, "dtype": dtype_name(first.target.dtype)}
        write_json(path, whole | {"environment": environment() | compute()})
        plot(whole, path.with_suffix(".png"))
        typer.echo(f"result: {path}, plot: {path.with_suffix('.png')}")


def variants(
    base: EngineConfig, speculation: dict[str, Any], lengths: list[int]
) -> dict[str, EngineConfig]:
    """By name: plain decoding, each fixed length, and lengths that are chosen.

    Prompts are not cached, and suffix lookup remembers no finished text: rounds repeat prompts.

    Raises:
        ConfigError: a length is not possible.
    """
    from outdraft.bench import side_by_side
    from outdraft.bench.sweep import CHOSEN

    if speculation.get("method") in ("suffix", "combined"):
        speculation = {"suffix_decoding_max_cached_requests": 0} | speculation
    fixed = {
        str(length): speculation | {"num_speculative_tokens": length, "control": "fixed"}
        for length in lengths
    }
    values = {side_by_side.PLAIN: None} | fixed | {CHOSEN: speculation}
    return side_by_side.variants(base, values)


def _chances(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    values = numbers(text, "--synthetic-acceptance", float)
    for value in values:
        check_number("synthetic_acceptance", value, 0, 1)
    return tuple(values)


def line(level: dict[str, Any]) -> str:
    """A level's result while others are measured."""
    median, interval = _with_interval(level).split(" ", 1)
    return (
        f"{level['concurrency']:>3} at once: {median} times {level['best']} {interval}, "
        f"{_split_half(level)} by halves, {level['num_rounds']} rounds"
    )


def show(result: dict[str, Any]) -> None:
    """The table, and whether choosing kept what it promises."""
    console = wide_console(110)
    console.print(f"Acceptance is {result['acceptance']}. Tokens a second:", style="bold")
    levels = result["levels"]
    more = "drafts\na step", "best", "auto / best", "by halves"
    rows = [
        (
            str(level["concurrency"]),
            *(f"{one['tokens_per_s']:.0f}" for one in level["variants"].values()),
            f"{level['variants']['auto']['draft_tokens_per_step']:.2f}",
            level["best"],
            _with_interval(level),
            _split_half(level),
        )
        for level in levels
    ]
    console.print(table_of(["at once", *levels[0]["variants"], *more], rows))
    console.print("By halves: one half of the rounds names the best, the other measures it.")
    for note in result["notes"]:
        console.print(f"note: {note}", style="dim")
    slow = [str(one["concurrency"]) for one in levels if one["ratio_to_best"]["median"] < 1 - SLACK]
    if slow:
        console.print(f"[bold red]More than {SLACK:.0%} below the best at {', '.join(slow)}.[/]")
    else:
        console.print(f"At no level more than {SLACK:.0%} below the best of the others.")


def _with_interval(level: dict[str, Any]) -> str:
    """The ratio to the best: "median (low to high)"."""
    ratio = level["ratio_to_best"]
    return f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"


def _split_half(level: dict[str, Any]) -> str:
    """Format the ratio by halves; "-": too few rounds."""
    ratio = level["split_half_ratio"]
    return "-" if ratio is None else f"{ratio:.3f}"


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw each variant's speed as a multiple of plain decoding's, over concurrency."""
    from matplotlib.figure import Figure

    from outdraft.bench.report import by_concurrency, save_figure

    levels = result["levels"]
    xs = [level["concurrency"] for level in levels]
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    for name in levels[0]["variants"]:
        speeds = [level["variants"][name]["tokens_per_s"] for level in levels]
        plain = [level["variants"]["plain"]["tokens_per_s"] for level in levels]
        ratios = [speed / base for speed, base in zip(speeds, plain, strict=True)]
        width, color = (2.5, "black") if name == "auto" else (1, None)
        axes.plot(xs, ratios, marker="o", label=name, linewidth=width, color=color)
    title = f"tokens a second, times plain; acceptance {result['acceptance']}"
    by_concurrency(axes, xs, title)
    axes.legend(fontsize=8)
    save_figure(figure, path)
