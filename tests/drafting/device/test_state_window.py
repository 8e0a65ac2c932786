"""The window holds the newest states of every text, in memory that does not grow."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outdraft.core.draft import MAX_DRAFTS, STATE_WINDOW
from outdraft.drafting.device.asks import StateWindow
from outdraft.kernels.ops import Kernels
from outdraft.kernels.torch.table import reference_kernels
from tests.kernels.tables import cpu_kernels

CPU = torch.device("cpu")


@pytest.mark.parametrize("kernels", [reference_kernels(), cpu_kernels()], ids=lambda x: x.name)
@given(
    num_rows=st.integers(1, 4),
    size=st.integers(1, 9),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=30),
)
def test_the_newest_states_of_each_text_are_found_in_memory_that_never_grows(
    kernels: Kernels, num_rows: int, size: int, steps: list[tuple[int, int]]
):
    window = StateWindow(num_rows, 2, torch.float64, CPU, size)
    whole, lengths = window.features_NF, [0] * num_rows
    for row, count in ((row % num_rows, min(count, size)) for row, count in steps):
        start = lengths[row]
        tokens = torch.arange(start, start + count, dtype=torch.float64)
        states_TF = torch.stack([torch.full((count,), row).double(), tokens], dim=1)
        refused_TF = torch.full((2, 2), -7.0, dtype=torch.float64)
        places = [*window.places(row, start, count), -1, -1]
        states_TF = torch.cat([states_TF, refused_TF])
        kernels.copy_rows(window.features_NF, torch.tensor(places), states_TF)
        lengths[row] += count
        for other, length in enumerate(lengths):
            first = max(0, length - size)
            found_TF = window.features_NF[window.places(other, first, length - first)]
            assert found_TF.tolist() == [[other, token] for token in range(first, length)]
    assert window.features_NF is whole
    assert whole.shape == (num_rows * size + 1, 2)


def test_whatever_a_step_settles_finds_room():
    assert STATE_WINDOW > MAX_DRAFTS
