"""Growing trees by the compiled library."""

from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from outdraft.kernels.native.library import Library
from outdraft.kernels.ops import PlacedLevel


class NativeDrafting:
    """The operations of csrc/drafting.cpp."""

    def __init__(self, library: Library) -> None:
        self._place_level = library.function(
            "place_level",
            [*[c_int64] * 4, *[c_void_p] * 4, c_int64, c_int64, *[c_void_p] * 3],
        )

    def place_level(
        self,
        ancestors_BF: Tensor,
        first_row: int,
        depth: int,
        contexts_B: Tensor,
        num_drafts_B: Tensor,
        block_table_BP: Tensor,
        block_size: int,
    ) -> PlacedLevel:
        """As `ops.PlaceLevel`."""
        num_requests, width = ancestors_BF.shape
        ancestors_BF = ancestors_BF.contiguous()
        contexts_B, num_drafts_B = contexts_B.contiguous(), num_drafts_B.contiguous()
        placed_3T = torch.empty(3, num_requests * width, dtype=torch.int64)
        ancestors_T, positions_T, slots_T = placed_3T.unbind()
        self._place_level(
            num_requests,
            width,
            first_row,
            depth,
            ancestors_BF.data_ptr(),
            contexts_B.data_ptr(),
            num_drafts_B.data_ptr(),
            block_table_BP.data_ptr(),
            block_table_BP.shape[1],
            block_size,
            ancestors_T.data_ptr(),
            positions_T.data_ptr(),
            slots_T.data_ptr(),
        )
        return PlacedLevel(ancestors_T, positions_T, slots_T)
