"""Ranks that part are found out on all ranks, in the step in which they did."""

from dataclasses import replace

import pytest
import torch

from outdraft.core.errors import PartedError
from outdraft.core.plan import StepResult, WorkResult
from outdraft.distributed.group import Ranks
from outdraft.runner.parallel_runner import SameSteps
from tests.ranks import on_ranks

RESULT = StepResult((WorkResult((5, 6), (1,), (5, 7), (0, 1)), WorkResult()), 4)


def parted(ranks: Ranks, odd: StepResult, told: bytes) -> list[str]:
    """What each of three steps is called, of which rank 2 has another second one."""
    same, errors = SameSteps(ranks.target, torch.device("cpu")), list[str]()
    for step in range(3):
        is_odd = step == 1 and ranks.target.rank == 2
        same.add(b"plan")
        same.add(told if is_odd else b"masks")
        try:
            same.check(odd if is_odd else RESULT)
        except PartedError as error:
            errors.append(str(error))
        else:
            errors.append("")
    return errors


@pytest.mark.parametrize("name", ["token_ids", "accepted_rows", "drafted_ids", "drafted_parents"])
def test_ranks_that_choose_other_things_are_found_out_on_all_ranks(name: str):
    odd = replace(RESULT, works=(replace(RESULT.works[0], **{name: (9,)}), RESULT.works[1]))
    for errors in on_ranks(3, 1, lambda ranks: parted(ranks, odd, b"masks")):
        assert errors[0] == errors[2] == ""
        assert "in step 2 rank 2 chose something else than rank 0" in errors[1]


def test_ranks_that_were_told_other_things_are_found_out_on_all_ranks():
    for errors in on_ranks(3, 1, lambda ranks: parted(ranks, RESULT, b"other")):
        assert errors[0] == errors[2] == ""
        assert "in step 2 rank 2 was told something else than rank 0" in errors[1]
