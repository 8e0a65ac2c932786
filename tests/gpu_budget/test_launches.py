"""Whole steps of a GPU wait for nothing, and launch no more kernels than budgets.py allows.

They run without a GPU. What is known to wait is expected to fail, strictly: after a mend it gets a
budget.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch

from outdraft.drafting.device.self_drafter import AttendedBlocks
from tests.oracle.engines import HOST, MTP, NETWORKS, parts
from tests.pairwise import cover

pytest.importorskip("triton", reason="needs triton")
from tests.gpu_budget.budgets import (
    CHOICES,
    EXCESSIVE,
    GRAPHED,
    METHODS,
    PASSES,
    REPORTED,
    STEPS,
    TAPPED,
    WAITING_PASSES,
    WAITING_STEPS,
)
from tests.gpu_budget.meta_device import PHASES, HostWaitError
from tests.gpu_budget.steps import Case, counts_of

FAMILIES, NUMBERS = ("llama-llama3-rope", "mistral-window", "qwen2", "qwen3-window"), (1, 64)
SHAPED = ("plain", "ngram", "ngram-tree", "draft_model", "eagle3-tree")  # a method of each shape


def check(case: Case, budget: Sequence[int]) -> None:
    """Fail if a phase launches more than its budget, and name what it launches."""
    counts = counts_of(case)
    for phase, launched, most in zip(PHASES, counts.launches(), budget, strict=True):
        assert launched <= most, f"{phase} of {case}: {dict(counts.names[phase].most_common())}"


def budget_of(case: Case) -> tuple[int, int, int, int]:
    """The budget of a usual step, from the tables of its parts."""
    method, choice = METHODS[case.method], CHOICES[case.sampling]
    source, shape = parts(case.method)
    if case.sampling in ("greedy", "logprobs"):
        draft = method.greedy
    else:
        is_drawn = case.sampling in ("drawn", "penalties", "bad words", "grammar")
        draft = method.drawn if is_drawn else method.cut
    shape = "plain" if source == "plain" else f"host_{shape}" if source in HOST else shape
    tapped = 0 if source in ("plain", *HOST) else TAPPED
    reported = REPORTED if case.sampling in ("logprobs", "grammar") else 0
    return draft, PASSES[case.family] + tapped, getattr(choice, shape), method.rest + reported


def usual() -> list[Case]:
    """Pairs of all families, methods and kinds of drafts; and of all parameters with each shape."""
    methods = [name for name in METHODS if name not in MTP]
    every = list(product(FAMILIES, methods, ("greedy", "drawn", "cut"), NUMBERS))
    sampled = list(product(FAMILIES, SHAPED, CHOICES, NUMBERS))
    mtp = [("mimo", name, sampling, 1) for name in MTP for sampling in ("greedy", "drawn", "cut")]
    chosen = [rows[at] for rows in (every, sampled) for at in cover(rows)]
    return [Case(*row) for row in dict.fromkeys([*chosen, *mtp])]


def named(cases: Iterator[Any] | Sequence[Any] | dict[Any, Any]) -> list[Any]:
    """pytest's parameters: cases, and what belongs to each."""
    rows = cases.items() if isinstance(cases, dict) else [(case,) for case in cases]
    return [
        pytest.param(*row, id="-".join(str(one) for one in row[0] if one not in (False, ())))
        for row in rows
    ]


def waiting(reasons: dict[Any, str], names: Sequence[str]) -> list[Any]:
    """pytest's parameters that are expected to wait."""
    return [
        pytest.param(
            case, id=name, marks=pytest.mark.xfail(reason=why, raises=HostWaitError, strict=True)
        )
        for (case, why), name in zip(reasons.items(), names, strict=True)
    ]


def test_every_method_has_a_budget():
    assert METHODS.keys() >= {*NETWORKS, *MTP}


# While a model is loaded on the CPU, rows without an expert hold any bits between the products.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("family", PASSES)
def test_passes_of_a_family_keep_to_their_budget(family: str):
    check(Case(family, "plain", "greedy", 64), budget_of(Case(family, "plain", "greedy")))


@pytest.mark.parametrize("family", waiting(WAITING_PASSES, [*WAITING_PASSES]))
def test_passes_of_a_family_wait_for_nothing(family: str):
    counts_of(Case(family, "plain", "greedy", 64))


@pytest.mark.parametrize("case", named(usual()))
def test_usual_steps_keep_to_their_budgets(case: Case):
    check(case, budget_of(case))


@pytest.mark.parametrize(("case", "budget"), named(STEPS))
def test_steps_keep_to_their_budgets(case: Case, budget: tuple[int, ...]):
    check(case, budget)


@pytest.mark.parametrize(("case", "budget"), named(GRAPHED))
def test_steps_with_graphs_keep_to_their_budgets(case: Case, budget: tuple[int, ...]):
    check(case, budget)


@pytest.mark.parametrize("case", waiting(WAITING_STEPS, [f"{c[0]}-{c[1]}" for c in WAITING_STEPS]))
def test_steps_wait_for_nothing(case: Case):
    counts_of(case)


def test_texts_with_blocks_left_out_are_read_without_waiting(monkeypatch: pytest.MonkeyPatch):
    """The masses of blocks are known here; to read them is what waits."""
    monkeypatch.setattr(AttendedBlocks, "_masses", lambda _, asks: torch.zeros(len(asks), 99))
    counts_of(Case("qwen2", "self", "drawn", 1, kind="long", options=(("kv_budget", 16),)))


@pytest.mark.parametrize(
    ("case", "budget"),
    [
        pytest.param(
            case,
            budget,
            id=case.method,
            marks=pytest.mark.xfail(reason=why, raises=AssertionError, strict=True),
        )
        for case, (budget, why) in EXCESSIVE.items()
    ],
)
def test_steps_launch_no_more_than_they_should(case: Case, budget: tuple[int, ...]):
    check(case, budget)
