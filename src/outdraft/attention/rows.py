"""From the host's view of a step (which request computes which rows) to the attention batch.

Everything is laid out on the host, compiled, and travels to the device in one copy.

Dimension key: B requests, T rows, P blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata

if TYPE_CHECKING:
    from outdraft.kernels.ops import Kernels, PlacedRows


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

    placed: "PlacedRows"
    context_lens_B: np.ndarray
    num_causal_B: np.ndarray
    block_table_BP: np.ndarray
    max_rows: int
    max_seq_len: int


def lay_out(spans: Sequence[Span], block_size: int, kernels: "Kernels") -> RowLayout:
    """Rows in request order; within a request causal rows first, then the draft's."""
    sizes = [(s.context_len, s.num_causal, len(s.parents)) for s in spans]
    sizes_3B = np.array(list(zip(*sizes, strict=True)), dtype=np.int32)
    parents = np.array([up for s in spans for up in s.parents], dtype=np.int64)
    block_table_BP = np.zeros((len(spans), max(len(s.block_ids) for s in spans)), dtype=np.int32)
    for row_P, span in zip(block_table_BP, spans, strict=True):
        row_P[: len(span.block_ids)] = span.block_ids
    counts = [s.num_causal + len(s.parents) for s in spans]
    return RowLayout(
        placed=kernels.place_rows(sizes_3B, parents, block_table_BP, block_size),
        context_lens_B=sizes_3B[0],
        num_causal_B=sizes_3B[1],
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
            layout.placed.query_start_B1,
            layout.context_lens_B,
            layout.num_causal_B,
            layout.placed.ancestors_T,
            layout.placed.positions_T,
            layout.placed.slots_T,
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
    if device.type == "cuda":
        packed = packed.pin_memory()
    parts = packed.to(device, non_blocking=True).split([array.size for array in arrays])
    return [
        part.view(array.shape).to(torch.from_numpy(array[:0]).dtype)
        for part, array in zip(parts, arrays, strict=True)
    ]
