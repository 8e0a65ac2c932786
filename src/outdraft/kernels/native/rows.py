"""Rows of a step by the compiled library."""

from ctypes import c_int64, c_void_p

import numpy as np

from outdraft.kernels.native.library import Library
from outdraft.kernels.ops import PlacedRows


class NativeRows:
    """The operations of csrc/rows.cpp."""

    def __init__(self, library: Library) -> None:
        self._place_rows = library.function(
            "place_rows", [c_int64, *[c_void_p] * 5, c_int64, c_int64, *[c_void_p] * 4]
        )

    def place_rows(
        self,
        context_lens_B: np.ndarray,
        num_causal_B: np.ndarray,
        num_drafts_B: np.ndarray,
        parents_K: np.ndarray,
        block_table_BP: np.ndarray,
        block_size: int,
    ) -> PlacedRows:
        """As `ops.PlaceRows`."""
        num_requests = len(context_lens_B)
        num_rows = int(num_causal_B.sum()) + len(parents_K)
        starts_B1 = np.empty(num_requests + 1, dtype=np.int32)
        ancestors_T, positions_T, slots_T = np.empty((3, num_rows), dtype=np.int64)
        self._place_rows(
            num_requests,
            context_lens_B.ctypes.data,
            num_causal_B.ctypes.data,
            num_drafts_B.ctypes.data,
            parents_K.ctypes.data,
            block_table_BP.ctypes.data,
            block_table_BP.shape[1],
            block_size,
            starts_B1.ctypes.data,
            ancestors_T.ctypes.data,
            positions_T.ctypes.data,
            slots_T.ctypes.data,
        )
        return PlacedRows(starts_B1, ancestors_T, positions_T, slots_T)
