"""`outdraft replay`: ways to speculate, tried on requests that a server recorded."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outdraft.cli.bench_options import numbers
from outdraft.cli.command import Json, table_of, wide_console
from outdraft.cli.options import json_object, takes_options, with_embedded_network, with_networks
from outdraft.config.fields import check_whole, flag
from outdraft.core.draft import MAX_DRAFTS
from outdraft.core.errors import ConfigError

if TYPE_CHECKING:
    from outdraft.config.speculation import SpeculationConfig
    from outdraft.control.costs import CostTable
    from outdraft.core.recorded import RecordedRequest
    from outdraft.planning.replay import RecordedTraffic, Replayed
    from outdraft.planning.replay_scores import Recorded, ReplayReport, RunScore, Score, SourceScore

EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Configurations to try."""

    speculative_config: list[str] | None = flag(
        "JSON as for serve; repeatable. Networks need no model unless --model measures them. "
        "Default: suffix, ngram, and the networks of the trace."
    )
    concurrency: int | None = flag(
        "Texts that run at once. Default: they come as they came.", min=1
    )
    lengths: str = flag("Fixed lengths beside the greatest.", default="1,2,3,5,7")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostOptions:
    """Costs of steps; without any, acceptance alone is shown."""

    costs: Path | None = flag("File with a table of costs.", exists=True, dir_okay=False)
    model: str | None = flag(
        "Directory or hub name of a checkpoint, or embedded: its table is measured on this "
        "machine, or was before."
    )


@takes_options
def replay(
    trace: Annotated[
        Path, typer.Argument(help="File that `outdraft serve --record-trace` has written.")
    ],
    *,
    json_: Json = False,
    ways: ReplayOptions,
    prices: CostOptions,
) -> None:
    """Score ways to speculate on requests that a server recorded, without its model.

    Drafts of suffix, n-grams and predictions are made anew and compared with what came. Networks
    are as lucky as they were. With a table of costs, plain decoding, fixed lengths and the
    controller run the same requests against the clock.
    """
    from outdraft.bench.report import strict_json
    from outdraft.core.recorded import read_requests

    if prices.costs is not None and prices.model is not None:
        raise ConfigError("--costs and --model exclude each other")
    requests, is_whole = read_requests(trace)
    if not is_whole:
        typer.echo(f"note: the last line of {trace} is cut short and left out", err=True)
    report = _report(requests, ways, prices)
    if json_:
        typer.echo(strict_json(asdict(report)))
    else:
        show(report)


def _report(
    requests: "list[RecordedRequest]", ways: ReplayOptions, prices: CostOptions
) -> "ReplayReport":
    import torch

    from outdraft.costs.table import read_table
    from outdraft.kernels.choose import AUTO, choose_kernels
    from outdraft.loading.methods import host_proposers
    from outdraft.planning.replay import RecordedTraffic
    from outdraft.planning.replay_scores import ReplayReport, plain_run, recorded_score, score

    kernels = choose_kernels(AUTO, torch.device("cpu"), torch.float32)
    traffic = RecordedTraffic(requests, ways.concurrency)
    lengths = numbers(ways.lengths, "--lengths", int)
    for length in lengths:
        check_whole("--lengths", length, 1, MAX_DRAFTS)
    table = None if prices.costs is None else read_table(prices.costs, f"--costs {prices.costs}")
    configs = _configs(requests, ways, prices)  # refused before anything is run
    plain = plain_run(traffic, None)
    return ReplayReport(
        recorded_score(requests),
        ways.concurrency,
        plain.cached_tokens,
        [
            score(
                traffic,
                config,
                lambda chosen: host_proposers(chosen.sources, kernels),
                _costs(traffic, given, prices, table),
                lengths,
            )
            for given, config in configs
        ],
    )


def _configs(
    requests: "list[RecordedRequest]", ways: ReplayOptions, prices: CostOptions
) -> "list[tuple[dict[str, Any], SpeculationConfig]]":
    """Configurations that were asked for, each as JSON and parsed."""
    from outdraft.config.speculation import NETWORK_SOURCES, OWN_SOURCES
    from outdraft.config.speculation_json import parse_speculative_config

    def any_network(method: Any) -> str | None:
        """Networks are not loaded, so their names do not matter."""
        is_named = method in NETWORK_SOURCES and method not in OWN_SOURCES
        return "recorded" if is_named else None

    given = [
        json_object(text, "--speculative-config") for text in ways.speculative_config or ()
    ] or _defaults(requests, prices)
    if prices.model == EMBEDDED:
        given = [with_embedded_network(one) for one in given]
    elif prices.model is None:
        given = [with_networks(one, any_network) for one in given]
    return [(one, parse_speculative_config(one)) for one in given]


