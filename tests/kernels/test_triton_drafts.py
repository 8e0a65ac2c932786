"""Levels on a GPU: drawn and placed by kernels of their own, as the reference does it.

Without a GPU the kernels are interpreted.
"""

import numpy as np
import pytest
import torch

from outdraft.kernels.draft_ops import DraftStart, LevelTask
from outdraft.kernels.torch.table import reference_kernels

pytest.importorskip("triton", reason="needs triton")
from outdraft.kernels.triton import drafting

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
each_device = pytest.mark.parametrize("device", DEVICES)
REFERENCE = reference_kernels()


@each_device
@pytest.mark.parametrize("size", [1, 7, 1024, 2501])
def test_a_chains_token_is_drawn_from_all_splits_of_the_vocabulary(device: str, size: int):
    rng = np.random.default_rng(size)
    logits_BEV = torch.tensor(rng.normal(0, 3, (4, 1, size))).float()
    logits_BEV[torch.tensor(rng.random(logits_BEV.shape) < 0.3)] = -torch.inf
    logits_BEV[:3, 0, size // 2] = 1.0  # no row is without mass, but the last one may be
    logits_BEV[3] = -torch.inf
    weight_BE = torch.tensor(rng.random((4, 1))).float()
    numbers = [torch.tensor(rng.integers(1, most, 4)) for most in (1 << 40, 5000, 1 << 62)]
    task = LevelTask(1, torch.tensor([1, 0, 2, 1]), 3, *numbers, torch.ones(4, dtype=torch.bool))
    sent = LevelTask(
        1, task.num_kept_B.to(device), 3, *(one.to(device) for one in numbers), task.draws_B
    )
    got = drafting.draw_level(logits_BEV.to(device), weight_BE.to(device), sent)
    want = REFERENCE.draw_level(logits_BEV, weight_BE, task)
    assert torch.equal(got.token_ids_BF.cpu(), want.token_ids_BF)
    assert torch.equal(got.origins_BF.cpu(), want.origins_BF)
    assert (
        got.is_drawn_BF.tolist() == want.is_drawn_BF.tolist() == [[True], [False], [True], [False]]
    )
    drawn = want.is_drawn_BF[:, 0]
    torch.testing.assert_close(got.probs_BFV.cpu()[drawn], want.probs_BFV[drawn])
    torch.testing.assert_close(got.weight_BF.cpu()[:3], want.weight_BF[:3])


@each_device
def test_the_lower_id_of_a_tie_is_drawn(device: str):
    """Tokens without mass are the only ones that can tie."""
    zeros_B = torch.zeros(1, dtype=torch.int64, device=device)
    task = LevelTask(1, zeros_B + 1, 0, zeros_B + 9, zeros_B + 9, zeros_B, zeros_B == 0)
    logits_BEV = torch.full((1, 1, 3000), -torch.inf, device=device)
    level = drafting.draw_level(logits_BEV, torch.ones(1, 1, device=device), task)
    assert level.token_ids_BF.tolist() == [[0]]
    assert level.is_drawn_BF.tolist() == [[False]]


@each_device
def test_a_level_stands_behind_its_text_and_sees_its_own_rows(device: str):
    rng = np.random.default_rng(1)
    ancestors_BF = torch.tensor(rng.integers(0, 2**62, (5, 3)))
    contexts_B = torch.tensor(rng.integers(1, 40, 5))
    table_BP = torch.tensor(rng.integers(0, 99, (5, 30))).int()
    for first_row in (0, 1, 30, 60):
        numbers_B = torch.tensor(rng.integers(1, 64, 5))
        places = [
            one.cpu()
            for one in drafting.place_level(
                ancestors_BF.to(device),
                first_row,
                numbers_B.to(device),
                start_of(contexts_B.to(device), table_BP.to(device)),
            )
        ]
        wanted = REFERENCE.place_level(
            ancestors_BF, first_row, numbers_B, start_of(contexts_B, table_BP)
        )
        assert all(torch.equal(*pair) for pair in zip(places, wanted, strict=True))


def start_of(contexts_B: torch.Tensor, table_BP: torch.Tensor) -> DraftStart:
    return DraftStart(torch.empty(5, 0), [], contexts_B, table_BP, 4, 120)
