"""`outdraft replay`: ways to speculate, tried on requests that a server recorded."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outdraft.cli.bench_options import numbers
from outdraft.cli.command import Json
from outdraft.cli.options import json_object, takes_options, with_embedded_network
from outdraft.config.checks import check_whole
from outdraft.config.flags import flag
from outdraft.core.draft import MAX_DRAFTS
from outdraft.core.errors import ConfigError

if TYPE_CHECKING:
    from outdraft.config.speculation import SpeculationConfig
    from outdraft.control.costs import CostTable
    from outdraft.core.recorded import RecordedRequest
    from outdraft.planning.replay import Replayed, Traffic
    from outdraft.planning.replay_scores import Report

EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """What is tried."""

    speculative_config: list[str] | None = flag(
        "JSON as for serve; repeatable. Networks need no model unless --model measures them. "
        "Default: suffix, ngram, and the networks of the trace."
    )
    concurrency: int | None = flag(
        "So many texts run at once. Default: they come as they came.", min=1
    )
    lengths: str = flag("Fixed lengths beside the greatest.", default="1,2,3,5,7")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostOptions:
    """What steps take; without any, acceptance alone is told."""

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
    from outdraft.cli import replay_view
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
        replay_view.show(report)


def _report(
    requests: "list[RecordedRequest]", ways: ReplayOptions, prices: CostOptions
) -> "Report":
    import torch

    from outdraft.costs.table import read_table
    from outdraft.kernels.choose import AUTO, choose_kernels
    from outdraft.loading.methods import host_proposers
    from outdraft.planning.replay import Traffic
    from outdraft.planning.replay_scores import Report, plain_run, recorded_score, score

    kernels = choose_kernels(AUTO, torch.device("cpu"), torch.float32)
    traffic = Traffic(requests, ways.concurrency)
    lengths = numbers(ways.lengths, "--lengths", int)
    for length in lengths:
        check_whole("--lengths", length, 1, MAX_DRAFTS)
    told = None if prices.costs is None else read_table(prices.costs, f"--costs {prices.costs}")
    configs = _configs(requests, ways, prices)  # refused before anything is run
    plain = plain_run(traffic, None)
    return Report(
        recorded_score(requests),
        ways.concurrency,
        plain.cached_tokens,
        [
            score(
                traffic,
                config,
                lambda chosen: host_proposers(chosen.sources, kernels),
                _costs(traffic, given, prices, told),
                lengths,
            )
            for given, config in configs
        ],
    )


def _configs(
    requests: "list[RecordedRequest]", ways: ReplayOptions, prices: CostOptions
) -> "list[tuple[dict[str, Any], SpeculationConfig]]":
    """What was asked for, as JSON and understood."""
    from outdraft.config.speculation_json import parse_speculative_config

    given = [
        json_object(text, "--speculative-config") for text in ways.speculative_config or ()
    ] or _defaults(requests, prices)
    if prices.model == EMBEDDED:
        given = [with_embedded_network(one) for one in given]
    elif prices.model is None:
        given = [_with_any_network(one) for one in given]
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


def _with_any_network(given: dict[str, Any]) -> dict[str, Any]:
    """Networks are not loaded, so their names do not matter."""
    from outdraft.config.speculation import NETWORK_SOURCES, OWN_SOURCES

    if isinstance(sources := given.get("sources"), list):
        listed: list[Any] = sources
        named = [_with_any_network(one) if isinstance(one, dict) else one for one in listed]
        return {**given, "sources": named}
    method = given.get("method")
    is_named = method in NETWORK_SOURCES and method not in OWN_SOURCES
    if is_named and given.get("model") is None:
        return {**given, "model": "recorded"}
    return given


def _costs(
    traffic: "Traffic", given: dict[str, Any], prices: CostOptions, told: "CostTable | None"
) -> "tuple[CostTable, Replayed] | None":
    """`told`: the table of --costs."""
    from outdraft.planning.replay import Replayed
    from outdraft.planning.replay_scores import plain_run

    table = told
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
