"""From the host's view of a step (which request computes which rows) to the attention batch.

Everything is laid out on the host, compiled, and travels to the device in one copy.

Dimension key: B requests, T rows, P blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata

if TYPE_CHECKING:
    from outdraft.kernels.ops import Kernels, PlacedRows


class Span(NamedTuple):
    """The rows of one request in one forward pass.

    Attributes:
        context_len: tokens that the cache already holds.
        num_causal: tokens of the text to compute, at least 1.
        parents: of the drafted rows behind them, as in Draft; () unless it samples.
        block_ids: the request's blocks; they cover all rows.
        text_start: where its text begins in the flat texts.
        samples: the logits of the last causal row and of the drafted ones are wanted.
    """

    context_len: int
    num_causal: int
    parents: Sequence[int]
    block_ids: Sequence[int]
    text_start: int = 0
    samples: bool = True

    @property
    def num_rows(self) -> int:
        return self.num_causal + len(self.parents)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The numpy side of AttentionMetadata; fields as documented there."""

    placed: "PlacedRows"
    block_table_BP: np.ndarray
    max_rows: int
    max_seq_len: int


def lay_out(
    spans: Sequence[Span], block_size: int, kernels: "Kernels", width: int | None = None
) -> RowLayout:
    """Rows in request order; within a request causal rows first, then the draft's.

    `width`: the places of a request's drafts; None: as many as the longest has.
    """
    sizes = [(s.context_len, s.num_causal, len(s.parents), s.text_start, s.samples) for s in spans]
    sizes_5B = np.array(sizes, dtype=np.int64).T.copy()
    parents = np.array([up for s in spans for up in s.parents], dtype=np.int64)
    block_table_BP = np.zeros((len(spans), max(len(s.block_ids) for s in spans)), dtype=np.int32)
    for row_P, span in zip(block_table_BP, spans, strict=True):
        row_P[: len(span.block_ids)] = span.block_ids
    if width is None:
        width = max(num_drafts for _, _, num_drafts, _, _ in sizes)
    return RowLayout(
        placed=kernels.place_rows(sizes_5B, parents, block_table_BP, block_size, width),
        block_table_BP=block_table_BP,
        max_rows=max(count + num_drafts for _, count, num_drafts, _, _ in sizes),
        max_seq_len=max(held + count + more for held, count, more, _, _ in sizes),
    )


def send(
    layout: RowLayout, extra: Sequence[np.ndarray], device: torch.device
) -> tuple[AttentionMetadata, list[Tensor]]:
    """The layout and further int64 arrays on the device, in one copy.

    Returns the batch of the pass, and then, in order, what else PlacedRows has, from state_index_T
    on, and `extra`.
    """
    placed = layout.placed
    sent = to_device(
        [
            placed.query_start_W1,
            placed.context_lens_W,
            placed.num_causal_W,
            placed.ancestors_T,
            placed.positions_T,
            placed.slots_T,
            layout.block_table_BP,
            placed.state_index_T,
            placed.draft_index_T,
            placed.logit_rows_R,
            placed.root_rows_B,
            placed.draft_slots_BN,
            *extra,
        ],
        device,
    )
    metadata = AttentionMetadata(
        *sent[:7], max_rows=layout.max_rows, max_seq_len=layout.max_seq_len
    )
    return metadata, sent[7:]


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Tensors of the arrays' own shapes and integer types; one copy for all of them."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packed = torch.from_numpy(np.concatenate([array.ravel().astype(np.int64) for array in arrays]))
    if device.type == "cuda":
        packed = packed.pin_memory()
    parts = packed.to(device, non_blocking=True).split([array.size for array in arrays])
    return [
        part.view(array.shape).to(torch.from_numpy(array[:0]).dtype)
        for part, array in zip(parts, arrays, strict=True)
    ]
