"""`outdraft replay`: ways to speculate, tried on requests that a server recorded."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outdraft.cli.command import Json, cells_of, table_of, wide_console
from outdraft.cli.options import (
    numbers,
    takes_options,
    with_embedded_network,
    with_networks,
)
from outdraft.config.fields import check_whole, flag, json_object
from outdraft.core.draft import MAX_DRAFTS
from outdraft.core.errors import ConfigError

if TYPE_CHECKING:
    from outdraft.config.speculation import SpeculationConfig
    from outdraft.control.costs import CostTable
    from outdraft.core.recorded import RecordedRequest

EMBEDDED = "embedded"
SOURCES = {  # columns of their table
    "source": "{source}",
    "drafts": "{num_drafts:,}",
    "drafted": "{drafted:,}",
    "accepted": "{accepted:,}",
    "rate": "{acceptance_rate:.2f}",
    "acceptance\nlength": "{acceptance_length:.2f}",
    "basis": "{basis}",
}
RUNS = {
    "lengths": "{name}",
    "tokens/s": "{tokens_per_s:,.1f}",
    "TPOT ms": "{tpot_ms}",
    "against\nplain": "{against_plain:.3f}x",
    "acceptance\nlength": "{acceptance_length:.2f}",
    "drafts\na token": "{drafts_per_token:.2f}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Configurations to try, and costs of steps; without any, acceptance alone is shown.

    Replay:
        speculative_config: JSON as for serve; repeatable. Networks need no model unless --model
            measures them. Default: suffix, ngram, and the networks of the trace.
        concurrency: Texts that run at once. Default: they come as they came.
        lengths: Fixed lengths beside the greatest.

    Cost:
        costs: File with a table of costs.
        model: Directory or hub name of a checkpoint, or embedded: its table is measured on this
            machine, or was before.
    """

    speculative_config: list[str] | None = None
    concurrency: int | None = flag(min=1)
    lengths: str = "1,2,3,5,7"
    costs: Path | None = flag(exists=True, dir_okay=False)
    model: str | None = None


@takes_options
def replay(
    trace: Annotated[Path, typer.Argument()],
    *,
    json_: Json = False,
    options: ReplayOptions,
) -> None:
    """Score ways to speculate on requests that a server recorded, without its model.

    Drafts of suffix, n-grams and predictions are made anew and compared with what came. Networks
    are as lucky as they were. With a table of costs, plain decoding, fixed lengths and the
    controller run the same requests against the clock.

    Args:
        trace: File that `outdraft serve --record-trace` has written.
    """
    import torch

    from outdraft.bench.report import strict_json
    from outdraft.core.recorded import read_requests
    from outdraft.costs.table import read_table
    from outdraft.kernels.choose import AUTO, choose_kernels
    from outdraft.loading.methods import host_proposers
    from outdraft.planning.replay_scores import plain_run, recorded_score, score

    if options.costs is not None and options.model is not None:
        raise ConfigError("--costs and --model exclude each other")
    requests, is_whole = read_requests(trace)
    if not is_whole:
        typer.echo(f"note: the last line of {trace} is cut short and left out", err=True)
    kernels = choose_kernels(AUTO, torch.device("cpu"), torch.float32)
    lengths = numbers(options.lengths, "--lengths", int)
    for length in lengths:
        check_whole("--lengths", length, 1, MAX_DRAFTS)
    table = None if options.costs is None else read_table(options.costs, f"--costs {options.costs}")
    configs = _configs(requests, options)  # refused before anything is run
    report = {
        "recorded": recorded_score(requests),
        "concurrency": options.concurrency,
        "replayed_cached_tokens": plain_run(requests, options.concurrency, None).cached_tokens,
        "scores": [
            score(
                requests,
                options.concurrency,
                config,
                lambda chosen: host_proposers(chosen.sources, kernels),
                table if options.model is None else _measured(options.model, given),
                lengths,
            )
            for given, config in configs
        ],
    }
    if json_:
        typer.echo(strict_json(report))
    else:
        show(report)


def _configs(
    requests: "list[RecordedRequest]", options: ReplayOptions
) -> "list[tuple[dict[str, Any], SpeculationConfig]]":
    """Configurations that were asked for, each as JSON and parsed."""
    from outdraft.config.speculation import NETWORK_SOURCES, OWN_SOURCES, parse_speculative_config

    def any_network(method: Any) -> str | None:
        """Networks are not loaded, so their names do not matter."""
        is_named = method in NETWORK_SOURCES and method not in OWN_SOURCES
        return "recorded" if is_named else None

    given = [
        json_object(text, "--speculative-config") for text in options.speculative_config or ()
    ] or _defaults(requests, options)
    if options.model == EMBEDDED:
        given = [with_embedded_network(one) for one in given]
    elif options.model is None:
        given = [with_networks(one, any_network) for one in given]
    return [(one, parse_speculative_config(one)) for one in given]


def _defaults(requests: "list[RecordedRequest]", options: ReplayOptions) -> list[dict[str, Any]]:
    from outdraft.planning.recorded_acceptance import recorded_networks

    sources = recorded_networks(requests) if options.model in (None, EMBEDDED) else []
    tree = next((one.tree for one in requests if one.tree), None)
    shape = {} if tree is None else {"tree_levels": tree}
    networks = [{"method": str(source), **shape} for source in sources]
    return [{"method": "suffix"}, {"method": "ngram"}, *networks]


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


def show(report: dict[str, Any]) -> None:
    """The trace, then each configuration."""
    console = wide_console(100)
    recorded, concurrency = report["recorded"], report["concurrency"]
    console.print(
        "{num_requests:,} requests in {span_s:,.1f} s, {num_texts:,} texts ({num_aborted:,} "
        "aborted), {prompt_tokens:,} tokens of prompts, {output_tokens:,} of outputs".format(
            **recorded
        ),
        style="bold",
    )
    pace = "as they came" if concurrency is None else f"{concurrency} at once"
    console.print(
        f"Replayed {pace}. The prefix cache supplied {recorded['cached_tokens']:,} tokens of "
        f"prompts, in the replay {report['replayed_cached_tokens']:,}."
    )
    if recorded["sources"]:
        console.print(table_of(SOURCES, cells_of(recorded["sources"], SOURCES), "As recorded"))
    for source, chances in recorded["level_chances"].items():
        listed = " ".join(f"{chance:.2f}" for chance in chances)
        console.print(f"{source}, acceptance by position: {listed}")
    for one in report["scores"]:
        method, sources = one["method"], one["sources"]
        tpots = [run["tpot_ms"] for run in one["runs"]]
        shown = ["-" if tpot_ms is None else f"{tpot_ms:.3f}" for tpot_ms in tpots]
        runs = [run | {"tpot_ms": tpot} for run, tpot in zip(one["runs"], shown, strict=True)]
        if sources:
            title = f"{method}, at its greatest length"
            console.print(table_of(SOURCES, cells_of(sources, SOURCES), title))
        else:
            console.print(f"{method}: no drafts were found")
        if runs:
            console.print(table_of(RUNS, cells_of(runs, RUNS), f"{method}, predicted"))
    if not any(one["runs"] for one in report["scores"]):
        console.print("Without --costs or --model the time of steps is unknown.", style="dim")
