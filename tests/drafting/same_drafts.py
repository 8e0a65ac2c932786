"""Drafts of one call against those of single levels."""

import torch

from outdraft.kernels.draft_ops import ModelDrafts


def check_same_drafts(mine: ModelDrafts, theirs: ModelDrafts) -> None:
    """Ids and parents are equal, margins and probabilities nearly."""
    assert torch.equal(mine.num_drafts_B, theirs.num_drafts_B)
    for b, count in enumerate(mine.num_drafts_B.tolist()):
        assert mine.token_ids_BK[b, :count].tolist() == theirs.token_ids_BK[b, :count].tolist()
        assert mine.parents_BK[b, :count].tolist() == theirs.parents_BK[b, :count].tolist()
    assert (mine.is_chain, mine.all_sampled) == (theirs.is_chain, theirs.all_sampled)
    if theirs.margins_BL is not None:
        assert mine.margins_BL is not None
        width = theirs.margins_BL.shape[1]
        got_BL, want_BL = mine.margins_BL[:, :width], theirs.margins_BL
        torch.testing.assert_close(got_BL, want_BL, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert mine.margins_BL[:, width:].isnan().all()
    if theirs.is_sampled_BK is None or theirs.probs_BKV is None:
        assert mine.is_sampled_BK is mine.probs_BKV is None
        return
    assert mine.probs_BKV is not None
    width = theirs.is_sampled_BK.shape[1]
    is_drawn_BK = theirs.is_sampled_BK & (torch.arange(width) < theirs.num_drafts_B[:, None])
    torch.testing.assert_close(
        mine.probs_BKV[:, :width][is_drawn_BK],
        theirs.probs_BKV[is_drawn_BK],
        rtol=1e-4,
        atol=1e-6,
    )
