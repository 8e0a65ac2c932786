"""`outdraft plan`: what speculation would bring on given hardware, without running anything."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from outdraft.cli.command import Json, cells_of, check_output, table_of, wide_console
from outdraft.cli.options import numbers, takes_options
from outdraft.config.fields import flag
from outdraft.core.errors import ConfigError

LEVELS = {  # columns of their table
    "requests": "{concurrency}",
    "best": "{best_length}",
    "tokens\na step": "{tokens_a_step:.2f}",
    "TPOT ms\n(band)": "{band}",
    "plain TPOT ms\n(band)": "{plain_band}",
    "against\nplain": "{speedup:.2f}x",
    "tokens/s": "{tokens_per_s:,.0f}",
    "break-\neven": "{break_even}",
    "fits": "{has_room}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Networks, cards and requests.

    Model:
        draft: As --target; or eagle3, medusa, ngram, suffix.
        quantization: The target's: bf16, fp8, int8 or int4. Default: as its config says.
        draft_quantization: The drafter's, likewise.
        kv_cache_dtype: For keys and values: bf16, fp8 or int8.

    Hardware:
        tp: Cards that share the target. Default: all.
        draft_tp: Cards that share the drafter. Default: as --tp.
        interconnect: nvlink, pcie, or pcie-no-p2p (through the host's memory). Default: the best
            that it has.
        graphs: CUDA graphs: full, piecewise (attention outside) or none.

    Traffic:
        concurrency: Running requests.
        acceptance: Chance that a draft is accepted, the same at every position; or a list: by
            position, the share of steps in which that position was accepted, as engines report it.
        max_length: Longest draft.
        input_len: Tokens of a mean prompt.
        output_len: Tokens of a mean output.
        measured: Calibrates: concurrency:length:TPOT in ms[:tokens a step], or a file of such;
            repeatable.
    """

    draft: str = "suffix"
    quantization: str | None = None
    draft_quantization: str | None = None
    kv_cache_dtype: str = "bf16"
    tp: int | None = flag(min=1)
    draft_tp: int | None = flag(min=1)
    interconnect: str | None = None
    graphs: str = "full"
    concurrency: str = "1,8,16,64"
    acceptance: str = "0.7"
    max_length: int = flag(default=8, min=1, max=64)
    input_len: int = flag(default=256, min=1)
    output_len: int = flag(default=256, min=1)
    measured: list[str] | None = None


@takes_options
def plan(
    *,
    target: str,
    hardware: str,
    json_: Json = False,
    plot: Path | None = None,
    options: PlanOptions,
) -> None:
    """Predict TPOT, the best length of drafts and the memory before anything runs.

    A plan is a roofline with a launch floor and messages between cards, or it is calibrated by
    measured points; it always says which.

    Args:
        target: A name such as llama-3.3-70b, a config.json, or a folder.
        hardware: Such as 2xh100, rtx-4090, epyc-9554, or a JSON file of a card.
        plot: Draw TPOT by concurrency into this file, PNG or SVG.
    """
    from outdraft.bench.report import check_installed, strict_json
    from outdraft.planning.hardware import find_hardware
    from outdraft.planning.planner import make_plan, tokens_by_length
    from outdraft.planning.shapes import find_drafter, find_network
    from outdraft.planning.step_time import Setup, choose_predictor, read_points

    if plot is not None:
        check_installed("matplotlib")
        if plot.suffix.lower() not in (".png", ".svg"):
            raise ConfigError(f"--plot must be a file that ends in .png or .svg, got {str(plot)!r}")
        check_output(plot, "--plot")
    chances = numbers(options.acceptance, "--acceptance", float)
    tokens_of = tokens_by_length(chances, options.max_length)
    points = read_points(options.measured or (), tokens_of)
    network = find_network(target, options.quantization, options.kv_cache_dtype)
    cards = find_hardware(hardware, options.interconnect, options.graphs)
    tp = options.tp or cards.num_cards
    method, drafter = find_drafter(options.draft, network, options.draft_quantization)
    setup = Setup(
        target=network,
        method=method,
        drafter=drafter,
        hardware=cards,
        tp=tp,
        draft_tp=options.draft_tp or tp,
        prompt_tokens=options.input_len,
        output_tokens=options.output_len,
    )
    concurrencies = numbers(options.concurrency, "--concurrency", int)
    result = make_plan(choose_predictor(setup, points), tokens_of, concurrencies)
    if json_:
        typer.echo(strict_json(result))
    else:
        show(result)
    if plot is not None:
        draw(result, plot)
        typer.echo(f"plot: {plot}", err=json_)


