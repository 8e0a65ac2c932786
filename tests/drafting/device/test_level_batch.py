"""The batch of a tree's level: the compiled one is that of any device."""

from dataclasses import fields

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outdraft.core.draft import MAX_DRAFTS
from outdraft.drafting.device.draft_tree import Frontier
from outdraft.drafting.device.level_batch import level_batch_on_any_device, level_batch_on_cpu


@settings(max_examples=60, deadline=None)
@given(
    contexts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    width=st.integers(1, 5),
    first_row=st.integers(0, MAX_DRAFTS - 5),
    depth=st.integers(1, 6),
    block_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 1000),
)
def test_the_compiled_batch_is_the_same(
    contexts: list[int], width: int, first_row: int, depth: int, block_size: int, seed: int
):
    generator = torch.Generator().manual_seed(seed)
    shape = (len(contexts), width)
    frontier = Frontier(
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape, dtype=torch.int64),
        torch.randint(-(2**62), 2**62, shape, generator=generator),
        depth,
        first_row,
    )
    num_drafts_B = torch.randint(1, MAX_DRAFTS + 1, (len(contexts),), generator=generator)
    num_blocks = (40 + MAX_DRAFTS) // block_size + 1
    table_BP = torch.randint(0, 99, (len(contexts), num_blocks), generator=generator).int()

    mine, other = (
        make(frontier, torch.tensor(contexts), num_drafts_B, table_BP, block_size, 77)
        for make in (level_batch_on_cpu, level_batch_on_any_device)
    )

    for field in fields(mine):
        got, want = getattr(mine, field.name), getattr(other, field.name)
        if isinstance(want, Tensor):
            assert torch.equal(got, want), field.name
            assert got.dtype is want.dtype
            assert got.is_contiguous()
        else:
            assert got == want
