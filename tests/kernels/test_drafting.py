"""Growing trees: each library places and draws their levels as the reference does."""

from dataclasses import astuple

import torch
from hypothesis import strategies as st

from outdraft.core.draft import MAX_DRAFTS
from tests.kernels.comparisons import Case

MOST_CONTEXT = 40


def compare_place_level(case: Case) -> None:
    draw, rng = case.data.draw, case.rng()
    block_size = draw(st.sampled_from([1, 4, 16]), "block size")
    num_requests, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    first_row = draw(st.integers(0, MAX_DRAFTS - width), "first row")
    num_blocks = (MOST_CONTEXT + MAX_DRAFTS) // block_size + 1
    ancestors_BF = torch.tensor(rng.integers(0, 2**62, (num_requests, width)))
    contexts_B = torch.tensor(rng.integers(1, MOST_CONTEXT, num_requests))
    num_drafts_B = torch.tensor(rng.integers(1, MAX_DRAFTS + 1, num_requests))
    table_BP = torch.tensor(rng.integers(0, 99, (num_requests, num_blocks))).int()
    level = (ancestors_BF, first_row, contexts_B, num_drafts_B, table_BP, block_size)
    got, want = (one.place_level(*level) for one in (case.kernels, case.reference))
    for ours, theirs in zip(astuple(got), astuple(want), strict=True):
        assert ours.dtype is theirs.dtype
        assert ours.is_contiguous()
        assert torch.equal(ours, theirs)


COMPARISONS = {"place_level": compare_place_level}
