"""What a drafter that reads the target's states gets of a step.

Dimension key: T rows, K tapped layers, D hidden.
"""

from collections.abc import Sequence

from torch import Tensor

from outdraft.core.plan import Work
from outdraft.drafting.device.model_drafts import DraftModelAsk
from outdraft.drafting.device.target_states import ChunkRead
from outdraft.runner.slots import Slots


def spread_rows(states_RD: Tensor, rows_R: Tensor, num_rows: int) -> Tensor:
    """[T, D]: the states in their rows of the pass, rising; zeros in all others."""
    return states_RD.new_zeros((num_rows, states_RD.shape[1])).index_copy_(0, rows_R, states_RD)


def chunk_reads(works: Sequence[Work], slots: Slots) -> list[ChunkRead]:
    """What a drafter reads of the works now."""
    reads: list[ChunkRead] = []
    first = 0
    for work in works:
        if work.num_drafter_reads:
            slot = slots[work.slot]
            text = DraftModelAsk(
                state_row=work.slot,
                num_tokens=work.start + work.num_drafter_reads + 1,  # it reads ahead
                num_computed=work.start,
                num_drafts=0,
                block_ids=slot.drafter_block_ids,
                num_missing=slot.gap.num_tokens,
            )
            reads.append(ChunkRead(text, first))
        first += work.num_rows
    return reads
