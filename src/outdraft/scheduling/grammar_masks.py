"""What the grammars of a step's requests allow behind each row that is verified.

Masks are made beside the requests, whose matchers stay there; the masks cross to the runner while
it computes the target's pass.

Dimension key: B requests that sample, N drafts of one, R rows whose logits are needed, W int32
words of a mask of one bit per token.
"""

from collections.abc import Sequence

import numpy as np

from outdraft.core.allowed import AllowedTokens, Drafted
from outdraft.core.plan import Work
from outdraft.core.scheduled import ScheduledStep


def allowed_tokens(step: ScheduledStep, drafted: Drafted, vocab_size: int) -> AllowedTokens:
    """The masks of all rows whose logits are needed; a grammar that fails notes it itself."""
    pairs = zip(step.requests, step.works, strict=True)
    sampling = [(request, work) for request, work in pairs if work.samples]
    num_rows = sum(drafted.num_drafts) + len(drafted.num_drafts)
    masks_RW = np.full((num_rows, -(-vocab_size // 32)), -1, dtype=np.int32)
    ends: list[tuple[int, int]] = []
    start = 0
    for place, ((request, work), number) in enumerate(
        zip(sampling, drafted.num_drafts, strict=True)
    ):
        if request.grammar is not None:
            token_ids, parents = _draft(work, place, drafted)
            own_RW = masks_RW[start : start + 1 + len(token_ids)]
            rows = request.grammar.fill_masks(token_ids, parents, own_RW)
            ends += [(place, row - 1) for row in rows]
        start += 1 + number
    return AllowedTokens(masks_RW, np.array(ends, dtype=np.int64).reshape(-1, 2).T)


def _draft(work: Work, place: int, drafted: Drafted) -> tuple[Sequence[int], Sequence[int]]:
    """Ids and parents of what is verified for a work."""
    if work.drafts is None:
        return (), ()
    if not work.drafts.num_model_drafts:
        return work.drafts.draft.token_ids, work.drafts.draft.parents
    if not drafted.num_drafts[place]:  # a live rule ended it before its first draft
        return (), ()
    assert drafted.drafts_2BN is not None
    token_ids, parents = drafted.drafts_2BN[:, place, : drafted.num_drafts[place]].tolist()
    return token_ids, parents
