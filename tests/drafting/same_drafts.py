"""Drafts of one call against those of single levels."""

import torch

from outdraft.kernels.data.drafts import DraftBatch


def check_same_drafts(mine: DraftBatch, theirs: DraftBatch) -> None:
    """Ids and parents are equal, margins and probabilities nearly."""
    assert torch.equal(mine.num_drafts_B, theirs.num_drafts_B)
    for b, count in enumerate(mine.num_drafts_B.tolist()):
        assert mine.token_ids_BN[b, :count].tolist() == theirs.token_ids_BN[b, :count].tolist()
        assert mine.parents_BN[b, :count].tolist() == theirs.parents_BN[b, :count].tolist()
    assert (mine.is_chain, mine.all_sampled) == (theirs.is_chain, theirs.all_sampled)
    if theirs.margins_BL is not None:
        assert mine.margins_BL is not None
        width = theirs.margins_BL.shape[1]
        got_BL, want_BL = mine.margins_BL[:, :width], theirs.margins_BL
        torch.testing.assert_close(got_BL, want_BL, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert mine.margins_BL[:, width:].isnan().all()
    if theirs.is_sampled_BN is None or theirs.probs_BNV is None:
        assert mine.is_sampled_BN is mine.probs_BNV is None
        return
    assert mine.probs_BNV is not None
    width = theirs.is_sampled_BN.shape[1]
    is_drawn_BK = theirs.is_sampled_BN & (torch.arange(width) < theirs.num_drafts_B[:, None])
    torch.testing.assert_close(
        mine.probs_BNV[:, :width][is_drawn_BK],
        theirs.probs_BNV[is_drawn_BK],
        rtol=1e-4,
        atol=1e-6,
    )
