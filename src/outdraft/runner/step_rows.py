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
from outdraft.kernels.ops import Kernels
from outdraft.runner.device_state import state_row
from outdraft.runner.step_kernels import index_rows, read_token_ids, shape_rows
from outdraft.verification.draft_batch import DraftBatch, ancestors_BN1N, depths_BN1
from outdraft.verification.verify import Verdict


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step. All tensors are on the device.

    Attributes:
        state_index_T: int64; where a row's token stands in the flat texts of the device state,
            0 for drafted rows.
        draft_index_T: int64; where a drafted row's token stands in the flat drafts, else -1.
        logit_rows_R: int64; per sampling request its root, then its drafts.
        state_rows_B, num_tokens_B, prompt_lens_B: of the sampling requests, int64.
        root_rows_B: int64; the row of each sampling request's root.
        chunk_rows_C, chunk_state_rows_C: int64; the last row, and the row of the device state, of
            requests that do not sample.
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
    root_rows_B: Tensor
    chunk_rows_C: Tensor
    chunk_state_rows_C: Tensor
    draft_slots_BN: Tensor

    def shaped_by(self, drafts: DraftBatch) -> "StepRows":
        """The same rows, with positions and ancestors that follow from the drafts' parents."""
        if drafts.device.type == "cpu":
            return self.shaped_on_cpu(drafts)
        return self.shaped_on_any_device(drafts)

    def shaped_on_any_device(self, drafts: DraftBatch) -> "StepRows":
        """As `shaped_by`."""
        depths_BN = depths_BN1(drafts)[:, 1:]
        positions_BN = self.num_tokens_B[:, None] - 1 + depths_BN
        bits_N = 1 << torch.arange(drafts.width, device=drafts.device)
        ancestors_BN = (ancestors_BN1N(drafts)[:, 1:] * bits_N).sum(2)
        index_T, is_draft_T = self.draft_index_T.clamp_min(0), self.draft_index_T >= 0
        metadata = replace(
            self.metadata,
            positions_T=torch.where(
                is_draft_T, positions_BN.flatten()[index_T], self.metadata.positions_T
            ),
            ancestors_T=torch.where(
                is_draft_T, ancestors_BN.flatten()[index_T], self.metadata.ancestors_T
            ),
        )
        return replace(self, metadata=metadata)

    def shaped_on_cpu(self, drafts: DraftBatch) -> "StepRows":
        """As `shaped_by`, in one compiled call."""
        positions_T = self.metadata.positions_T.clone()
        ancestors_T = self.metadata.ancestors_T.clone()
        shape_rows(
            drafts.parents_BN.numpy(),
            self.draft_index_T.numpy(),
            positions_T.numpy(),
            ancestors_T.numpy(),
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
        drafted_T = drafts.token_ids_BN.reshape(-1)[self.draft_index_T.clamp_min(0)].clamp_min(0)
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
    state_rows_W = np.array([state_row(work.request) for work in works])
    num_rows, num_sampling = len(layout.positions_T), sum(work.samples for work in works)
    num_logits = sum(1 + work.num_drafts for work in works if work.samples)
    state_index_T = np.empty(num_rows, dtype=np.int64)
    draft_index_T = np.empty(num_rows, dtype=np.int64)
    logit_rows_R = np.empty(num_logits, dtype=np.int64)
    root_rows_B = np.empty(num_sampling, dtype=np.int64)
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
        root_rows_B,
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
    is_chunk_W = ~samples_W
    extra = [
        state_index_T,
        draft_index_T,
        logit_rows_R,
        *sampling_3B,
        root_rows_B,
        layout.query_start_B1[1:][is_chunk_W].astype(np.int64) - 1,
        state_rows_W[is_chunk_W],
        draft_slots_BN,
    ]
    metadata, sent = send(layout, extra, device)
    return StepRows(metadata, *sent)


def _parents(work: Work) -> Sequence[int]:
    """Parents of the work's drafted rows; a chain stands where the network will draft a tree."""
    if work.drafts is None:
        return ()
    return range(len(work.drafts)) if work.drafts.num_model_drafts else work.drafts.draft.parents
