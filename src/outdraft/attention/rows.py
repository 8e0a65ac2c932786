"""From the host's view of a step (which request computes which rows) to the attention batch.

Everything is laid out on the host and travels to the device in one copy.

Dimension key: B requests, T rows, P blocks.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata

if TYPE_CHECKING:
    from outdraft.kernels.ops import Kernels, PlacedRows


_ALIGNMENT = 16  # bytes: kernels read whole words


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


def lay_out(
    spans: Sequence[Span],
    block_size: int,
    kernels: "Kernels",
    device: torch.device,
    width: int | None = None,
    extra: Sequence[Sequence[int]] = (),
) -> "PlacedRows":
    """Rows in request order; within a request causal rows first, then the draft's.

    `width`: the places of a request's drafts; None: as many as the longest has.
    """
    if width is None:
        width = max(len(span.parents) for span in spans)
    placed = kernels.place_rows(spans, extra, block_size, width)
    if device.type == "cpu":
        return placed
    names = [field.name for field in fields(placed)][:-1]  # the last one is `extra`
    host = [*(getattr(placed, name) for name in names), *placed.extra]
    sent = to_device([tensor.numpy() for tensor in host], device)
    return replace(placed, **dict(zip(names, sent, strict=False)), extra=tuple(sent[len(names) :]))


def metadata_of(placed: "PlacedRows", spans: Sequence[Span]) -> AttentionMetadata:
    """The batch of these rows."""
    return AttentionMetadata(
        placed.query_start_W1,
        placed.context_lens_W,
        placed.num_causal_W,
        placed.ancestors_T,
        placed.positions_T,
        placed.slots_T,
        placed.block_table_WP,
        max_rows=max([span.num_rows for span in spans]),
        max_seq_len=max([span.context_len + span.num_rows for span in spans]),
    )


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Tensors of the arrays' own shapes and types; one copy for all of them."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sent = pack(arrays, pinned=device.type == "cuda").to(device, non_blocking=True)
    return unpack(sent, arrays)


def pack(arrays: Sequence[np.ndarray], *, pinned: bool = False) -> Tensor:
    """The bytes of all arrays, each from a multiple of _ALIGNMENT on.  # [N] uint8"""
    starts = _starts(arrays)
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pinned)
    bytes_N = packed.numpy()
    for start, array in zip(starts, arrays, strict=False):
        bytes_N[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    return packed


def unpack(packed: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Views of what `pack` made of arrays of these shapes and types.

    Each is one call of torch, and a step on a GPU makes some fifty.
    """
    by_dtype: dict[np.dtype[Any], Tensor] = {}
    found: list[Tensor] = []
    for start, array in zip(_starts(arrays), arrays, strict=False):
        whole = by_dtype.get(array.dtype)
        if whole is None:
            whole = by_dtype[array.dtype] = packed.view(_torch_dtype(array.dtype))
        size, strides = array.itemsize, [1]
        for length in array.shape[:0:-1]:
            strides.insert(0, strides[0] * length)
        first = whole.storage_offset() + start // size
        found.append(whole.as_strided(array.shape, strides[: array.ndim], first))
    return found


def _starts(arrays: Sequence[np.ndarray]) -> list[int]:
    """Where each array begins, and the end of all."""
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    return [0, *accumulate(sizes)]


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
