"""What a drafter that reads the target's states gets of a step.

Dimension key: B requests that sample in this step, C others, T rows, N most drafts of one of them,
K tapped layers, D hidden.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outdraft.core.plan import Work
from outdraft.drafting.device.model_drafts import DraftModelAsk
from outdraft.drafting.device.target_states import ChunkRead, TargetStates
from outdraft.kernels.data.drafts import Verdict
from outdraft.kernels.ops import Kernels
from outdraft.runner.device_state import DeviceState
from outdraft.runner.step_rows import StepRows, state_row


def target_states(
    works: Sequence[Work],
    rows: StepRows,
    hidden_TD: Tensor,
    tapped_KTD: Tensor,
    verdict: Verdict | None,
    state: DeviceState,
    window: int,
    kernels: Kernels,
) -> TargetStates:
    """
    Args:
        verdict: on the requests that sample, whose new tokens are in the texts; None: none does.
        window: tokens of each text whose states the drafter keeps.
    """
    places_T, last_rows, state_rows = (
        _places(works, rows, state.row_len, window),
        rows.chunk_rows_C,
        rows.chunk_state_rows_C,
    )
    if verdict is not None:
        behind_N = torch.arange(rows.draft_slots_BN.shape[1], device=places_T.device)
        positions_BN = rows.num_tokens_B[:, None] + behind_N
        draft_places_BN = rows.state_rows_B[:, None] * window + positions_BN % window
        places_T, last_rows_B = rows.kept(places_T, draft_places_BN, verdict, kernels)
        last_rows = torch.cat([last_rows_B, last_rows])
        state_rows = torch.cat([rows.state_rows_B, state_rows])
    return TargetStates(
        hidden_TD,
        tapped_KTD,
        places_T,
        last_rows,
        state_rows,
        state.token_ids_SL,
        _reads(works),
    )


def _places(works: Sequence[Work], rows: StepRows, row_len: int, window: int) -> Tensor:
    """int64 [T]: of tokens of texts, as in TargetStates."""
    rows_T = rows.state_index_T.div(row_len, rounding_mode="floor")
    places_T = rows_T * window + rows.state_index_T % row_len % window
    first = 0
    for work in works:
        if work.num_new > window:
            places_T[first : first + work.num_new - window] = -1
        first += work.num_rows
    return places_T


def _reads(works: Sequence[Work]) -> list[ChunkRead]:
    reads: list[ChunkRead] = []
    first = 0
    for work in works:
        if work.num_drafter_reads:
            gap = work.request.drafter_gap
            text = DraftModelAsk(
                state_row=state_row(work.request),
                num_tokens=work.start + work.num_drafter_reads + 1,  # it reads ahead
                num_computed=work.start,
                num_drafts=0,
                block_ids=gap.blocks(work.block_ids),
                num_missing=gap.num_tokens,
            )
            reads.append(ChunkRead(text, first))
        first += work.num_rows
    return reads
