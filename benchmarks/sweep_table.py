"""The document's table and plot of `outdraft bench sweep`: chosen lengths against fixed ones."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from committed import Result, by_setting, machine

LEVELS = (1, 2, 4, 8, 16, 32)  # requests at a time
BAR = 0.97  # of the best
NARROW = 0.02  # what an interval may reach to either side
# What results that say "auto" were computed in: their processors with AVX-512 multiply bfloat16.
AUTO = {"AVX2": "float32", "AVX512": "bfloat16"}
EMBEDDED = ((), ("assets", "target"))  # how the path of the embedded pair's target ends
SOURCE = re.compile(r"<DraftSource\.\w+: '(\w+)'>")
PANELS = 4  # in a row of the plot


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """What is compared, and where."""

    model: str
    coins: tuple[float, ...]
    machine: str
    dtype: str
    temperature: float
    drafter: str

    @property
    def drafts(self) -> str:
        coins = " and ".join(f"{chance:g}" for chance in self.coins)
        return f"{self.model}, {self.drafter}" + (f", coins of {coins}" if coins else "")


def setting(sweep: dict[str, Any]) -> Setting:
    capability, path = sweep["environment"]["capability"], Path(sweep["model_id"])
    dtype = AUTO.get(capability, "auto") if sweep["dtype"] == "auto" else sweep["dtype"]
    sources = dict.fromkeys(SOURCE.findall(sweep["speculation"]["auto"]))
    return Setting(
        model="small" if path.parts[-2:] in EMBEDDED else path.name,
        coins=tuple(sweep["synthetic_acceptance"] or ()),
        machine=f"{machine(sweep)}, {capability}",
        dtype=dtype,
        temperature=sweep["temperature"],
        drafter=" and ".join(sources).replace("_", " "),
    )


def newest_levels(
    results: list[Result],
) -> tuple[dict[Setting, dict[int, dict[str, Any]]], list[Result], list[Result]]:
    """For each setting, in the order of the table, its levels as they were measured last; the files
    that they come from, and the others."""
    found: dict[Setting, dict[int, dict[str, Any]]] = {}
    shown, others = list[Result](), list[Result]()
    for group in by_setting(results, setting):
        levels = found.setdefault(setting(group[0].content), {})
        for result in group:
            own = {level["concurrency"]: level for level in result.content["levels"]}
            (shown if own.keys() - levels.keys() else others).append(result)
            levels |= own | levels
    order = sorted(found, key=lambda one: (bool(one.coins), one))
    by_level = {one: dict(sorted(found[one].items())) for one in order}
    shown.sort(key=lambda result: order.index(setting(result.content)))
    return by_level, shown, others


def sweep_table(results: list[Result]) -> str:
    """Markdown: a row for each setting, and what each row is of."""
    by_level, shown, others = newest_levels(results)
    columns = sorted({*LEVELS, *(level for levels in by_level.values() for level in levels)})
    heads = ["machine", "dtype", "T", "model, drafter", *map(str, columns)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for one, levels in by_level.items():
        cells = [_cell(levels.get(column)) for column in columns]
        texts = [one.machine, one.dtype, f"{one.temperature:g}", one.drafts, *cells]
        lines.append(f"| {' | '.join(texts)} |")
    measured = [level for levels in by_level.values() for level in levels.values()]
    lines += ["", _summary(measured), ""]
    lines += [f"- `{one.name}`: {one.commit}; {_rounds(one)} rounds." for one in shown]
    if others:
        names = ", ".join(f"`{one.name}`" for one in others)
        lines.append(f"- Not shown, as newer files are of the same settings: {names}.")
    return "\n".join(lines)


def _is_narrow(ratio: dict[str, float]) -> bool:
    """As the sweep sees it, which then adds no round."""
    return ratio["high"] - ratio["low"] <= 2 * NARROW


def _cell(level: dict[str, Any] | None) -> str:
    if level is None:
        return "not measured"
    ratio = level["ratio_to_best"]
    text = f"{ratio['median']:.3f}"
    text = f"**{text}**" if ratio["median"] >= BAR else text
    mark = "" if _is_narrow(ratio) else "\\*"
    interval = f"({ratio['low']:.3f} to {ratio['high']:.3f}){mark}"
    return f"{text} {interval}; {level['ratio_to_plain']['median']:.2f}"


def _summary(levels: list[dict[str, Any]]) -> str:
    ratios = [level["ratio_to_best"] for level in levels]
    reached = sum(ratio["median"] >= BAR for ratio in ratios)
    above = sum(ratio["low"] >= BAR for ratio in ratios)
    below = sum(ratio["high"] < BAR for ratio in ratios)
    wide = sum(not _is_narrow(ratio) for ratio in ratios)
    return (
        f"{reached} of {len(ratios)} ratios reach {BAR:g}. {above} intervals lie above it whole, "
        f"{below} below, and {wide} are wide."
    )


def _rounds(result: Result) -> str:
    counts = [level["num_rounds"] for level in result.content["levels"]]
    least, most = min(counts), max(counts)
    return f"{least}" if least == most else f"{least} to {most}"


def sweep_plot(results: list[Result], path: Path) -> None:
    """Chosen lengths over the best by requests at a time, a panel for each setting, and the bar."""
    by_level, _, _ = newest_levels(results)
    num_rows = -(-len(by_level) // PANELS)
    with plt.rc_context({"svg.hashsalt": "sweeps", "font.size": 7}):  # same numbers, same file
        figure, grid = plt.subplots(
            *(num_rows, PANELS),
            figsize=(9, 1.8 * num_rows),
            layout="constrained",
            sharey=True,
            squeeze=False,
        )
        for axes, (one, levels) in zip(grid.flat, by_level.items(), strict=False):
            _panel(axes, one, levels.values())
        for axes in grid.flat[len(by_level) :]:
            axes.set_axis_off()
        figure.supxlabel(f"requests at a time; the line is the bar of {BAR:g}, red misses it")
        figure.supylabel("speed, times the best")
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def _panel(axes: Any, one: Setting, levels: Iterable[dict[str, Any]]) -> None:
    for level in levels:
        ratio = level["ratio_to_best"]
        middle = ratio["median"]
        axes.errorbar(
            *(level["concurrency"], middle),
            yerr=[[middle - ratio["low"]], [ratio["high"] - middle]],
            color="tab:green" if middle >= BAR else "tab:red",
            marker="o",
            markersize=3,
            linewidth=1,
        )
    axes.axhline(BAR, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlim(LEVELS[0] / 1.5, LEVELS[-1] * 1.5)
    axes.set_xticks(LEVELS, labels=map(str, LEVELS))
    axes.minorticks_off()
    axes.set_title(f"{one.machine}, {one.dtype}, T={one.temperature:g}\n{one.drafts}", fontsize=7)
