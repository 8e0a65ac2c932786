"""Batches of rows, laid out by the readable operation."""

from collections.abc import Sequence

import torch

from outdraft.attention.rows import RowBatch, Span
from outdraft.kernels.torch.table import reference_kernels

CPU = torch.device("cpu")


def row_batch(
    spans: Sequence[Span],
    block_size: int,
    device: torch.device = CPU,
    width: int | None = None,
    extra: Sequence[Sequence[int]] = (),
) -> RowBatch:
    """`width`: the places of a request's drafts; None: as many as the longest draft has."""
    if width is None:
        width = max(len(span.parents) for span in spans)
    return reference_kernels().place_rows(spans, extra, block_size, width).to(device)