def show(plan: dict[str, Any]) -> None:
    """The setup, a line for each concurrency, lengths, memory, and what follows."""
    console = wide_console(110)
    setup, levels = plan["setup"], plan["levels"]
    cards = f"tp {setup['tp']}, draft tp {setup['draft_tp']}, {setup['interconnect'] or 'no link'}"
    drafter = setup["drafter"] or "no network"
    console.print(
        f"{setup['target']} ({setup['target_dtype']}), {setup['method']} ({drafter}) on "
        f"{setup['hardware']}, {cards}; prompts of {setup['prompt_tokens']} tokens, outputs of "
        f"{setup['output_tokens']}",
        style="bold",
    )
    console.print(f"Mode: {plan['mode']}. {plan['basis']}")
    table = table_of(LEVELS, cells_of(map(_cells, levels), LEVELS))
    console.print(table, _steps(levels), _lengths(levels))
    console.print(
        "best: the length of drafts with the least time for a token; 0 is plain decoding. Bands "
        "hold most of what is measured, if the hardware is as described. break-even: the least "
        "chance of acceptance, the same at every position, at which drafts pay.",
        style="dim",
    )
    console.print(_memory(plan["memory"]))
    most = plan["break_even_concurrency"]
    if most == 0:
        console.print("Drafts do not pay here, even for one request.")
    elif most is None:
        console.print("Drafts pay at any concurrency that was tried.")
    else:
        console.print(f"Drafts pay up to {most} concurrent requests.")


def draw(plan: dict[str, Any], path: Path) -> None:
    """Write a picture: TPOT over concurrency, plain and with the best length, with their bands."""
    from matplotlib.figure import Figure

    from outdraft.bench.report import by_concurrency, save_figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    levels = plan["levels"]
    xs = [level["concurrency"] for level in levels]
    for label, name in (("plain", "plain_tpot_ms"), ("best length", "tpot_ms")):
        low, middle, high = (
            [level[name + end] for level in levels] for end in ("_low", "", "_high")
        )
        axes.plot(xs, middle, marker="o", label=label)
        axes.fill_between(xs, low, high, alpha=0.2)
    for level in levels:
        axes.annotate(str(level["best_length"]), (level["concurrency"], level["tpot_ms"]))
    title = f"{plan['setup']['target']}, {plan['setup']['method']}; {plan['mode']}"
    by_concurrency(axes, xs, title, " (numbers: best length)")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("TPOT, ms")
    axes.legend()
    save_figure(figure, path)


def _cells(level: dict[str, Any]) -> dict[str, Any]:
    """A level's fields, and those that LEVELS writes otherwise."""
    least = level["break_even_acceptance"]
    return level | {
        "band": _band(level, "tpot_ms"),
        "plain_band": _band(level, "plain_tpot_ms"),
        "break_even": "never" if least is None else f"{least:.2f}",
        "has_room": "yes" if level["fits"] else "NO",
    }


def _steps(levels: list[dict[str, Any]]) -> Table:
    rows = [
        (
            str(level["concurrency"]),
            *map(_digits, level["step_ms"].values()),
            _digits(sum(level["step_ms"].values())),
        )
        for level in levels
    ]
    headings = "requests", *levels[0]["step_ms"], "sum"
    return table_of(headings, rows, "A step of the best length, ms")


def _lengths(levels: list[dict[str, Any]]) -> Table:
    headings = "requests", *map(str, range(len(levels[0]["tpot_ms_by_length"])))
    rows: list[list[str]] = []
    for level in levels:
        cells, best = [*map(_digits, level["tpot_ms_by_length"])], level["best_length"]
        cells[best] = f"[bold]{cells[best]}[/]"
        rows.append([str(level["concurrency"]), *cells])
    return table_of(headings, rows, "TPOT ms by length")


def _band(level: dict[str, Any], name: str) -> str:
    middle, low, high = (_digits(level[name + end]) for end in ("", "_low", "_high"))
    return f"{middle} ({low} to {high})"


def _digits(ms: float) -> str:
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:,.0f}"


def _memory(memory: dict[str, Any]) -> str:
    if memory["kv_gib"] <= 0:
        return f"Memory: the weights need {-memory['kv_gib']:.1f} GiB more than a card has to give."
    kept_free = memory["card_gib"] - memory["usable_gib"]
    return (
        f"Memory of the fullest card, GiB: {memory['target_weights_gib']:.1f} target, "
        f"{memory['drafter_weights_gib']:.1f} drafter, {memory['kv_gib']:.1f} keys and values "
        f"({memory['drafter_kv_share']:.0%} the drafter's), {kept_free:.1f} kept free. Room for "
        f"{memory['max_tokens']:,} tokens: {memory['max_requests']:,} requests."
    )
