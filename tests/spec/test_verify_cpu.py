"""The compiled walk agrees with the tensor one on any batch of trees."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.core.draft import Draft
from outdraft.spec.draft_batch import DraftBatch, row_index_BN1
from outdraft.spec.verify import match_draft
from outdraft.spec.verify_cpu import match_draft_cpu


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.booleans(), st.integers(0, 1 << 30))
def test_walks_agree(sizes: list[int], chains: bool, seed: int):
    rng = np.random.default_rng(seed)
    drafts = []
    for size in sizes:
        tokens = rng.integers(0, 3, size).tolist()
        parents = range(size) if chains else [int(rng.integers(0, row + 1)) for row in range(size)]
        drafts.append(Draft(tuple(tokens), tuple(parents)))
    batch = DraftBatch.from_drafts(drafts, "cpu")
    choices_R = torch.from_numpy(rng.integers(0, 3, sum(sizes) + len(sizes)))
    fast = match_draft_cpu(choices_R, batch)
    slow = match_draft(choices_R[row_index_BN1(batch)], batch)
    assert torch.equal(fast.token_ids_BN1, slow.token_ids_BN1)
    assert torch.equal(fast.num_emitted_B, slow.num_emitted_B)
    assert torch.equal(fast.rows_BN, slow.rows_BN)
