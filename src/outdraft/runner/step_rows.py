"""Which rows a step computes: their tokens, their places, and which of them need logits.

Dimension key: B requests that sample in this step, N most drafts of one of them, T rows,
R rows whose logits are needed, S state rows, L tokens, W works.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata
from outdraft.attention.rows import Span, lay_out
from outdraft.core.plan import Work
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.ops import Kernels
from outdraft.runner.slots import Slots


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step. All tensors are on the device.

    Attributes:
        state_index_T, draft_index_T, logit_rows_R, root_rows_B, draft_slots_BN: as in PlacedRows;
            the texts are those of the device state.
        state_rows_B, num_tokens_B, prompt_lens_B: of the sampling requests, int64.
    """

    metadata: AttentionMetadata
    state_index_T: Tensor
    draft_index_T: Tensor
    logit_rows_R: Tensor
    root_rows_B: Tensor
    draft_slots_BN: Tensor
    state_rows_B: Tensor
    num_tokens_B: Tensor
    prompt_lens_B: Tensor

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


def step_rows(
    works: Sequence[Work],
    slots: Slots,
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
    spans: list[Span] = []
    texts: tuple[list[int], list[int], list[int]] = ([], [], [])  # of the works that sample
    for work in works:
        slot, row, parents = slots[work.slot], work.slot, _parents(work)
        spans.append(
            Span(work.start, work.num_new, parents, slot.block_ids, row * row_len, work.samples)
        )
        if work.samples:
            facts = (row, work.num_tokens, slot.num_prompt)
            for column, fact in zip(texts, facts, strict=True):
                column.append(fact)
    metadata, sent = lay_out(spans, block_size, kernels, device, width, texts)
    return StepRows(metadata, *sent)


def _parents(work: Work) -> Sequence[int]:
    """Parents of the work's drafted rows; a chain stands where the network will draft a tree."""
    if work.drafts is None:
        return ()
    return range(len(work.drafts)) if work.drafts.num_model_drafts else work.drafts.draft.parents
