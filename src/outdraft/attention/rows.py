"""From the host's view of a step (which request computes which rows) to the attention batch.

Everything is laid out in numpy and travels to the device in one copy.

Dimension key: B requests, T rows, P blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata
from outdraft.core.draft import ancestor_masks, tree_depths


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one request in one forward pass.

    Attributes:
        context_len: tokens that the cache already holds.
        num_causal: tokens of the text to compute, at least 1.
        parents: of the drafted rows behind them, as in Draft.
        block_ids: the request's blocks; they cover all rows.
    """

    context_len: int
    num_causal: int
    parents: Sequence[int]
    block_ids: Sequence[int]

    @property
    def num_rows(self) -> int:
        return self.num_causal + len(self.parents)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The numpy side of AttentionMetadata; fields as documented there."""

    query_start_B1: np.ndarray
    context_lens_B: np.ndarray
    num_causal_B: np.ndarray
    ancestors_T: np.ndarray
    positions_T: np.ndarray
    slots_T: np.ndarray
    block_table_BP: np.ndarray
    max_rows: int
    max_seq_len: int


def lay_out(spans: Sequence[Span], block_size: int) -> RowLayout:
    """Rows in request order; within a request causal rows first, then the draft's."""
    counts = [span.num_rows for span in spans]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    total = int(starts[-1])
    ancestors_T = np.zeros(total, dtype=np.int64)
    positions_T = np.empty(total, dtype=np.int64)
    slots_T = np.empty(total, dtype=np.int64)
    block_table_BP = np.zeros((len(spans), max(len(s.block_ids) for s in spans)), dtype=np.int32)
    for b, span in enumerate(spans):
        block_table_BP[b, : len(span.block_ids)] = span.block_ids
        first, drafted, stop = starts[b], starts[b] + span.num_causal, starts[b + 1]
        index = np.arange(span.context_len, span.context_len + counts[b])
        blocks = block_table_BP[b, index // block_size].astype(np.int64)
        slots_T[first:stop] = blocks * block_size + index % block_size
        positions_T[first:drafted] = index[: span.num_causal]
        if span.parents:
            root = span.context_len + span.num_causal - 1
            positions_T[drafted:stop] = root + np.asarray(tree_depths(span.parents))
            ancestors_T[drafted:stop] = ancestor_masks(span.parents)
    return RowLayout(
        query_start_B1=starts,
        context_lens_B=np.array([s.context_len for s in spans], dtype=np.int32),
        num_causal_B=np.array([s.num_causal for s in spans], dtype=np.int32),
        ancestors_T=ancestors_T,
        positions_T=positions_T,
        slots_T=slots_T,
        block_table_BP=block_table_BP,
        max_rows=max(counts),
        max_seq_len=max(s.context_len + s.num_rows for s in spans),
    )


def send(
    layout: RowLayout, extra: Sequence[np.ndarray], device: torch.device
) -> tuple[AttentionMetadata, list[Tensor]]:
    """The layout and further int64 arrays on the device, in one copy."""
    sent = to_device(
        [
            layout.query_start_B1,
            layout.context_lens_B,
            layout.num_causal_B,
            layout.ancestors_T,
            layout.positions_T,
            layout.slots_T,
            layout.block_table_BP,
            *extra,
        ],
        device,
    )
    starts, contexts, causal, ancestors, positions, slots, blocks, *others = sent
    metadata = AttentionMetadata(
        query_start_B1=starts,
        context_lens_B=contexts,
        num_causal_B=causal,
        ancestors_T=ancestors,
        positions_T=positions,
        slots_T=slots,
        block_table_BP=blocks,
        max_rows=layout.max_rows,
        max_seq_len=layout.max_seq_len,
    )
    return metadata, others


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Tensors of the arrays' own shapes and integer types; one copy for all of them."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packed = torch.from_numpy(np.concatenate([array.ravel().astype(np.int64) for array in arrays]))
    parts = packed.pin_memory().to(device, non_blocking=True).split([a.size for a in arrays])
    return [
        part.view(array.shape).to(torch.from_numpy(array[:0]).dtype)
        for part, array in zip(parts, arrays, strict=True)
    ]
