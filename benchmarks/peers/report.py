"""Writes run.py's result into docs/measuring.md: a table, a plot, and where outdraft loses.

Nobody edits the numbers by hand: `python benchmarks/peers/report.py`.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
OURS, ROUND = "outdraft", "tokens a round"
MORE_IS_BETTER = ("tokens/s", ROUND)
METHODS = {"draft_model": "draft model", "ngram": "n-gram"}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: one number of each engine."""

    name: str
    unit: str
    values: dict[str, float]

    def best(self, names: list[str]) -> str:
        return (max if self.unit in MORE_IS_BETTER else min)(names, key=self.values.__getitem__)

    def lead(self) -> tuple[str, float] | None:
        """The best peer, and how many times as good as it outdraft is; None if one is missing."""
        peers = [name for name in self.values if name != OURS]
        if not peers or OURS not in self.values or self.unit == ROUND:
            return None
        ratio = self.values[OURS] / self.values[self.best(peers)]
        return self.best(peers), ratio if self.unit in MORE_IS_BETTER else 1 / ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "peers.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "measuring.md")
    parser.add_argument("--print", action="store_true", help="only show it")
    args = parser.parse_args()
    result = json.loads(args.json.read_text())
    rows = [*best_of_depths(all_rows(result["groups"]))]
    groups = result["groups"]
    parts = [about(result), "", *table(rows), "", equal_texts(groups), "", *losses(rows, groups)]
    text = "\n".join([*parts, ""])
    if args.print:
        print(text)
        return
    plot(rows, args.page.parent / "peers.svg")
    before, rest = args.page.read_text().split(BEGIN)
    _, after = rest.split(END)
    picture = "![How many times as good as the best peer outdraft is](peers.svg)"
    args.page.write_text(f"{before}{BEGIN}\n{text}\n{picture}\n{END}{after}")


def all_rows(groups: list[dict[str, Any]]) -> Iterator[Row]:
    """The lines of each group, in the order of the measurement."""
    for group in groups:
        name = f"{group['model']}, {METHODS.get(group['method'], group['method'])}"
        name += f" {group['depth']}" if group["method"] in METHODS else ""
        name += "".join(f", {one['quantization']}" for one in group["options"].values())
        rows: dict[tuple[str, str], dict[str, float]] = {}
        for cell in group["cells"]:
            for what, unit, value in numbers(group, cell) if cell["runs"] else ():
                rows.setdefault((f"{name}, {what}", unit), {})[cell["engine"]] = value
        if name.endswith(", plain") and group["kind"] == "decode":
            for engine, runner in group["runners"].items():
                if "peak_bytes" in runner:
                    start, peak = (name, "s"), (name, "MiB")
                    rows.setdefault(start, {})[engine] = runner["start_s"]
                    rows.setdefault(peak, {})[engine] = runner["peak_bytes"] / 2**20
        words = {"s": "start to first token", "MiB": "peak memory"}
        for (what, unit), values in rows.items():
            yield Row(f"{group['model']}, {words[unit]}" if what == name else what, unit, values)


