"""Rows of a step by the compiled library."""

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from outdraft.attention.rows import RowBatch, Span
from outdraft.kernels.native.arrays import addresses
from outdraft.kernels.native.library import Library
from outdraft.kernels.step_ops import StatePlaces


def int64_tensor(numbers: "array[int]") -> Tensor:
    """A view."""
    return torch.frombuffer(numbers, dtype=torch.int64)


class CRowCounts(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_works", "num_rows", "num_logits", "num_sampling")),
        *((name, c_int64) for name in ("num_extra", "table_width", "block_size", "width")),
    )


class RowArrays:
    """Arguments of `place_rows`, and memory for its result; to be kept until the call is over.

    Attributes:
        counts, numbers, blocks, placed: its arguments; the last three are addresses.
    """

    def __init__(
        self, spans: Sequence[Span], extra: Sequence[Sequence[int]], block_size: int, width: int
    ) -> None:
        table_width = max([len(span.block_ids) for span in spans])
        works, parents, blocks = array("q"), array("q"), array("i")
        num_causal = num_sampling = 0
        for context_len, count, up, block_ids, text_start, samples in spans:
            works.extend((context_len, count, len(up), text_start, samples))
            parents.extend(up)
            blocks.extend(block_ids)
            blocks.extend([0] * (table_width - len(block_ids)))
            num_causal += count
            num_sampling += samples
        num_works, num_drafts = len(spans), len(parents)
        num_rows, num_logits = num_causal + num_drafts, num_sampling + num_drafts
        for numbers in extra:
            parents.extend(numbers)
        num_extra = len(parents) - num_drafts
        # int32 numbers fill whole words: one more where they are odd.
        num_words = (3 * num_works + 2 + len(blocks)) // 2
        num_numbers = 5 * num_rows + num_logits + num_sampling * (1 + width) + num_extra
        works += parents
        self._spans, self._works, self._blocks, self._extra = spans, works, blocks, extra
        self._placed = array("q", bytes(8 * (num_numbers + num_words)))
        self._num_words = num_words
        self.counts = CRowCounts(
            num_works,
            num_rows,
            num_logits,
            num_sampling,
            num_extra,
            table_width,
            block_size,
            width,
        )
        self.numbers, self.blocks = works.buffer_info()[0], blocks.buffer_info()[0]
        self.placed = self._placed.buffer_info()[0]

    def rows(self) -> RowBatch:
        """The placed rows, as views."""
        spans, counts, num_words = self._spans, self.counts, self._num_words
        num_works, num_sampling, width = counts.num_works, counts.num_sampling, counts.width
        lengths = [*[counts.num_rows] * 5, counts.num_logits, num_sampling, num_sampling * width]
        lengths += [len(numbers) for numbers in self._extra]
        # Tensor.split does the same, after checks that take longer than the cut.
        *parts, words = torch.split_with_sizes(int64_tensor(self._placed), [*lengths, num_words])
        starts = [num_works + 1, num_works, num_works, len(self._blocks)]
        starts.append(2 * num_words - sum(starts))
        query_start, contexts, causal, table, _ = torch.split_with_sizes(
            words.view(torch.int32), starts
        )
        return RowBatch(
            query_start_B1=query_start,
            context_lens_B=contexts,
            num_causal_B=causal,
            ancestors_T=parts[0],
            positions_T=parts[1],
            slots_T=parts[2],
            block_table_BP=table.view(num_works, counts.table_width),
            max_rows=max([span.num_rows for span in spans]),
            max_seq_len=max([span.context_len + span.num_rows for span in spans]),
            state_index_T=parts[3],
            draft_index_T=parts[4],
            logit_rows_R=parts[5],
            root_rows_B=parts[6],
            draft_slots_BN=parts[7].view(num_sampling, width),
            extra=tuple(parts[8:]),
        )


