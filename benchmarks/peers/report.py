"""Writes run.py's result into docs/measuring.md: tables, a plot, and where outdraft loses.

No number is edited by hand: `python benchmarks/peers/report.py`. The name of a result is that
of its place on the page and of its plot. A rate is the median over repeats; for one request at a
time, a repeat is all its prompts' tokens by all their time.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
from cells import ENGINES, OURS, PLAIN

ROOT = Path(__file__).parents[2]
PICTURE = "![How many times as good as the best peer outdraft is]({}.svg)"
WORDS = {"draft_model": "draft model", "ngram": "n-gram", "mlp_speculator": "MLP speculator"}
BEST = "best of all methods"
SPECULATION_BARS = {1: 1.3, 8: 1.1}  # by requests at once
PERCENTILES = (50, 99)


@dataclass(frozen=True, slots=True)
class Measured:
    """A cell of one engine."""

    model: str
    method: str
    what: str
    engine: str
    cell: dict[str, Any]
    commit: str

    @property
    def answers(self) -> list[dict[str, Any]]:
        return [answer for run in self.cell["runs"] for answer in run["answers"]]

    @property
    def prompts(self) -> list[int]:
        """Which prompt each answer continues."""
        count = self.cell["num_prompts"] if self.cell["batch"] == 1 else self.cell["batch"]
        return [number % count for number in range(len(self.answers))]

    def rates(self) -> list[float]:
        """Tokens/s of each repeat: without prompts and first tokens for one request at a time."""
        batch, new = self.cell["batch"], self.cell["new_tokens"]
        if batch > 1:
            return [batch * new / run["wall_s"] for run in self.cell["runs"]]
        times_s = [answer["last_s"] - answer["first_s"] for answer in self.answers]
        per, rates = self.cell["num_prompts"], list[float]()
        for start in range(0, len(times_s), per):
            repeat_s = times_s[start : start + per]
            rates.append(len(repeat_s) * (new - 1) / sum(repeat_s))
        return rates

    def tokens_a_round(self) -> float:
        decoded = len(self.answers) * (self.cell["new_tokens"] - 1)
        return decoded / sum(answer["rounds"] for answer in self.answers)

    def label(self) -> str:
        """The method, and its drafts a step."""
        depth = self.cell["depth"]
        return WORDS.get(self.method, self.method) + (f" {depth}" if depth else "")


@dataclass(frozen=True, slots=True)
class Case:
    """A line of a table: one number of each engine, and what reached it."""

    name: str
    unit: str
    values: dict[str, float]
    labels: dict[str, str]
    bar: float | None = None  # how many times as good as the best peer outdraft should be

    def best(self, names: list[str]) -> str:
        return (max if self.unit == "tokens/s" else min)(names, key=self.values.__getitem__)

    def lead(self) -> tuple[str, float] | None:
        """The best peer, and how many times as good as it outdraft is; None if one is missing."""
        peers = [name for name in self.values if name != OURS]
        if not peers or OURS not in self.values:
            return None
        ratio = self.values[OURS] / self.values[self.best(peers)]
        return self.best(peers), ratio if self.unit == "tokens/s" else 1 / ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "peers.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "measuring.md")
    parser.add_argument("--print", action="store_true", help="only show it")
    args = parser.parse_args()
    result = json.loads(args.json.read_text())
    cells = [*measured(result)]
    cases = [*bfloat16_cases(cells), *first_tokens(cells), *starts(result["groups"])]
    eights = [*quantised(cells)]
    sections = {
        "": table(cases),
        "Speculative texts that equal the same engine's plain ones": equal_texts(cells),
        "Where outdraft is behind": losses(cases, result["groups"]),
        "One request with a draft model, tokens/s by drafts a step": depths(cells),
        "Weights in 8 and 4 bits, each engine's own format, no drafts": table(eights),
        "Steps of one request beside other processes that compute all the time": busy(cells),
    }
    text = "\n\n".join([about(result, cells), *titled(sections)])
    if args.print:
        print(text)
        return
    name = args.json.stem
    plot([*cases, *eights], args.page.parent / f"{name}.svg")
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = args.page.read_text().split(begin)
    _, after = rest.split(end)
    args.page.write_text(f"{before}{begin}\n{text}\n\n{PICTURE.format(name)}\n{end}{after}")


def titled(sections: dict[str, Iterator[str]]) -> Iterator[str]:
    """The sections that have lines, with their titles."""
    for title, lines in sections.items():
        if found := "\n".join(lines):
            yield f"{title}:\n\n{found}" if title else found


def measured(result: dict[str, Any]) -> Iterator[Measured]:
    for group in result["groups"].values():
        names = group["model"], group["method"], group["what"]
        for engine in ENGINES:
            if (found := group["engines"].get(engine)) is None:
                continue
            for cell in found["cells"].values():
                if cell["runs"]:
                    yield Measured(*names, engine, cell, found["about"]["commit"])


def bfloat16_cases(cells: list[Measured]) -> Iterator[Case]:
    """Plain decoding, the best that each engine has, and its best depth of each method."""
    decoded = [one for one in cells if not one.what]
    batches = sorted({one.cell["batch"] for one in decoded})
    for model in dict.fromkeys(one.model for one in decoded):
        of_model = [one for one in decoded if one.model == model]
        drafted = [one for one in of_model if one.method != PLAIN]
        methods = list(dict.fromkeys(one.method for one in drafted))
        choices = [(PLAIN, [one for one in of_model if one.method == PLAIN])]
        choices.append((BEST, of_model))
        if len(methods) > 1:
            choices += [(WORDS.get(m, m), [x for x in drafted if x.method == m]) for m in methods]
        for title, chosen in choices:
            for batch in batches:
                bars = {PLAIN: 1.0, BEST: SPECULATION_BARS.get(batch)}
                name = f"{model}, {title}, {requests(batch)}"
                yield from best_rates(name, chosen, batch, bars.get(title))


def requests(batch: int) -> str:
    return f"{batch} request" + "s" * (batch > 1)


def best_rates(
    name: str, cells: list[Measured], batch: int, bar: float | None = None
) -> Iterator[Case]:
    """The fastest cell of each engine, with what it is where there is a choice."""
    has_choice = len({one.method for one in cells}) > 1
    values: dict[str, float] = {}
    labels: dict[str, str] = {}
    for one in cells:
        rate = median(one.rates())
        if one.cell["batch"] == batch and rate > values.get(one.engine, 0.0):
            values[one.engine] = rate
            depth = f"({one.cell['depth']})" if one.cell["depth"] else ""
            labels[one.engine] = one.label() if has_choice else depth
    if values:
        yield Case(name, "tokens/s", values, labels, bar)


def first_tokens(cells: list[Measured]) -> Iterator[Case]:
    by_length: dict[int, dict[str, float]] = {}
    for one in cells:
        if one.what == "first token":
            first_s = median(answer["first_s"] for answer in one.answers)
            by_length.setdefault(one.cell["prompt_tokens"], {})[one.engine] = first_s
    for length, values in by_length.items():
        yield Case(f"big, first token of {length:,}", "s", values, {}, 1.0)


def starts(groups: dict[str, Any]) -> Iterator[Case]:
    """What plain engines take to start and at most hold."""
    for model in ("big", "small"):
        engines = groups.get(f"{model} {PLAIN}", {"engines": {}})["engines"]
        about = {name: engine["about"] for name, engine in engines.items()}
        fine = {name: one for name, one in about.items() if "peak_bytes" in one}
        if fine:
            start_s = {name: one["start_s"] for name, one in fine.items()}
            peak = {name: one["peak_bytes"] / 2**20 for name, one in fine.items()}
            yield Case(f"{model}, start to first token", "s", start_s, {})
            yield Case(f"{model}, peak memory", "MiB", peak, {})


def quantised(cells: list[Measured]) -> Iterator[Case]:
    of_bits = [one for one in cells if one.what.startswith("int")]
    for what in dict.fromkeys(one.what for one in of_bits):
        for batch in (1, 8):
            chosen = [one for one in of_bits if one.what == what]
            yield from best_rates(f"big, {what}, {requests(batch)}", chosen, batch)


def table(cases: list[Case]) -> Iterator[str]:
    if not cases:
        return
    engines = [name for name in ENGINES if any(name in case.values for case in cases)]
    has_bars = any(case.bar for case in cases)
    heads = ["", "unit", *engines, "outdraft by best peer", *["bar"] * has_bars]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for case in cases:
        best, lead = case.best([*case.values]), case.lead()
        texts: list[str] = []
        for name in engines:
            text = f"{case.values[name]:,.4g}" if name in case.values else ""
            text = f"**{text}**" if name == best else text
            texts.append(f"{text} {case.labels.get(name, '')}".strip())
        texts.append(f"{lead[1]:.2f}" if lead else "")
        if has_bars:
            kept = lead is not None and case.bar is not None and lead[1] >= case.bar
            texts.append(f"{case.bar:g}, {'met' if kept else 'missed'}" if case.bar else "")
        yield f"| {case.name} | {case.unit} | {' | '.join(texts)} |"


def depths(cells: list[Measured]) -> Iterator[str]:
    drafted = [x for x in cells if x.method == "draft_model" and x.cell["batch"] == 1]
    columns = sorted({one.cell["depth"] for one in drafted})
    if columns:
        yield f"| | {' | '.join(map(str, columns))} | tokens a round at {columns[-1]} |"
        yield "|---" * (len(columns) + 2) + "|"
    for model, engine in dict.fromkeys((one.model, one.engine) for one in drafted):
        mine = [one for one in drafted if (one.model, one.engine) == (model, engine)]
        rates = {one.cell["depth"]: median(one.rates()) for one in mine}
        best = max(rates.values())
        texts = [f"{rates[n]:,.4g}" if n in rates else "" for n in columns]
        marked = [
            f"**{t}**" if rates.get(n) == best else t for n, t in zip(columns, texts, strict=True)
        ]
        rounds = [one.tokens_a_round() for one in mine if one.cell["depth"] == columns[-1]]
        last = f"{rounds[0]:.2f}" if rounds else ""
        yield f"| {model}, {engine} | {' | '.join(marked)} | {last} |"


def busy(cells: list[Measured]) -> Iterator[str]:
    rows: dict[int, dict[str, list[str]]] = {}
    for one in cells:
        if one.what == "busy":
            steps_s = sorted(step for answer in one.answers for step in answer["step_s"])
            at = [steps_s[len(steps_s) * percent // 100] for percent in PERCENTILES]
            rows.setdefault(one.cell["busy"], {})[one.engine] = [f"{1000 * s:.1f}" for s in at]
    if not rows:
        return
    engines = list(rows[min(rows)])
    heads = [f"{name}, p{percent}" for name in engines for percent in PERCENTILES]
    yield f"| busy processes | {' | '.join(f'{head}, ms' for head in heads)} |"
    yield "|---" * (len(heads) + 1) + "|"
    for count, values in rows.items():
        texts = [t for name in engines for t in values.get(name, [""] * len(PERCENTILES))]
        yield f"| {count} | {' | '.join(texts)} |"


def about(result: dict[str, Any], cells: list[Measured]) -> str:
    """Where and when, with which versions, and how even the machine was."""
    where = result["environment"]
    abouts = [
        engine["about"]
        for group in result["groups"].values()
        for engine in group["engines"].values()
    ]
    dates = sorted(one["date"] for one in abouts)
    last = dates[-1].removeprefix(dates[0][:11])  # the time alone, if the day is the same
    commits = sorted({one["commit"][:9] for one in abouts if one["commit"]})
    versions = sorted({pair for one in abouts for pair in one.get("versions", {}).items()})
    runs = [run for one in cells for run in one.cell["runs"]]
    read = sorted(run["bandwidth_gb_per_s"] for run in runs)
    load = sorted(run["load_average"] for run in runs)
    repeated = [rates for one in cells if not one.what and len(rates := one.rates()) > 1]
    spread = sorted((max(rates) - min(rates)) / median(rates) for rates in repeated)
    said = (
        f" From repeat to repeat a rate varies by {100 * median(spread):.0f} % (median; "
        f"{100 * spread[len(spread) * 9 // 10]:.0f} % in the worst tenth)."
        if spread
        else ""
    )
    return (
        f"{dates[0]} to {last}, {where['host']}: {where['processor']}, {where['cores']} "
        f"cores, {result['threads']} threads; commit {', '.join(commits)}; "
        f"{', '.join(f'{name} {number}' for name, number in versions)}. Weights are bfloat16 "
        f"where nothing else is said. Memory was read at {median(read):.1f} GB/s "
        f"({read[0]:.1f} to {read[-1]:.1f}) between measurements; the load average was "
        f"{load[0]:.1f} to {load[-1]:.1f}.{said} The best of a line is bold."
    )


def equal_texts(cells: list[Measured]) -> Iterator[str]:
    """How many greedy texts speculation left as the same engine, of one commit, writes without."""
    plain: dict[tuple[Any, ...], set[str]] = {}
    counts: dict[str, list[bool]] = {}
    for one in cells:
        if one.what:
            continue
        for number, answer in zip(one.prompts, one.answers, strict=True):
            cell = one.cell
            kind = (one.model, one.engine, one.commit)
            where = (*kind, cell["batch"], cell["new_tokens"], number)
            if one.method == PLAIN:
                plain.setdefault(where, set()).add(answer["text"])
            elif where in plain:
                counts.setdefault(one.engine, []).append(answer["text"] in plain[where])
    if counts:
        yield ", ".join(f"{name} {sum(same)} of {len(same)}" for name, same in counts.items())


def losses(cases: list[Case], groups: dict[str, Any]) -> Iterator[str]:
    """The cases in which a peer is ahead, and the engines that failed."""
    for case in cases:
        peer, lead = case.lead() or ("", 1.0)
        if lead < 1:
            values = f"{case.values[OURS]:,.4g} against {case.values[peer]:,.4g} of {peer}"
            yield f"- {case.name} ({case.unit}): {values}"
    for name, group in groups.items():
        for engine, one in group["engines"].items():
            if "failure" in one["about"]:
                yield f"- {name}: {engine} failed: {one['about']['failure']}"


def plot(cases: list[Case], path: Path) -> None:
    """How many times as good as the best peer outdraft is, line by line, and the bars."""
    plt.rcParams["svg.hashsalt"] = "peers"  # the same file from the same numbers
    led = [(case, lead[1]) for case in reversed(cases) if (lead := case.lead())]
    names = [f"{case.name} ({case.unit})" for case, _ in led]
    figure, axes = plt.subplots(figsize=(9, 1 + 0.25 * len(led)), layout="constrained")
    colours = ["tab:green" if ratio >= (case.bar or 1) else "tab:red" for case, ratio in led]
    axes.barh(names, [ratio - 1 for _, ratio in led], left=1, color=colours)
    bars = [(case.bar, row) for row, (case, _) in enumerate(led) if case.bar]
    axes.scatter(*zip(*bars, strict=True), marker="|", s=120, color="black", zorder=3)
    axes.set_xscale("log", base=2)
    axes.axvline(1, color="black")
    axes.set_xlabel("times as good as the best peer; a tick is the bar, red misses it")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
