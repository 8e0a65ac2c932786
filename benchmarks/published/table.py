"""Writes run.py's results into README.md and docs/measuring.md, without arguments.

No number is edited by hand. A number is the median over rounds, with the least and the most
in brackets.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import harmonic_mean, median
from typing import Any

from tasks import MIXED

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README_MODEL = "coder15"
NOTHING = "Not measured yet.\n"

Turn = dict[str, Any]


def main() -> None:
    results = read(RESULTS)
    of_readme = [one for one in results if one["model"] == README_MODEL]
    write(ROOT / "README.md", "\n".join(map(summary, of_readme)) or NOTHING)
    write(ROOT / "docs" / "measuring.md", "\n".join(map(whole, results)) or NOTHING)


def read(folder: Path) -> list[dict[str, Any]]:
    """All results of run.py there, by their files' names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("published-*.json"))]


def write(page: Path, text: str) -> None:
    """Replace what stands between the page's marks."""
    begin, end = "<!-- published: begin -->", "<!-- published: end -->"
    before, rest = page.read_text("utf-8").split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}\n{text}{end}{after}", "utf-8")


def summary(result: dict[str, Any]) -> str:
    """What was measured where, and a row for each way: rates, starts and memory."""
    columns = dict.fromkeys((one["concurrency"], one["temperature"]) for one in result["turns"])
    heads = [f"{count} at once, T={heat:g}" for count, heat in columns]
    lines = [
        f"{about(result)}",
        "",
        f"| tokens/s | {' | '.join(heads)} | start, s | peak, GiB |",
        "|---" * (len(heads) + 3) + "|",
    ]
    for engine, method in names(result):
        mine = [one for one in result["turns"] if is_of(one, engine, method)]
        servers = [one for one in result["servers"] if is_of(one, engine, method)]
        cells = [rates(one for one in mine if at(one) == column) for column in columns]
        cells.append(spread(one["start_s"] for one in servers))
        cells.append(spread(one["peak_bytes"] / 2**30 for one in servers))
        lines.append(f"| {engine}, {method.replace('_', ' ')} | {' | '.join(cells)} |")
    if failed := failures(result):
        lines += ["", failed]
    return "\n".join([*lines, ""])


def failures(result: dict[str, Any]) -> str:
    """The turns that a server did not answer; no rate above has them."""
    asked = [(one["engine"], one["method"]) for one in result["turns"] + result["failures"]]
    failed = [(one["engine"], one["method"]) for one in result["failures"]]
    rows = [
        f"{engine}, {method.replace('_', ' ')}: {failed.count((engine, method))} of "
        f"{asked.count((engine, method))}"
        for engine, method in dict.fromkeys(failed)
    ]
    return f"Turns that were not answered: {'; '.join(rows)}." if rows else ""


def whole(result: dict[str, Any]) -> str:
    """The summary, and by task what a token takes, how many come a step, and the first one."""
    parts = [summary(result)]
    for title, number in (
        ("ms a token, one request", lambda one: one["tpot_ms"]),
        ("Acceptance length, one request", lambda one: one["acceptance_length"]),
        ("ms to the first token, one request", lambda one: one["ttft_ms"]),
    ):
        if table := "\n".join(by_task(result, number)):
            parts.append(f"{title}:\n\n{table}\n")
    return "\n".join([*parts, f"{equal_texts(result)}\n"])


def by_task(result: dict[str, Any], number: Callable[[Turn], float | None]) -> Iterator[str]:
    """A row for each way that has the number, a column for each task and temperature."""
    alone = [one for one in result["turns"] if one["task"] != MIXED]
    columns = dict.fromkeys((one["task"], one["temperature"]) for one in alone)
    rows: list[str] = []
    for engine, method in names(result):
        cells: list[str] = []
        for task, heat in columns:
            chosen = [one for one in alone if is_of(one, engine, method)]
            found = [
                number(one) for one in chosen if (one["task"], one["temperature"]) == (task, heat)
            ]
            known = [value for value in found if value is not None]
            cells.append(short(median(known)) if known else "")
        if any(cells):
            rows.append(f"| {engine}, {method.replace('_', ' ')} | {' | '.join(cells)} |")
    if rows:
        yield f"| | {' | '.join(f'{task}, T={heat:g}' for task, heat in columns)} |"
        yield "|---" * (len(columns) + 1) + "|"
        yield from rows


def names(result: dict[str, Any]) -> list[tuple[str, str]]:
    return [(way["engine"], way["method"]) for way in result["ways"]]


def is_of(one: Turn, engine: str, method: str) -> bool:
    return (one["engine"], one["method"]) == (engine, method)


def at(one: Turn) -> tuple[int, float]:
    return one["concurrency"], one["temperature"]


def rates(turns: Iterable[Turn]) -> str:
    """Tokens/s of each round: answers have one length, so tasks count by their times."""
    by_round: dict[int, list[float]] = {}
    for one in turns:
        by_round.setdefault(one["round"], []).append(one["tokens_per_s"])
    return spread(harmonic_mean(found) for found in by_round.values())


def spread(values: Iterable[float]) -> str:
    """The median, and what it lies between."""
    found = sorted(values)
    if len(found) < 2:
        return short(found[0]) if found else ""
    return f"{short(median(found))} ({short(found[0])} to {short(found[-1])})"


def short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f}"


def about(result: dict[str, Any]) -> str:
    where, limits = result["environment"], result["limits"]
    turns = result["turns"]
    read_gb_s = sorted(one["bandwidth_gb_per_s"] for one in turns)
    load = sorted(one["load_average"] for one in turns)
    floor_ms = result["file_bytes"] / median(read_gb_s) / 1e6
    drafter = result["drafter"]
    drafts = f", draft model {result['titles'][drafter]}" if drafter else ""
    rounds = 1 + max(one["round"] for one in turns)
    counted = f"{rounds} rounds" if rounds > 1 else "1 round"
    changes = ", tree with changes" if where["is_dirty"] else ""
    return (
        f"{result['titles'][result['model']]}{drafts}; answers of {result['new_tokens']} tokens, "
        f"{counted}. "
        f"{where['processor']} ({', '.join(where['flags'])}), {where['cores']} cores, "
        f"{limits['threads']} threads; commit {where['commit'][:9]}{changes}; llama.cpp "
        f"{where['llama.cpp']}, torch {where['versions']['torch']}. Memory was read at "
        f"{median(read_gb_s):.1f} GB/s ({read_gb_s[0]:.1f} to {read_gb_s[-1]:.1f}), at which the "
        f"file takes {floor_ms:.1f} ms; the load average was {load[0]:.1f} to {load[-1]:.1f}."
    )


def equal_texts(result: dict[str, Any]) -> str:
    """How many greedy texts are those of the first way, and how long the others are the same."""
    (first_engine, first_method), *others = names(result)
    rows: list[str] = []
    for engine, method in others:
        mine = [one for one in result["turns"] if is_of(one, engine, method)]
        found = [at for one in mine for at in one.get("first_differences", [])]
        parted = [at for at in found if at is not None]
        after = f" (the others part after {median(parted):.0f} characters)" if parted else ""
        if found:
            same = len(found) - len(parted)
            rows.append(f"{engine}, {method.replace('_', ' ')}: {same} of {len(found)}{after}")
    if not rows:
        return "No greedy texts were compared."
    return f"Greedy texts that equal those of {first_engine}, {first_method}: {'; '.join(rows)}."


if __name__ == "__main__":
    main()
