"""What a drafter lacks of a text that it follows, and where it keeps the rest.

A drafter that reads the target's states can only read where they are. States of tokens that were
computed while nobody wanted to draft are nowhere. So the drafter goes on behind a gap: for it, the
text behind the gap follows right on the text before. Its keys have other places than the target's
then, in the same blocks. Which text a drafter sees changes what it drafts, never what is emitted.
"""

from collections.abc import Sequence

from msgspec import Struct


class DrafterGap(Struct, array_like=True, frozen=True):
    """All that the drafter lacks of one text, as one gap.

    Attributes:
        num_tokens: how much further ahead a token stands in the text than in the drafter's cache.
        before: ids of the blocks that the drafter reads before the gap; all of them are full.
        next_block: place, in the request's table, of the block that is the next one for the
            drafter.
    """

    num_tokens: int = 0
    before: tuple[int, ...] = ()
    next_block: int = 0

    def blocks(self, block_ids: Sequence[int]) -> Sequence[int]:
        """The drafter's blocks, of a request that has `block_ids`."""
        if self.num_tokens == 0:
            return block_ids
        return [*self.before, *block_ids[self.next_block :]]

    def widened(
        self, num_read: int, start: int, block_ids: Sequence[int], block_size: int
    ) -> "DrafterGap":
        """The drafter has read so far, and goes on at `start`, not before `num_read`.

        What it has read stays as far as it fills blocks.
        """
        num_full = (num_read - self.num_tokens) // block_size
        before = tuple(self.blocks(block_ids)[:num_full])
        return DrafterGap(start - num_full * block_size, before, start // block_size)


NO_GAP = DrafterGap()
