"""`outdraft plan`: what speculation would bring on given hardware, without running anything."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from outdraft.cli.bench_options import numbers
from outdraft.cli.command import Json, check_output, table_of, wide_console
from outdraft.cli.options import takes_options
from outdraft.config.fields import flag
from outdraft.core.errors import ConfigError

if TYPE_CHECKING:
    from outdraft.planning.planner import Level, Memory, SpeculationPlan
    from outdraft.planning.roofline import Setup

_DTYPES = "bf16, fp8, int8 or int4"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Networks, and the dtypes of their weights."""

    draft: str = flag("As --target; or eagle3, medusa, ngram, suffix.", default="suffix")
    quantization: str | None = flag(f"The target's: {_DTYPES}. Default: as its config says.")
    draft_quantization: str | None = flag("The drafter's, likewise.")
    kv_cache_dtype: str = flag("For keys and values: bf16, fp8 or int8.", default="bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareOptions:
    """Cooperation of the cards."""

    tp: int | None = flag("Cards that share the target. Default: all.", min=1)
    draft_tp: int | None = flag("Cards that share the drafter. Default: as --tp.", min=1)
    interconnect: str | None = flag(
        "nvlink, pcie, or pcie-no-p2p (through the host's memory). Default: the best that it has."
    )
    graphs: str = flag("CUDA graphs: full, piecewise (attention outside) or none.", default="full")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOptions:
    """Requests, and the acceptance of drafts."""

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
        show(result)
    if plot is not None:
        draw(result, plot)
        typer.echo(f"plot: {plot}", err=json_)


def _setup(
    target: str,
    hardware: str,
    models: ModelOptions,
    machine: HardwareOptions,
    traffic: TrafficOptions,
) -> "Setup":
    from outdraft.planning.hardware import find_hardware
    from outdraft.planning.roofline import Setup, Workload
    from outdraft.planning.shapes import find_drafter, find_network

    network = find_network(target, models.quantization, models.kv_cache_dtype)
    cards = find_hardware(hardware, machine.interconnect, machine.graphs)
    tp = machine.tp or cards.num_cards
    return Setup(
        target=network,
        drafter=find_drafter(models.draft, network, models.draft_quantization),
        hardware=cards,
        tp=tp,
        draft_tp=machine.draft_tp or tp,
        workload=Workload(traffic.input_len, traffic.output_len),
    )


def show(plan: "SpeculationPlan") -> None:
    """The setup, a line for each concurrency, lengths, memory, and what follows."""
    console = wide_console(110)
    setup = plan.setup
    cards = f"tp {setup['tp']}, draft tp {setup['draft_tp']}, {setup['interconnect'] or 'no link'}"
    drafter = setup["drafter"] or "no network"
    console.print(
        f"{setup['target']} ({setup['target_dtype']}), {setup['method']} ({drafter}) on "
        f"{setup['hardware']}, {cards}; prompts of {setup['prompt_tokens']} tokens, outputs of "
        f"{setup['output_tokens']}",
        style="bold",
    )
    console.print(f"Mode: {plan.mode}. {plan.basis}")
    console.print(_levels(plan.levels), _steps(plan.levels), _lengths(plan.levels))
    console.print(
        "best: the length of drafts with the least time for a token; 0 is plain decoding. Bands "
        "hold most of what is measured, if the hardware is as described. break-even: the least "
        "chance of acceptance, the same at every position, at which drafts pay.",
        style="dim",
    )
    console.print(_memory(plan.memory))
    for line in _conclusions(plan):
        console.print(line)


def draw(plan: "SpeculationPlan", path: Path) -> None:
    """Write a picture: TPOT over concurrency, plain and with the best length, with their bands."""
    from matplotlib.figure import Figure

    from outdraft.bench.report import by_concurrency, save_figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    xs = [level.concurrency for level in plan.levels]
    for label, curve in (
        (
            "plain",
            [(v.plain_tpot_ms_low, v.plain_tpot_ms, v.plain_tpot_ms_high) for v in plan.levels],
        ),
        ("best length", [(v.tpot_ms_low, v.tpot_ms, v.tpot_ms_high) for v in plan.levels]),
    ):
        low, middle, high = zip(*curve, strict=True)
        axes.plot(xs, middle, marker="o", label=label)
        axes.fill_between(xs, low, high, alpha=0.2)
    for level in plan.levels:
        axes.annotate(str(level.best_length), (level.concurrency, level.tpot_ms))
    title = f"{plan.setup['target']}, {plan.setup['method']}; {plan.mode}"
    by_concurrency(axes, xs, title, " (numbers: best length)")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("TPOT, ms")
    axes.legend()
    save_figure(figure, path)


def _levels(levels: "list[Level]") -> Table:
    times = "TPOT ms\n(band)", "plain TPOT ms\n(band)", "against\nplain", "tokens/s"
    rows = [
        (
            str(level.concurrency),
            str(level.best_length),
            f"{level.tokens_a_step:.2f}",
            _band(level.tpot_ms, level.tpot_ms_low, level.tpot_ms_high),
            _band(level.plain_tpot_ms, level.plain_tpot_ms_low, level.plain_tpot_ms_high),
            f"{level.speedup:.2f}x",
            f"{level.tokens_per_s:,.0f}",
            "never" if (least := level.break_even_acceptance) is None else f"{least:.2f}",
            "yes" if level.fits else "NO",
        )
        for level in levels
    ]
    headings = ("requests", "best", "tokens\na step", *times, "break-\neven", "fits")
    return table_of((), headings, rows)


def _steps(levels: "list[Level]") -> Table:
    numbers = "requests", *levels[0].step_ms, "sum"
    rows = [
        (
            str(level.concurrency),
            *map(_digits, level.step_ms.values()),
            _digits(sum(level.step_ms.values())),
        )
        for level in levels
    ]
    return table_of((), numbers, rows, "A step of the best length, ms")


def _lengths(levels: "list[Level]") -> Table:
    lengths = map(str, range(len(levels[0].tpot_ms_by_length)))
    rows = [
        (
            str(level.concurrency),
            *(
                f"[bold]{_digits(ms)}[/]" if length == level.best_length else _digits(ms)
                for length, ms in enumerate(level.tpot_ms_by_length)
            ),
        )
        for level in levels
    ]
    return table_of((), ["requests", *lengths], rows, "TPOT ms by length")


def _band(middle: float, low: float, high: float) -> str:
    return f"{_digits(middle)} ({_digits(low)} to {_digits(high)})"


def _digits(ms: float) -> str:
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:,.0f}"


def _memory(memory: "Memory") -> str:
    if not memory.fits:
        return f"Memory: the weights need {-memory.kv_gib:.1f} GiB more than a card has to give."
    return (
        f"Memory of the fullest card, GiB: {memory.target_weights_gib:.1f} target, "
        f"{memory.drafter_weights_gib:.1f} drafter, {memory.kv_gib:.1f} keys and values "
        f"({memory.drafter_kv_share:.0%} the drafter's), "
        f"{memory.card_gib - memory.usable_gib:.1f} kept free. Room for {memory.max_tokens:,} "
        f"tokens: {memory.max_requests:,} requests."
    )


def _conclusions(plan: "SpeculationPlan") -> list[str]:
    most = plan.break_even_concurrency
    if most == 0:
        return ["Drafts do not pay here, even for one request."]
    if most is None:
        return ["Drafts pay at any concurrency that was tried."]
    return [f"Drafts pay up to {most} concurrent requests."]