def numbers(group: dict[str, Any], cell: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """What a cell of one engine measured: medians over requests, or over batches with prompts."""
    answers = [answer for run in cell["runs"] for answer in run["answers"]]
    decoded = [answer["num_tokens"] - 1 for answer in answers]
    if group["kind"] == "first token":
        first_s = median(answer["first_s"] for answer in answers)
        yield f"first of {cell['prompt_tokens']}", "s", first_s
    elif group["kind"] == "busy":
        steps_s = sorted(step for answer in answers for step in answer["step_s"])
        for percent in (50, 99):
            step_s = steps_s[len(steps_s) * percent // 100]
            yield f"step beside {cell['busy']} busy processes, p{percent}", "ms", 1000 * step_s
    elif cell["batch"] > 1:
        tokens = cell["batch"] * answers[0]["num_tokens"]
        rate = median(tokens / run["wall_s"] for run in cell["runs"])
        yield f"{cell['batch']} requests", "tokens/s", rate
    else:
        times_s = [answer["last_s"] - answer["first_s"] for answer in answers]
        rate = median(n / s for n, s in zip(decoded, times_s, strict=True))
        yield "1 request", "tokens/s", rate
        if group["method"] != "plain":
            yield "1 request", ROUND, sum(decoded) / sum(answer["rounds"] for answer in answers)


def best_of_depths(rows: Iterator[Row]) -> Iterator[Row]:
    """Depth 4 as it is, and of all depths what suits each engine best."""
    best: dict[str, dict[str, float]] = {}
    for row in rows:
        model, method, *_ = row.name.split(", ")
        is_at_four = method == "draft model 4"
        if is_at_four or not method.startswith("draft model"):
            yield row
        if method.startswith("draft model") and row.name.endswith("1 request"):
            values = best.setdefault(f"{model}, draft model, each engine's best depth", {})
            for engine, rate in row.values.items() if row.unit == "tokens/s" else ():
                values[engine] = max(rate, values.get(engine, 0.0))
    yield from (Row(name, "tokens/s", values) for name, values in best.items())


def about(result: dict[str, Any]) -> str:
    """Where and when, with which versions, and how even the machine was."""
    where, groups = result["environment"], result["groups"]
    runs = [run for group in groups for cell in group["cells"] for run in cell["runs"]]
    read = sorted(run["bandwidth_gb_per_s"] for run in runs)
    load = sorted(run["load_average"] for run in runs)
    runners = [runner for group in groups for runner in group["runners"].values()]
    versions = sorted({pair for one in runners for pair in one.get("versions", {}).items()})
    return (
        f"{result['date']}: {where['processor']}, {where['cores']} cores, {result['threads']} "
        f"threads; commit {where['commit'][:9]}; "
        f"{', '.join(f'{name} {number}' for name, number in versions)}. Weights are bfloat16 "
        f"where nothing else is said. Memory was read at {median(read):.1f} GB/s "
        f"({read[0]:.1f} to {read[-1]:.1f}) between measurements; the load average was "
        f"{load[0]:.1f} to {load[-1]:.1f}. The best of a line is bold."
    )


def equal_texts(groups: list[dict[str, Any]]) -> str:
    """How many greedy texts speculation left as the same engine writes them without."""
    plain: dict[tuple[Any, ...], list[str]] = {}
    counts: dict[str, list[bool]] = {}
    for group in (one for one in groups if one["kind"] == "decode"):
        for cell in group["cells"]:
            texts = [answer["text"] for run in cell["runs"] for answer in run["answers"]]
            where = (group["model"], cell["engine"], cell["batch"])
            expected = plain.setdefault(where, texts)
            if group["method"] != "plain" and len(texts) == len(expected):
                pairs = zip(texts, expected, strict=True)
                counts.setdefault(cell["engine"], []).extend(a == b for a, b in pairs)
    said = ", ".join(f"{name} {sum(same)} of {len(same)}" for name, same in counts.items())
    return f"Speculative texts that equal the same engine's plain ones: {said}."


def table(rows: list[Row]) -> Iterator[str]:
    engines = list(dict.fromkeys(name for row in rows for name in row.values))
    yield f"| | unit | {' | '.join(engines)} |"
    yield "|---" * (len(engines) + 2) + "|"
    for row in rows:
        best = row.best([*row.values])
        texts = [f"{row.values[name]:.4g}" if name in row.values else "" for name in engines]
        cells = [f"**{t}**" if n == best else t for n, t in zip(engines, texts, strict=True)]
        yield f"| {row.name} | {row.unit} | {' | '.join(cells)} |"


def losses(rows: list[Row], groups: list[dict[str, Any]]) -> Iterator[str]:
    """The cases in which a peer is ahead, and the engines that failed."""
    yield "Where outdraft is behind:\n"
    for row in rows:
        peer, lead = row.lead() or ("", 1.0)
        if lead < 1:
            values = f"{row.values[OURS]:.4g} against {row.values[peer]:.4g} of {peer}"
            yield f"- {row.name} ({row.unit}): {values}"
    for group in groups:
        for engine, runner in group["runners"].items():
            if "failure" in runner:
                yield f"- {group['model']}, {group['method']}: {engine}: {runner['failure']}"


def plot(rows: list[Row], path: Path) -> None:
    """How many times as good as the best peer outdraft is, line by line."""
    leads = [(f"{row.name} ({row.unit})", lead[1]) for row in rows if (lead := row.lead())]
    names, values = zip(*reversed(leads), strict=True)
    figure, axes = plt.subplots(figsize=(9, 1 + 0.25 * len(names)), layout="constrained")
    colours = ["tab:green" if value >= 1 else "tab:red" for value in values]
    axes.barh(names, [value - 1 for value in values], left=1, color=colours)
    axes.set_xscale("log", base=2)
    axes.axvline(1, color="black")
    axes.set_xlabel("times as good as the best peer; left of the line outdraft is behind")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
