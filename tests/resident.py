"""How much of the memory of tensors is in RAM, as the system tells it."""

import ctypes
import mmap
from collections.abc import Sequence

from torch import Tensor

_libc = ctypes.CDLL(None, use_errno=True)


def resident_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of all pages that hold a part of them and are in RAM."""
    pages = set[int]()
    for tensor in tensors:
        first = tensor.data_ptr() // mmap.PAGESIZE
        last = -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE)
        states = (ctypes.c_ubyte * (last - first))()
        address = ctypes.c_void_p(first * mmap.PAGESIZE)
        length = ctypes.c_size_t((last - first) * mmap.PAGESIZE)
        if _libc.mincore(address, length, states):
            raise OSError(ctypes.get_errno(), "mincore")
        pages.update(first + at for at, state in enumerate(bytes(states)) if state & 1)
    return len(pages) * mmap.PAGESIZE
