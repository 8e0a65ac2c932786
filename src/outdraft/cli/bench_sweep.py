"""`outdraft bench sweep`: chosen draft lengths against plain decoding and fixed ones."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from tqdm import tqdm

from outdraft.cli.bench_options import concurrencies, numbers
from outdraft.cli.command import Model, check_output, table_of, use_physical_cores, wide_console
from outdraft.cli.options import (
    EngineOptions,
    engine_config,
    parse_json_object,
    takes_options,
    with_embedded_network,
)
from outdraft.config.benchmarks import Dataset
from outdraft.config.engine import EngineConfig
from outdraft.config.fields import check_number, check_whole, flag
from outdraft.core.errors import ConfigError

SLACK = 0.03  # of the best variant's speed; what choosing may cost


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Variants to compare, and the length of the comparison."""

    concurrency: str = flag("Requests that run at once.", default="1,2,4,8,16,32", metavar="1,2,4")
    lengths: str = flag("Fixed numbers of drafts to compare with.", default="1,2,3,5,7")
    temperature: float = flag(default=0.0, min=0)
    min_rounds: int = flag("Fewest rounds of each level.", default=3)
    max_rounds: int = flag("Most rounds of each level.", default=12)
    tolerance: float = flag(
        "Rounds are added until the ratio is known as well, to either side.", default=0.02
    )
    synthetic_acceptance: str | None = flag(
        "Let coins decide what is accepted, with one of these chances a token for each request: "
        "for weights that mean nothing. Needs a temperature above 0.",
        metavar="0.5,0.8",
    )
    output_json: Path | None = flag("File for the result; a plot is written beside it.")

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
    from outdraft.bench.report import check_installed

    if options.output_json is not None:
        check_installed("matplotlib")
        check_output(options.output_json, "--output-json")
    base = engine_config(model, engine)
    configs = variants(
        base, _speculation(model, engine), numbers(options.lengths, "--lengths", int)
    )
    use_physical_cores(os.environ)
    from outdraft.bench.side_by_side import share_target
    from outdraft.bench.sweep import SweepPlan, level_report
    from outdraft.bench.sweep import sweep as measure
    from outdraft.bench.workloads import load_requests, num_distinct_prompts, repetition_notes
    from outdraft.core.sampling import SamplingParams
    from outdraft.models.modules import dtype_name

    plan = SweepPlan(
        levels=concurrencies(options.concurrency),
        min_rounds=options.min_rounds,
        max_rounds=options.max_rounds,
        tolerance=options.tolerance,
        acceptance=_chances(options.synthetic_acceptance),
    )
    models = share_target(configs)
    tokenizer = next(iter(models.values())).tokenizer
    requests = load_requests(dataset, plan.num_prompts, engine.seed or 0, tokenizer)
    params = SamplingParams(temperature=options.temperature, ignore_eos=True, detokenize=False)
    results: list[dict[str, Any]] = []
    with tqdm(desc="runs", unit="run", leave=False, disable=None) as bar:
        runs = measure(configs, models, requests, plan, params, lambda name: bar.update())
        for level in runs:
            results.append(level_report(level, plan))
            bar.write(line(results[-1]))
    whole = {
        "acceptance": "decided by coins" if plan.acceptance else "decided by the target",
        "synthetic_acceptance": plan.acceptance,
        "temperature": options.temperature,
        "speculation": {name: repr(config.speculation) for name, config in configs.items()},
        "levels": results,
        "notes": repetition_notes(num_distinct_prompts(requests), len(requests)),
    }
    show(whole)
    if options.output_json is not None:
        dtype = dtype_name(next(iter(models.values())).target.dtype)
        _write(whole | {"model_id": base.model, "dtype": dtype}, options.output_json)


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
    console.print(table_of((), ["at once", *levels[0]["variants"], *more], rows))
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


def _speculation(model: str | None, engine: EngineOptions) -> dict[str, Any]:
    text = engine.speculative_config
    values = {"method": "draft_model"} if text is None and model is None else None
    if text is not None:
        values = parse_json_object(text)
    if values is None:
        raise ConfigError("a sweep needs --speculative-config: it says what drafts")
    return with_embedded_network(values) if model is None else values


def _chances(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    values = numbers(text, "--synthetic-acceptance", float)
    for value in values:
        check_number("synthetic_acceptance", value, 0, 1)
    return tuple(values)


def _write(result: dict[str, Any], path: Path) -> None:
    from outdraft.bench.report import compute, environment, write_json

    write_json(path, result | {"environment": environment() | compute()})
    picture = path.with_suffix(".png")
    plot(result, picture)
    typer.echo(f"result: {path}, plot: {picture}")


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
        is_auto = name == "auto"
        axes.plot(
            xs,
            [speed / base for speed, base in zip(speeds, plain, strict=True)],
            marker="o",
            label=name,
            linewidth=2.5 if is_auto else 1,
            color="black" if is_auto else None,
        )
    title = f"tokens a second, times plain; acceptance {result['acceptance']}"
    by_concurrency(axes, xs, title)
    axes.legend(fontsize=8)
    save_figure(figure, path)
