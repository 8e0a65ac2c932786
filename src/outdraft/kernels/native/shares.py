"""Whose requests are whose, as the compiled library is told of it.

Dimension key: G requests of all ranks that share a drafter, t ranks.
"""

import ctypes
import functools
from ctypes import c_int64, c_void_p

import numpy as np
import torch

from outdraft.kernels.draft_ops import Growth
from outdraft.kernels.native.arrays import address_of, array_address


class SharesOf(ctypes.Structure):
    """As `DraftShares` of csrc/shared_growth.h."""

    _fields_ = (("num_requests", c_int64), ("counts", c_void_p), ("num_drafts", c_void_p))


def shares_of(growth: Growth) -> SharesOf:
    """Those of a network that is spread; the growth must live as long."""
    num_drafts_G = growth.num_drafts_G
    _, counts = _counts(growth.shares.counts)
    return SharesOf(len(num_drafts_G), counts, address_of(num_drafts_G, torch.int64))


@functools.lru_cache(maxsize=256)
def _counts(counts: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """int64 [t], and its address."""
    counts_t = np.array(counts, dtype=np.int64)
    return counts_t, array_address(counts_t)
