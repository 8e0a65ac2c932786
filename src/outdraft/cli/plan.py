"""`outdraft plan`: what speculation would bring on given hardware, without running anything."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outdraft.cli.bench_options import numbers
from outdraft.cli.command import Json, check_output
from outdraft.cli.options import takes_options
from outdraft.config.flags import flag
from outdraft.core.errors import ConfigError

if TYPE_CHECKING:
    from outdraft.planning.roofline import Setup

_DTYPES = "bf16, fp8, int8 or int4"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which networks, and what their weights are kept in."""

    draft: str = flag("As --target; or eagle3, medusa, ngram, suffix.", default="suffix")
    quantization: str | None = flag(f"The target's: {_DTYPES}. Default: as its config says.")
    draft_quantization: str | None = flag("The drafter's, likewise.")
    kv_cache_dtype: str = flag("For keys and values: bf16, fp8 or int8.", default="bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareOptions:
    """How the cards work together."""

    tp: int | None = flag("Cards that share the target. Default: all.", min=1)
    draft_tp: int | None = flag("Cards that share the drafter. Default: as --tp.", min=1)
    interconnect: str | None = flag(
        "nvlink, pcie, or pcie-no-p2p (through the host's memory). Default: the best that it has."
    )
    graphs: str = flag("CUDA graphs: full, piecewise (attention outside) or none.", default="full")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOptions:
    """Who asks, and how well drafts are accepted."""

    concurrency: str = flag("Running requests.", default="1,8,16,64")
    acceptance: str = flag(
        "Chance that a draft is accepted, the same at every position; or a list: by position, the "
        "share of steps in which that position was accepted, as engines report it.",
        default="0.7",
    )
    max_length: int = flag("Longest draft.", default=8, min=1, max=64)
    input_len: int = flag("Tokens of a mean prompt.", default=256, min=1)
    output_len: int = flag("Tokens of a mean output.", default=256, min=1)
    measured: list[str] | None = flag(
        "Calibrates: concurrency:length:TPOT in ms[:tokens a step], or a file of such; repeatable."
    )


@takes_options
def plan(
    *,
    target: Annotated[
        str, typer.Option(help="A name such as llama-3.3-70b, a config.json, or a folder.")
    ],
    hardware: Annotated[
        str, typer.Option(help="Such as 2xh100, rtx-4090, epyc-9554, or a JSON file of a card.")
    ],
    json_: Json = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw TPOT by concurrency into this file, PNG or SVG.")
    ] = None,
    models: ModelOptions,
    machine: HardwareOptions,
    traffic: TrafficOptions,
) -> None:
    """Predict TPOT, the best length of drafts and the memory before anything runs.

    A plan is a roofline with a launch floor and messages between cards, or it is calibrated by
    measured points; it always says which.
    """
    from outdraft.bench.report import check_installed, strict_json
    from outdraft.cli import plan_view
    from outdraft.planning.planner import Acceptance, make_plan
    from outdraft.planning.predictors import choose_predictor, read_points

    if plot is not None:
        check_installed("matplotlib")
        if plot.suffix.lower() not in (".png", ".svg"):
            raise ConfigError(f"--plot must be a file that ends in .png or .svg, got {str(plot)!r}")
        check_output(plot, "--plot")
    chances = Acceptance.parse(numbers(traffic.acceptance, "--acceptance", float))
    points = read_points(traffic.measured or (), chances.tokens(traffic.max_length))
    result = make_plan(
        choose_predictor(_setup(target, hardware, models, machine, traffic), points),
        chances,
        numbers(traffic.concurrency, "--concurrency", int),
        traffic.max_length,
    )
    if json_:
        typer.echo(strict_json(asdict(result)))
    else:
        plan_view.show(result)
    if plot is not None:
        plan_view.draw(result, plot)
        typer.echo(f"plot: {plot}", err=json_)


def _setup(
    target: str,
    hardware: str,
    models: ModelOptions,
    machine: HardwareOptions,
    traffic: TrafficOptions,
) -> "Setup":
    from outdraft.planning.hardware import find_machine
    from outdraft.planning.roofline import Setup, Workload
    from outdraft.planning.shapes import find_drafter, find_network

    network = find_network(target, models.quantization, models.kv_cache_dtype)
    cards = find_machine(hardware, machine.interconnect, machine.graphs)
    tp = machine.tp or cards.num_cards
    return Setup(
        target=network,
        drafter=find_drafter(models.draft, network, models.draft_quantization),
        machine=cards,
        tp=tp,
        draft_tp=machine.draft_tp or tp,
        workload=Workload(traffic.input_len, traffic.output_len),
    )
