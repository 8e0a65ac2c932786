"""The rows of a step, as the host names them (`Span`) and as tensors (`RowBatch`).

Everything is laid out on the host (`kernels.place_rows`) and travels to the device in one copy.

Dimension key: W works, B of them sample, T rows, R rows that need logits, N most drafts of a work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata

_ALIGNMENT = 16  # bytes: kernels read whole words


class Span(NamedTuple):
    """The rows of one request in one forward pass.

    Attributes:
        context_len: tokens that the cache already holds.
        num_causal: tokens of the text to compute, at least 1.
        parents: of the drafted rows after these, as in Draft; () unless it samples.
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
class RowBatch(AttentionMetadata):
    """The rows of a step: for each request its causal rows, then its drafted ones.

    The requests of AttentionMetadata are here the works of the step; B of these W sample. All
    tensors below are int64.

    Attributes:
        state_index_T: the place of a row's token in the flat texts, 0 for drafted rows.
        draft_index_T: the place of a drafted row's token in the flat drafts, else -1.
        logit_rows_R: of each work that samples its root, then its drafts.
        root_rows_B: the root of each work that samples.
        draft_slots_BN: cache slots after each root, padded with -1.
        extra: the numbers that were to be passed on.
    """

    state_index_T: Tensor
    draft_index_T: Tensor
    logit_rows_R: Tensor
    root_rows_B: Tensor
    draft_slots_BN: Tensor
    extra: tuple[Tensor, ...]

    def to(self, device: torch.device) -> "RowBatch":
        """These rows on a device, sent in one copy; on the host the rows themselves."""
        if device.type == "cpu":
            return self
        names = [one.name for one in fields(self) if isinstance(getattr(self, one.name), Tensor)]
        host = [*(getattr(self, name) for name in names), *self.extra]
        sent = to_device([tensor.numpy() for tensor in host], device)
        own = dict(zip(names, sent, strict=False))
        return replace(self, **own, extra=tuple(sent[len(names) :]))


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
    """Views of what `pack` made of arrays of these shapes and types."""
    return [
        packed[start : start + array.nbytes].view(_torch_dtype(array.dtype)).view(array.shape)
        for start, array in zip(_starts(arrays), arrays, strict=False)
    ]


def _starts(arrays: Sequence[np.ndarray]) -> list[int]:
    """Bytes at which the arrays begin, and the end of all."""
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    return [0, *accumulate(sizes)]


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
