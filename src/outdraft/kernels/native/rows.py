"""Rows of a step by the compiled library."""

from ctypes import c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from outdraft.kernels.native.arrays import array_address
from outdraft.kernels.native.library import Library
from outdraft.kernels.ops import PlacedRows


class NativeRows:
    """The operations of csrc/rows.cpp. Tensors are on the CPU."""

    def __init__(self, library: Library) -> None:
        size, address = c_int64, c_void_p
        self._place_rows = library.function(
            "place_rows", [size, *[address] * 3, *[size] * 4, *[address] * 2], size
        )
        self._shape_rows = library.function("shape_rows", [*[size] * 2, *[address] * 4])
        self._keep_rows = library.function("keep_rows", [*[size] * 3, *[address] * 7])
        self._read_token_ids = library.function("read_token_ids", [size, *[address] * 5])
        self._append_token_ids = library.function("append_token_ids", [*[size] * 3, *[address] * 4])

    def place_rows(
        self,
        sizes_5W: np.ndarray,
        parents_K: np.ndarray,
        block_table_WP: np.ndarray,
        block_size: int,
        width: int,
    ) -> PlacedRows:
        num_works, table_width = block_table_WP.shape
        num_rows = sum(sizes_5W[1].tolist()) + len(parents_K)  # faster than numpy at a few
        starts = np.empty(3 * num_works + 1, dtype=np.int32)
        placed = np.empty(6 * num_rows + num_works * (1 + width) + 1, dtype=np.int64)
        num_sampling = self._place_rows(
            num_works,
            array_address(sizes_5W),
            array_address(parents_K),
            array_address(block_table_WP),
            table_width,
            block_size,
            width,
            num_rows,
            array_address(starts),
            array_address(placed),
        )
        rows_5T, roots = placed[: 5 * num_rows].reshape(5, num_rows), 6 * num_rows
        slots = roots + num_works
        return PlacedRows(
            starts[: num_works + 1],
            starts[num_works + 1 : 2 * num_works + 1],
            starts[2 * num_works + 1 :],
            *rows_5T,
            logit_rows_R=placed[5 * num_rows : 5 * num_rows + int(placed[-1])],
            root_rows_B=placed[roots : roots + num_sampling],
            draft_slots_BN=placed[slots : slots + num_sampling * width].reshape(
                num_sampling, width
            ),
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
            len(ids_T),
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
