"""Whose requests are whose, as the compiled library is told of it.

Dimension key: G requests of all ranks that share a drafter, t ranks.
"""

import ctypes
from ctypes import POINTER, c_int64, c_void_p

import torch

from outdraft.kernels.draft_ops import Growth
from outdraft.kernels.native.arrays import address_of


class SharesOf(ctypes.Structure):
    """As `DraftShares` of csrc/shared_growth.h."""

    _fields_ = (("num_requests", c_int64), ("counts", POINTER(c_int64)), ("num_drafts", c_void_p))


def shares_of(growth: Growth) -> SharesOf:
    """Those of a network that is spread; the growth must live as long."""
    num_drafts_G, counts = growth.num_drafts_G, growth.shares.counts
    counts_t = (c_int64 * len(counts))(*counts)  # the structure keeps it alive
    return SharesOf(len(num_drafts_G), counts_t, address_of(num_drafts_G, torch.int64))
