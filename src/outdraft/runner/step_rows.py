"""Which rows a step computes: their tokens, their places, and which of them need logits.

Dimension key: B requests that sample in this step, C others, N most drafts of one of them, T rows,
R rows whose logits are needed, S state rows, L tokens, W works.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata
from outdraft.attention.rows import Span, lay_out, send
from outdraft.core.plan import Work
from outdraft.core.request import Request
from outdraft.kernels.data.drafts import DraftBatch, Verdict
from outdraft.kernels.ops import Kernels


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step. All tensors are on the device.

    Attributes:
        state_index_T, draft_index_T, logit_rows_R, root_rows_B, draft_slots_BN: as in RowIndex;
            the texts are those of the device state.
        state_rows_B, num_tokens_B, prompt_lens_B: of the sampling requests, int64.
        chunk_rows_C, chunk_state_rows_C: int64; the last row, and the row of the device state, of
            requests that do not sample.
    """

    metadata: AttentionMetadata
    state_index_T: Tensor
    draft_index_T: Tensor
    logit_rows_R: Tensor
    state_rows_B: Tensor
    num_tokens_B: Tensor
    prompt_lens_B: Tensor
    root_rows_B: Tensor
    chunk_rows_C: Tensor
    chunk_state_rows_C: Tensor
    draft_slots_BN: Tensor

    def shaped_by(self, drafts: DraftBatch, kernels: Kernels) -> "StepRows":
        """The same rows, with positions and ancestors that follow from the drafts' parents."""
        positions_T, ancestors_T = kernels.shape_rows(
            drafts.parents_BN.contiguous(),
            self.draft_index_T,
            self.metadata.positions_T,
            self.metadata.ancestors_T,
        )
        metadata = replace(self.metadata, positions_T=positions_T, ancestors_T=ancestors_T)
        return replace(self, metadata=metadata)

    def kept_slots_T(self, verdict: Verdict) -> Tensor:
        """int64 [T]: where each row stands from now on, -1 for drafts that were refused."""
        is_draft_T = self.draft_index_T >= 0
        slots_T = self.metadata.slots_T.masked_fill(is_draft_T, -1)
        num_rows, width = len(slots_T), verdict.rows_BN.shape[1]
        if width == 0:
            return slots_T
        # Refused places go to one row more, which is cut off.
        rows_BN = self.root_rows_B[:, None] + 1 + verdict.rows_BN
        rows_BN = torch.where(verdict.rows_BN >= 0, rows_BN, num_rows)
        slots_T = torch.nn.functional.pad(slots_T, (0, 1))
        return slots_T.scatter(0, rows_BN.flatten(), self.draft_slots_BN.flatten())[:num_rows]

    def last_rows_B(self, verdict: Verdict) -> Tensor:
        """int64 [B]: the row of each text's last computed token."""
        if verdict.rows_BN.shape[1] == 0:
            return self.root_rows_B
        last_B = (verdict.num_emitted_B - 2).clamp_min(0)
        row_B = verdict.rows_BN.gather(1, last_B[:, None])[:, 0]  # -1 if none was accepted
        return self.root_rows_B + 1 + row_B


def step_rows(
    works: Sequence[Work],
    width: int,
    block_size: int,
    row_len: int,
    device: torch.device,
    kernels: Kernels,
) -> StepRows:
    """Lay the works out, and send all of it in one copy.

    Args:
        width: N.
        row_len: of the device state.
    """
    spans = [Span(work.start, work.num_new, _parents(work), work.block_ids) for work in works]
    layout = lay_out(spans, block_size, kernels)
    samples_W = np.array([work.samples for work in works])
    state_rows_W = np.array([state_row(work.request) for work in works], dtype=np.int64)
    index = kernels.index_rows(
        layout.placed, layout.num_causal_B, samples_W, state_rows_W, row_len, width
    )
    sampling_3B = np.array(
        [
            (state_row(work.request), work.request.num_tokens, work.request.num_prompt)
            for work in works
            if work.samples
        ],
        dtype=np.int64,
    )
    sampling_3B = sampling_3B.reshape(-1, 3).T.copy()
    is_chunk_W = ~samples_W
    extra = [
        index.state_index_T,
        index.draft_index_T,
        index.logit_rows_R,
        *sampling_3B,
        index.root_rows_B,
        layout.placed.query_start_B1[1:][is_chunk_W].astype(np.int64) - 1,
        state_rows_W[is_chunk_W],
        index.draft_slots_BN,
    ]
    metadata, sent = send(layout, extra, device)
    return StepRows(metadata, *sent)


def state_row(request: Request) -> int:
    """The row of the device state that a running request has."""
    assert request.slot is not None, f"request {request.id} is not running"
    return request.slot


def _parents(work: Work) -> Sequence[int]:
    """Parents of the work's drafted rows; a chain stands where the network will draft a tree."""
    if work.drafts is None:
        return ()
    return range(len(work.drafts)) if work.drafts.num_model_drafts else work.drafts.draft.parents
