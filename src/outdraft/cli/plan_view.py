"""What `outdraft plan` shows to people."""

from pathlib import Path

from rich.table import Table

from outdraft.cli.command import table_of, wide_console
from outdraft.planning.planner import Level, Memory, Plan


def show(plan: Plan) -> None:
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


def draw(plan: Plan, path: Path) -> None:
    """Write a picture: TPOT over concurrency, plain and with the best length, with their bands."""
    from matplotlib.figure import Figure

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
    axes.set_xscale("log", base=2)
    axes.set_xticks(xs, labels=[str(x) for x in xs])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("concurrent requests (numbers: best length)")
    axes.set_ylabel("TPOT, ms")
    axes.set_title(f"{plan.setup['target']}, {plan.setup['method']}; {plan.mode}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _levels(levels: list[Level]) -> Table:
    times = "TPOT ms\n(band)", "plain TPOT ms\n(band)", "against\nplain", "tokens/s"
    table = table_of((), ("requests", "best", "tokens\na step", *times, "break-\neven", "fits"))
    for level in levels:
        least = level.break_even_acceptance
        table.add_row(
            str(level.concurrency),
            str(level.best_length),
            f"{level.tokens_a_step:.2f}",
            _band(level.tpot_ms, level.tpot_ms_low, level.tpot_ms_high),
            _band(level.plain_tpot_ms, level.plain_tpot_ms_low, level.plain_tpot_ms_high),
            f"{level.speedup:.2f}x",
            f"{level.tokens_per_s:,.0f}",
            "never" if least is None else f"{least:.2f}",
            "yes" if level.fits else "NO",
        )
    return table


def _steps(levels: list[Level]) -> Table:
    numbers = "requests", *levels[0].step_ms, "sum"
    table = table_of((), numbers, "A step of the best length, ms")
    for level in levels:
        times = (*level.step_ms.values(), sum(level.step_ms.values()))
        table.add_row(str(level.concurrency), *(_digits(ms) for ms in times))
    return table


def _lengths(levels: list[Level]) -> Table:
    lengths = map(str, range(len(levels[0].tpot_ms_by_length)))
    table = table_of((), ["requests", *lengths], "TPOT ms by length")
    for level in levels:
        cells = [_digits(ms) for ms in level.tpot_ms_by_length]
        cells[level.best_length] = f"[bold]{cells[level.best_length]}[/]"
        table.add_row(str(level.concurrency), *cells)
    return table


def _band(middle: float, low: float, high: float) -> str:
    return f"{_digits(middle)} ({_digits(low)} to {_digits(high)})"


def _digits(ms: float) -> str:
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:,.0f}"


def _memory(memory: Memory) -> str:
    if not memory.fits:
        return f"Memory: the weights need {-memory.kv_gib:.1f} GiB more than a card has to give."
    return (
        f"Memory of the fullest card, GiB: {memory.target_weights_gib:.1f} target, "
        f"{memory.drafter_weights_gib:.1f} drafter, {memory.kv_gib:.1f} keys and values "
        f"({memory.drafter_kv_share:.0%} the drafter's), "
        f"{memory.card_gib - memory.usable_gib:.1f} kept free. Room for {memory.max_tokens:,} "
        f"tokens: {memory.max_requests:,} requests."
    )


def _conclusions(plan: Plan) -> list[str]:
    most = plan.break_even_concurrency
    if most == 0:
        return ["Drafts do not pay here, even for one request."]
    if most is None:
        return ["Drafts pay at any concurrency that was tried."]
    return [f"Drafts pay up to {most} concurrent requests."]
