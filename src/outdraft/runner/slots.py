"""What the runner keeps of the requests between steps, by slot: what plans told, added up."""

from array import array
from collections.abc import Mapping, Sequence

from outdraft.core.admission import Admission
from outdraft.core.drafter_gap import NO_GAP
from outdraft.core.plan import Work


class RequestSlot:
    """The request that has a row of the device's state.

    Attributes:
        row: the row.
        token_ids: int32; the text at the admission. What came later is on the device only.
        block_ids: int32, the request's blocks; they cover the rows of its newest work.
        gap: what the drafter lacks of the text.
    """

    __slots__ = ("block_ids", "gap", "num_prompt", "row", "rules", "token_ids")

    def __init__(self, admission: Admission) -> None:
        self.row = admission.slot
        self.rules = admission.rules
        self.token_ids = admission.token_ids
        self.num_prompt = admission.num_prompt
        self.block_ids = array("i")
        self.gap = NO_GAP

    def update(self, work: Work) -> None:
        """Take the news of a work. Each must come once, in the order of the plans."""
        num_known = len(self.block_ids)
        if work.num_kept_blocks != num_known:
            assert work.num_kept_blocks < num_known, "news of blocks were lost"
            del self.block_ids[work.num_kept_blocks :]
        if work.new_block_ids:
            self.block_ids.extend(work.new_block_ids)
        if work.gap is not None:
            self.gap = work.gap

    @property
    def drafter_block_ids(self) -> Sequence[int]:
        """The drafter's blocks."""
        return self.gap.blocks(self.block_ids)


Slots = Mapping[int, RequestSlot]
