"""What a drafter on the device is asked for.

Dimension key: K drafts, S state rows, L tokens.
"""

from collections.abc import Sequence

from msgspec import Struct

from outdraft.core.decision import LiveStop


class DraftModelAsk(Struct, frozen=True):
    """One request that the model drafts for.

    Attributes:
        state_row: its row in token_ids_SL.
        num_tokens: length of its text.
        num_computed: tokens of it that the drafter has in its cache, less those of a gap.
        num_drafts: K of this request, at least 1.
        block_ids: of the drafter; they cover the text without the gap, and num_drafts slots more.
        masks: tokens that the drafter reads behind the text, to say what stands in their places.
        stop: where its chain may end before it has num_drafts; None: nowhere.
        num_missing: tokens of the gap. For the drafter there is no gap: a token's place in its
            cache is by so much smaller than in the text.
        num_skipped: tokens that its blocks leave out: their places are by so much smaller than in
            the text, but positions are those of the text.
        levels: rows of each level of its tree; (): a chain.
    """

    state_row: int
    num_tokens: int
    num_computed: int
    num_drafts: int
    block_ids: Sequence[int]
    masks: tuple[int, ...] = ()
    stop: LiveStop | None = None
    num_missing: int = 0
    num_skipped: int = 0
    levels: tuple[int, ...] = ()
