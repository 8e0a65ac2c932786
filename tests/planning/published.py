"""Published measurements beside what a plan says about them.

data/published_points.tsv: vLLM on H100 cards, at temperature 0. 70B: two cards without peer-to-peer
access, prompts of InstructCoder (code to edit, 200 tokens of output); the others: one card,
MT-bench. The table names the cards "H100" only; `setup_of` reads that as the usual card, with
80 GB of HBM3, unless another one is named.
"""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outdraft.planning.hardware import find_hardware
from outdraft.planning.planner import best_length
from outdraft.planning.shapes import find_drafter, find_network
from outdraft.planning.step_time import (
    CalibratedPredictor,
    Point,
    Predictor,
    RooflinePredictor,
    Setup,
)

DATA = Path(__file__).parent / "data"
PLAIN_70B, DRAFTS_70B = "llama-3.3-70b tp2 h100 plain", "llama-3.3-70b tp2 h100 + draft-model"
PLAIN_32B, DRAFTS_32B = "qwen3-32b h100 plain", "qwen3-32b h100 + qwen3-1.7b"
# Settings of one target on one machine; the first part of a group has its plain runs.
GROUPS = ((PLAIN_70B, DRAFTS_70B), (PLAIN_32B, DRAFTS_32B), ("qwen3-1.7b h100 plain",))
# What calibrates a group: (concurrency, length). All other points are predicted.
CALIBRATION = {
    PLAIN_70B: ((1, 0), (64, 0), (1, 3), (1, 8)),
    PLAIN_32B: ((1, 0), (1, 1)),
}


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of TPOT, and the share of points within the band."""

    mean: float
    worst: float
    bias: float
    covered: float
    num_points: int


def points_of(setting: str) -> list[Point]:
    with (DATA / "published_points.tsv").open() as file:
        return [
            Point(
                int(row["concurrency"]),
                int(row["k"]),
                float(row["mean_tpot_ms"]) / 1e3,
                float(row["acceptance_length"]),
            )
            for row in csv.DictReader(file, delimiter="\t")
            if row["setting"] == setting
        ]


def setup_of(setting: str, card: str = "h100") -> Setup:
    """The machine and the models as the table names them; 70B's drafter on both cards."""
    if "70b" in setting:
        target, machine = (
            find_network("llama-3.3-70b"),
            find_hardware(f"2x{card}", "pcie-no-p2p"),
        )
        return Setup(target, *find_drafter("llama-3.2-1b", target), machine, 2, 2)
    target = find_network("qwen3-1.7b" if setting.startswith("qwen3-1.7b") else "qwen3-32b")
    return Setup(target, *find_drafter("qwen3-1.7b", target), find_hardware(card))


def errors(predictor: Predictor, points: Iterable[Point]) -> Errors:
    found, inside = [], []
    for point in points:
        step, low_s, high_s = predictor.predict(point.num_requests, point.length, point.tokens)
        measured_s = point.tpot_s * point.tokens
        found.append(step.total_s / measured_s - 1)
        inside.append(low_s <= measured_s <= high_s)
    sizes = np.abs(found)
    return Errors(
        float(sizes.mean()), float(sizes.max()), float(np.mean(found)), float(np.mean(inside)),
        len(found),
    )  # fmt: skip


def calibrated(
    group: tuple[str, ...], card: str = "h100"
) -> tuple[Predictor, dict[str, list[Point]]]:
    """A predictor of a group, and the points of each setting that it has not seen."""
    chosen = CALIBRATION[group[0]]
    every = {setting: points_of(setting) for setting in group}
    seen = [p for part in every.values() for p in part if (p.num_requests, p.length) in chosen]
    assert len(seen) == len(chosen)
    unseen = {
        setting: left
        for setting, part in every.items()
        if (left := [point for point in part if point not in seen])
    }
    return CalibratedPredictor(setup_of(group[0], card), seen), unseen


def roofline(setting: str, card: str = "h100") -> Predictor:
    return RooflinePredictor(setup_of(setting, card))


def other_points() -> Iterator[tuple[str, Predictor, Point]]:
    """Settings of data/other_points.tsv, each with the roofline, and a point."""
    with (DATA / "other_points.tsv").open() as file:
        for row in csv.DictReader(file, delimiter="\t"):
            target, tp = find_network(row["target"], row["dtype"]), int(row["tp"])
            work = int(row["prompt_tokens"]), int(row["output_tokens"])
            machine = find_hardware(f"{tp}x{row['card']}")
            setup = Setup(target, *find_drafter(row["draft"], target), machine, tp, tp, *work)
            tpot_s, tokens = float(row["tpot_ms"]) / 1e3, float(row["acceptance_length"])
            point = Point(int(row["concurrency"]), int(row["k"]), tpot_s, tokens)
            yield row["setting"], RooflinePredictor(setup), point


def other_errors() -> dict[str, list[float]]:
    """Relative errors of the roofline on these points, by setting."""
    found: dict[str, list[float]] = {}
    for setting, predictor, point in other_points():
        step = predictor.step(point.num_requests, point.length, point.tokens)
        error = step.total_s / point.tokens / point.tpot_s - 1
        found.setdefault(setting, []).append(error)
    return found


def losses_of_choice(predictor: Predictor, group: tuple[str, ...]) -> dict[int, float]:
    """By concurrency: the share of time that the length of a plan's choice loses to the best one.

    The plan knows what drafts of each length brought to one request alone.
    """
    points = [point for setting in group for point in points_of(setting)]
    alone = {point.length: point.tokens for point in points if point.num_requests == 1}
    lengths = sorted(alone)
    tokens_of = [alone.get(length, 1e-9) for length in range(lengths[-1] + 1)]  # not measured
    found = {}
    for num_requests in sorted({point.num_requests for point in points}):
        measured = {p.length: p.tpot_s for p in points if p.num_requests == num_requests}
        length = best_length(predictor, tokens_of, num_requests)
        found[num_requests] = measured[length] / min(measured.values()) - 1
    return found
