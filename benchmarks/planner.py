"""Writes the tables of docs/planning.md: published measurements beside what plans say about them.

    python -m benchmarks.planner        # from the repository's root

tests/planning/published.py has the measurements, and the tests that hold the planner to its bars.
"""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.pages import write
from outdraft.planning.hardware import hardware_data
from tests.planning.published import (
    CALIBRATION,
    GROUPS,
    Errors,
    calibrated,
    errors,
    losses_of_choice,
    other_errors,
    points_of,
    roofline,
)

PAGE = Path(__file__).parent.parent / "docs" / "planning.md"
CARDS = ("h100", "h100-94gb")


def main() -> None:
    for table in (published, others, constants):
        write(PAGE, table.__name__, "\n".join(table()) + "\n")


def published() -> Iterator[str]:
    yield (
        "| setting | mode | card | points | mean error | worst | bias | within the band | "
        "loss by the choice of length |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for group in GROUPS:
        for setting in group:
            for card in CARDS[: 1 + ("70b" in setting)]:
                predictor = roofline(setting, card)
                found = errors(predictor, points_of(setting))
                lost = max(losses_of_choice(predictor, group).values())
                yield row(setting, "roofline", card, found, lost)
        if group[0] not in CALIBRATION:
            continue
        predictor, unseen = calibrated(group)
        lost = max(losses_of_choice(predictor, group).values())
        for setting, points in unseen.items():
            yield row(setting, "calibrated", CARDS[0], errors(predictor, points), lost)


def row(setting: str, mode: str, card: str, found: Errors, lost: float) -> str:
    cells = (
        setting, mode, card, found.num_points, f"{found.mean:.1%}", f"{found.worst:.1%}",
        f"{found.bias:+.1%}", f"{found.covered:.0%}", f"{lost:.1%}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def others() -> Iterator[str]:
    yield "| setting | points | mean error | worst | bias |"
    yield "|---|---|---|---|---|"
    for setting, found in other_errors().items():
        sizes = [abs(error) for error in found]
        mean, bias = sum(sizes) / len(sizes), sum(found) / len(found)
        yield f"| {setting} | {len(found)} | {mean:.1%} | {max(sizes):.1%} | {bias:+.1%} |"


def constants() -> Iterator[str]:
    yield "| constant | GPU (range) | CPU (range) | where it comes from |"
    yield "|---|---|---|---|"
    data = hardware_data()["constants"]
    for name, gpu in data["gpu"].items():
        cells = [
            f"{one['value']} ({one['low']} to {one['high']})" for one in (gpu, data["cpu"][name])
        ]
        yield f"| `{name}` | {' | '.join(cells)} | {gpu['origin']} |"


if __name__ == "__main__":
    main()
