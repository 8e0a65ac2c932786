"""Rows of a step by the compiled library."""

from ctypes import c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from outdraft.kernels.native.arrays import array_address
from outdraft.kernels.native.library import Library
from outdraft.kernels.ops import PlacedRows, RowIndex


class NativeRows:
    """The operations of csrc/rows.cpp. Tensors are on the CPU."""

    def __init__(self, library: Library) -> None:
        size, address = c_int64, c_void_p
        self._place_rows = library.function(
            "place_rows", [size, *[address] * 3, *[size] * 3, *[address] * 2]
        )
        self._index_rows = library.function(
            "index_rows", [*[size] * 2, *[address] * 6, *[size] * 2, address], size
        )
        self._shape_rows = library.function("shape_rows", [*[size] * 2, *[address] * 4])
        self._read_token_ids = library.function("read_token_ids", [size, *[address] * 5])
        self._append_token_ids = library.function("append_token_ids", [*[size] * 3, *[address] * 4])

    def place_rows(
        self,
        sizes_3B: np.ndarray,
        parents_K: np.ndarray,
        block_table_BP: np.ndarray,
        block_size: int,
    ) -> PlacedRows:
        num_requests, table_width = block_table_BP.shape
        num_rows = sum(sizes_3B[1].tolist()) + len(parents_K)  # faster than numpy at a few
        starts_B1 = np.empty(num_requests + 1, dtype=np.int32)
        placed_3T = np.empty((3, num_rows), dtype=np.int64)
        self._place_rows(
            num_requests,
            array_address(sizes_3B),
            array_address(parents_K),
            array_address(block_table_BP),
            table_width,
            block_size,
            num_rows,
            array_address(starts_B1),
            array_address(placed_3T),
        )
        return PlacedRows(starts_B1, *placed_3T)

    def index_rows(
        self,
        placed: PlacedRows,
        num_causal_W: np.ndarray,
        samples_W: np.ndarray,
        state_rows_W: np.ndarray,
        row_len: int,
        width: int,
    ) -> RowIndex:
        num_works, num_rows = len(num_causal_W), len(placed.positions_T)
        found = np.empty(3 * num_rows + num_works * (1 + width) + 1, dtype=np.int64)
        num_sampling = self._index_rows(
            num_works,
            num_rows,
            array_address(placed.query_start_B1),
            array_address(num_causal_W),
            array_address(samples_W),
            array_address(state_rows_W),
            array_address(placed.positions_T),
            array_address(placed.slots_T),
            row_len,
            width,
            array_address(found),
        )
        roots = 3 * num_rows
        slots = roots + num_works
        return RowIndex(
            found[:num_rows],
            found[num_rows : 2 * num_rows],
            found[2 * num_rows : 2 * num_rows + int(found[-1])],
            found[roots : roots + num_sampling],
            found[slots : slots + num_sampling * width].reshape(num_sampling, width),
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
