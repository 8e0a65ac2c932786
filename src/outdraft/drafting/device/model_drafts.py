"""What a drafter on the device is asked for, and what comes of it.

Dimension key: B requests that draft, K drafts, V vocabulary, S state rows, L tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftModelAsk:
    """One request that the model drafts for.

    Attributes:
        state_row: its row in token_ids_SL.
        num_tokens: length of its text.
        num_computed: tokens of it that the drafter has in its cache.
        num_drafts: K of this request, at least 1.
        block_ids: cover the text, `continued`, and num_drafts slots more.
        continued: a chain that another proposer has drafted; these drafts continue it.
    """

    state_row: int
    num_tokens: int
    num_computed: int
    num_drafts: int
    block_ids: Sequence[int]
    continued: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelDrafts:
    """One tree per ask.

    Attributes:
        token_ids_BK: int64; -1 past the drafts that a request wants.
        parents_BK: int64; row that each draft continues, as in `Draft`. Row 0 is the last token
            before the drafts.
        num_drafts_B: int64; how many each request wanted.
        probs_BKV: float32, what sampled drafts were drawn from; None if all are deterministic.
        is_sampled_BK: bool, which drafts were drawn from probs_BKV; None with it.
        is_chain: known on the host: all trees are chains.
        all_sampled: known on the host: of every request some were.
    """

    token_ids_BK: Tensor
    parents_BK: Tensor
    num_drafts_B: Tensor
    probs_BKV: Tensor | None = None
    is_sampled_BK: Tensor | None = None
    is_chain: bool = False
    all_sampled: bool = False
