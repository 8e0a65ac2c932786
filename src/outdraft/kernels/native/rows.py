"""Rows of a step by the compiled library."""

from array import array
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from outdraft.attention.rows import Span
from outdraft.kernels.native.library import Library
from outdraft.kernels.ops import PlacedRows


class NativeRows:
    """The operations of csrc/rows.cpp. Tensors are on the CPU."""

    def __init__(self, library: Library) -> None:
        size, address = c_int64, c_void_p
        self._place_rows = library.function("place_rows", [*[size] * 8, *[address] * 3])
        self._shape_rows = library.function("shape_rows", [*[size] * 2, *[address] * 4])
        self._keep_rows = library.function("keep_rows", [*[size] * 3, *[address] * 7])
        self._read_token_ids = library.function("read_token_ids", [size, *[address] * 5])
        self._append_token_ids = library.function("append_token_ids", [*[size] * 3, *[address] * 4])

    def place_rows(
        self,
        spans: Sequence[Span],
        extra: Sequence[Sequence[int]],
        block_size: int,
        width: int,
    ) -> PlacedRows:
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
        num_rows, num_logits = num_causal + len(parents), num_sampling + len(parents)
        for numbers in extra:
            parents.extend(numbers)
        lengths = [*[num_rows] * 5, num_logits, num_sampling, num_sampling * width]
        lengths += [len(numbers) for numbers in extra]
        # int32 numbers fill whole words: one more where they are odd.
        starts = [len(spans) + 1, len(spans), len(spans), len(blocks)]
        starts.append(sum(starts) % 2)
        placed = torch.empty(sum(lengths) + sum(starts) // 2, dtype=torch.int64)
        works += parents
        self._place_rows(
            len(spans),
            num_rows,
            num_logits,
            num_sampling,
            sum(lengths[8:]),
            table_width,
            block_size,
            width,
            works.buffer_info()[0],
            blocks.buffer_info()[0],
            placed.data_ptr(),
        )
        # Tensor.split does the same, behind checks that take longer than the cut.
        *parts, words = torch.split_with_sizes(placed, [*lengths, sum(starts) // 2])
        words = words.view(torch.int32)
        query_start, contexts, causal, table, _ = torch.split_with_sizes(words, starts)
        return PlacedRows(
            query_start,
            contexts,
            causal,
            table.view(len(spans), table_width),
            *parts[:7],
            draft_slots_BN=parts[7].view(num_sampling, width),
            extra=tuple(parts[8:]),
        )

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
            parents_BN.data_ptr(),
            draft_index_T.data_ptr(),
            positions_T.data_ptr(),
            ancestors_T.data_ptr(),
        )
        return positions_T, ancestors_T

    def keep_rows(
        self,
        slots_T: Tensor,
        draft_index_T: Tensor,
        root_rows_B: Tensor,
        draft_slots_BN: Tensor,
        kept_rows_BN: Tensor,
    ) -> tuple[Tensor, Tensor]:
        kept_slots_T, last_rows_B = torch.empty_like(slots_T), torch.empty_like(root_rows_B)
        kept_rows_BN = kept_rows_BN.contiguous()
        self._keep_rows(
            len(slots_T),
            *kept_rows_BN.shape,
            slots_T.data_ptr(),
            draft_index_T.data_ptr(),
            root_rows_B.data_ptr(),
            draft_slots_BN.data_ptr(),
            kept_rows_BN.data_ptr(),
            kept_slots_T.data_ptr(),
            last_rows_B.data_ptr(),
        )
        return kept_slots_T, last_rows_B

    def read_token_ids(
        self, texts_SL: Tensor, drafts_BN: Tensor, state_index_T: Tensor, draft_index_T: Tensor
    ) -> Tensor:
        ids_T = torch.empty_like(state_index_T)
        self._read_token_ids(
            ids_T.shape[0],
            texts_SL.data_ptr(),
            drafts_BN.data_ptr(),
            state_index_T.data_ptr(),
            draft_index_T.data_ptr(),
            ids_T.data_ptr(),
        )
        return ids_T

    def append_token_ids(
        self, texts_SL: Tensor, state_rows_B: Tensor, starts_B: Tensor, token_ids_BN: Tensor
    ) -> None:
        self._append_token_ids(
            *token_ids_BN.shape,
            texts_SL.shape[1],
            texts_SL.data_ptr(),
            state_rows_B.data_ptr(),
            starts_B.data_ptr(),
            token_ids_BN.data_ptr(),
        )
