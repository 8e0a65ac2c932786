"""What a network has not read of texts, as the compiled library is told of it.

Dimension key: as in kernels/draft_ops.py.
"""

import ctypes
from array import array
from ctypes import c_int64, c_void_p

import torch

from outdraft.kernels.draft_ops import UnreadTexts
from outdraft.kernels.native.arrays import address_of

_UNREAD = ("spans", "places", "texts", "features", "block_table")


class UnreadOf(ctypes.Structure):
    """As `UnreadTexts` of csrc/unread_texts.h."""

    _fields_ = (
        *((name, c_void_p) for name in _UNREAD),
        *((name, c_int64) for name in ("table_width", "block_size")),
    )


class UnreadArrays:
    """What a call is told of unread texts; it must live until the call is over."""

    def __init__(self, unread: UnreadTexts, dtype: torch.dtype) -> None:
        """`dtype`: of the states that the network reads."""
        table_width = max([len(span.block_ids) for span in unread.spans])
        numbers, blocks = array("q"), array("i")
        num_skipped = unread.num_skipped or [0] * len(unread.spans)
        for (context_len, count, _, block_ids, text_start, _), skipped in zip(
            unread.spans, num_skipped, strict=True
        ):
            numbers.extend((context_len, count, text_start, skipped))
            blocks.extend(block_ids)
            blocks.extend([0] * (table_width - len(block_ids)))
        num_numbers = len(numbers)
        numbers.extend(unread.places)
        self._numbers, self._blocks = numbers, blocks
        spans, features_NF = numbers.buffer_info()[0], unread.features_NF
        self.native = UnreadOf(
            spans,
            spans + num_numbers * numbers.itemsize,
            address_of(unread.token_ids_SL, torch.int64),
            None if features_NF is None else address_of(features_NF, dtype),
            blocks.buffer_info()[0],
            table_width,
            unread.block_size,
        )