class NativeRows:
    """The operations of csrc/rows.cpp. Tensors are on the CPU."""

    def __init__(self, library: Library) -> None:
        size, address = c_int64, c_void_p
        self._place_rows = library.function(
            "place_rows", [ctypes.POINTER(CRowCounts), *[address] * 3]
        )
        self._shape_rows = library.function("shape_rows", [*[size] * 2, *[address] * 4])
        self._place_states = library.function("place_states", [*[size] * 5, *[address] * 9])
        self._copy_rows = library.function("copy_rows", [*[size] * 2, *[address] * 4])
        self._read_token_ids = library.function("read_token_ids", [size, *[address] * 5])
        self._append_token_ids = library.function("append_token_ids", [*[size] * 3, *[address] * 4])

    def place_rows(
        self,
        spans: Sequence[Span],
        extra: Sequence[Sequence[int]],
        block_size: int,
        width: int,
    ) -> RowBatch:
        arrays = RowArrays(spans, extra, block_size, width)
        counts = ctypes.byref(arrays.counts)
        self._place_rows(counts, arrays.numbers, arrays.blocks, arrays.placed)
        return arrays.rows()

    def shape_rows(
        self,
        parents_BN: Tensor,
        draft_index_T: Tensor,
        positions_T: Tensor,
        ancestors_T: Tensor,
    ) -> tuple[Tensor, Tensor]:
        positions_T, ancestors_T = positions_T.clone(), ancestors_T.clone()
        self._shape_rows(
            len(draft_index_T),
            parents_BN.shape[1],
            *addresses(parents_BN, draft_index_T, positions_T, ancestors_T),
        )
        return positions_T, ancestors_T

    def place_states(
        self, rows: RowBatch, kept_rows_BN: Tensor, row_len: int, window: int
    ) -> StatePlaces:
        num_works, num_rows = rows.context_lens_B.shape[0], rows.state_index_T.shape[0]
        kept_rows_BN = kept_rows_BN.contiguous()
        placed = torch.empty(num_rows + 2 * num_works, dtype=torch.int64)
        places_T, last_rows_W, last_places_W = torch.split_with_sizes(
            placed, [num_rows, num_works, num_works]
        )
        self._place_states(
            num_works,
            *kept_rows_BN.shape,
            row_len,
            window,
            *addresses(rows.query_start_B1, rows.context_lens_B, rows.num_causal_B),
            *addresses(rows.state_index_T, rows.root_rows_B, kept_rows_BN),
            *addresses(places_T, last_rows_W, last_places_W),
        )
        return StatePlaces(places_T, last_rows_W, last_places_W)

    def copy_rows(
        self,
        to_ND: Tensor,
        places_R: Tensor | None,
        from_TD: Tensor,
        rows_R: Tensor | None = None,
    ) -> None:
        assert to_ND.dtype is from_TD.dtype, "rows of two dtypes"
        assert to_ND.is_contiguous()
        from_TD = from_TD.contiguous()
        listed_R = places_R if places_R is not None else rows_R
        assert listed_R is not None
        self._copy_rows(
            listed_R.shape[0],
            to_ND.shape[1] * to_ND.element_size(),
            to_ND.data_ptr(),
            None if places_R is None else places_R.data_ptr(),
            from_TD.data_ptr(),
            None if rows_R is None else rows_R.data_ptr(),
        )

    def read_token_ids(
        self, texts_SL: Tensor, drafts_BN: Tensor, state_index_T: Tensor, draft_index_T: Tensor
    ) -> Tensor:
        ids_T = torch.empty_like(state_index_T)
        tensors = texts_SL, drafts_BN, state_index_T, draft_index_T, ids_T
        self._read_token_ids(ids_T.shape[0], *addresses(*tensors))
        return ids_T

    def append_token_ids(
        self, texts_SL: Tensor, state_rows_B: Tensor, starts_B: Tensor, token_ids_BN: Tensor
    ) -> None:
        sizes, tensors = token_ids_BN.shape, (texts_SL, state_rows_B, starts_B, token_ids_BN)
        self._append_token_ids(*sizes, texts_SL.shape[1], *addresses(*tensors))
