"""Which rows a step computes, on the device: their tokens, their places, whose logits are needed.

Dimension key: B requests that sample in this step, N most drafts of one of them, T rows,
R rows whose logits are needed, S state rows, L tokens, W works.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata
from outdraft.attention.rows import Span, lay_out, send
from outdraft.core.plan import Work
from outdraft.runner.device_state import state_row
from outdraft.runner.step_kernels import index_rows, read_token_ids
from outdraft.spec.draft_batch import DraftBatch


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step. All tensors are on the device.

    Attributes:
        state_index_T: int64; where a row's token stands in the flat texts of the device state,
            0 for drafted rows.
        draft_index_T: int64; where a drafted row's token stands in the flat drafts, else -1.
        logit_rows_R: int64; per sampling request its root, then its drafts.
        state_rows_B, num_tokens_B, prompt_lens_B: of the sampling requests, int64.
        draft_slots_BN: cache slots behind each root, int64, padded with -1; where drafts stand
            and where the accepted ones belong.
    """

    metadata: AttentionMetadata
    state_index_T: Tensor
    draft_index_T: Tensor
    logit_rows_R: Tensor
    state_rows_B: Tensor
    num_tokens_B: Tensor
    prompt_lens_B: Tensor
    draft_slots_BN: Tensor

    def token_ids(self, token_ids_SL: Tensor, drafts: DraftBatch | None) -> Tensor:
        """int64 [T], from the texts and the drafts."""
        if drafts is None:
            drafts = DraftBatch.empty(0, token_ids_SL.device)
        if token_ids_SL.device.type == "cpu":
            return self.token_ids_on_cpu(token_ids_SL, drafts)
        return self.token_ids_on_any_device(token_ids_SL, drafts)

    def token_ids_on_any_device(self, token_ids_SL: Tensor, drafts: DraftBatch) -> Tensor:
        """As `token_ids`."""
        ids_T = token_ids_SL.view(-1)[self.state_index_T]
        if drafts.width == 0:
            return ids_T
        drafted_T = drafts.token_ids_BN.reshape(-1)[self.draft_index_T.clamp_min(0)]
        return torch.where(self.draft_index_T >= 0, drafted_T, ids_T)

    def token_ids_on_cpu(self, token_ids_SL: Tensor, drafts: DraftBatch) -> Tensor:
        """As `token_ids`, in one compiled call."""
        ids_T = np.empty(len(self.state_index_T), dtype=np.int64)
        read_token_ids(
            token_ids_SL.numpy(),
            drafts.token_ids_BN.numpy(),
            self.state_index_T.numpy(),
            self.draft_index_T.numpy(),
            ids_T,
        )
        return torch.from_numpy(ids_T)


def step_rows(
    works: Sequence[Work], width: int, block_size: int, row_len: int, device: torch.device
) -> StepRows:
    """Lay the works out, and send all of it in one copy.

    Args:
        width: N.
        row_len: of the device state.
    """
    layout = lay_out(
        [Span(work.start, work.num_new, _parents(work), work.block_ids) for work in works],
        block_size,
    )
    samples_W = np.array([work.samples for work in works])
    state_rows_W = np.array([state_row(work.request) for work in works])
    num_rows, num_sampling = len(layout.positions_T), sum(work.samples for work in works)
    num_logits = sum(1 + work.num_drafts for work in works if work.samples)
    state_index_T = np.empty(num_rows, dtype=np.int64)
    draft_index_T = np.empty(num_rows, dtype=np.int64)
    logit_rows_R = np.empty(num_logits, dtype=np.int64)
    draft_slots_BN = np.empty((num_sampling, width), dtype=np.int64)
    index_rows(
        layout.query_start_B1,
        layout.num_causal_B,
        layout.positions_T,
        layout.slots_T,
        samples_W,
        state_rows_W,
        row_len,
        state_index_T,
        draft_index_T,
        logit_rows_R,
        draft_slots_BN,
    )
    sampling_3B = np.array(
        [
            (state_row(work.request), work.request.num_tokens, work.request.num_prompt)
            for work in works
            if work.samples
        ],
        dtype=np.int64,
    )
    sampling_3B = sampling_3B.reshape(num_sampling, 3).T.copy()
    metadata, sent = send(
        layout, [state_index_T, draft_index_T, logit_rows_R, *sampling_3B, draft_slots_BN], device
    )
    return StepRows(metadata, *sent)


def _parents(work: Work) -> Sequence[int]:
    """Parents of the work's drafted rows; what the model drafts is a chain."""
    if work.drafts is None:
        return ()
    return work.drafts.draft.parents or range(work.drafts.num_model_drafts)