def _defaults(requests: "list[RecordedRequest]", prices: CostOptions) -> list[dict[str, Any]]:
    from outdraft.planning.recorded_acceptance import recorded_networks

    chosen: list[dict[str, Any]] = [{"method": "suffix"}, {"method": "ngram"}]
    if prices.model in (None, EMBEDDED):
        for source in recorded_networks(requests):
            tree = next((one.tree for one in requests if one.tree), None)
            shape = {"tree_levels": tree} if tree is not None else {}
            chosen.append({"method": str(source), **shape})
    return chosen


def _costs(
    traffic: "RecordedTraffic",
    given: dict[str, Any],
    prices: CostOptions,
    table: "CostTable | None",
) -> "tuple[CostTable, Replayed] | None":
    """The table for a configuration, and plain decoding by it. `table`: that of --costs."""
    from outdraft.planning.replay import Replayed
    from outdraft.planning.replay_scores import plain_run

    if prices.model is not None:
        table = _measured(prices.model, given)
    if table is None:
        return None
    plain: Replayed = plain_run(traffic, table)
    return table, plain


def _measured(model: str, given: dict[str, Any]) -> "CostTable":
    """The table of an engine with this configuration."""
    from outdraft import assets
    from outdraft.config.engine import EngineConfig
    from outdraft.control.controller import Controller
    from outdraft.engine.build import build_engine

    path = str(assets.target_path()) if model == EMBEDDED else model
    speculation = {**given, "control": "adaptive"}
    config = EngineConfig.from_options(model=path, speculative_config=speculation)
    engine, _ = build_engine(config)
    control = engine.drafting.control
    assert isinstance(control, Controller)
    return control.costs.table


def show(report: "ReplayReport") -> None:
    """The trace, then each configuration."""
    console = wide_console(100)
    recorded = report.recorded
    console.print(_facts(recorded), style="bold")
    pace = "as they came" if report.concurrency is None else f"{report.concurrency} at once"
    console.print(
        f"Replayed {pace}. The prefix cache supplied {recorded.cached_tokens:,} tokens of prompts, "
        f"in the replay {report.replayed_cached_tokens:,}."
    )
    if recorded.sources:
        console.print(_sources("As recorded", recorded.sources))
    for source, chances in recorded.level_chances.items():
        console.print(f"{source}, acceptance by position: {_chances(chances)}")
    for one in report.scores:
        _show_score(console, one)
    if not any(one.runs for one in report.scores):
        console.print("Without --costs or --model the time of steps is unknown.", style="dim")


def _facts(recorded: "Recorded") -> str:
    return (
        f"{recorded.num_requests:,} requests in {recorded.span_s:,.1f} s, "
        f"{recorded.num_texts:,} texts ({recorded.num_aborted:,} aborted), "
        f"{recorded.prompt_tokens:,} tokens of prompts, {recorded.output_tokens:,} of outputs"
    )


def _show_score(console: Console, one: "Score") -> None:
    if one.sources:
        console.print(_sources(f"{one.method}, at its greatest length", one.sources))
    else:
        console.print(f"{one.method}: no drafts were found")
    if one.runs:
        console.print(_runs(one.method, one.runs))


def _sources(title: str, scores: "Sequence[SourceScore]") -> Table:
    numbers = "drafts", "drafted", "accepted", "rate", "acceptance\nlength"
    rows = [
        (
            one.source,
            f"{one.num_drafts:,}",
            f"{one.drafted:,}",
            f"{one.accepted:,}",
            f"{one.acceptance_rate:.2f}",
            f"{one.acceptance_length:.2f}",
            one.basis,
        )
        for one in scores
    ]
    return table_of(["source"], numbers, rows, title, ["basis"])


def _runs(method: str, runs: "Sequence[RunScore]") -> Table:
    numbers = "tokens/s", "TPOT ms", "against\nplain", "acceptance\nlength", "drafts\na token"
    rows = [
        (
            run.name,
            f"{run.tokens_per_s:,.1f}",
            "-" if run.tpot_ms is None else f"{run.tpot_ms:.3f}",
            f"{run.against_plain:.3f}x",
            f"{run.acceptance_length:.2f}",
            f"{run.drafts_per_token:.2f}",
        )
        for run in runs
    ]
    return table_of(["lengths"], numbers, rows, f"{method}, predicted")


def _chances(chances: Sequence[float]) -> str:
    return " ".join(f"{chance:.2f}" for chance in chances)
