"""Ranks of one machine exchange bytes through memory that they share, by the compiled library."""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char, c_int32, c_int64, c_void_p
from mmap import mmap

import torch
from torch import Tensor

from outdraft.core.errors import RanksError
from outdraft.distributed.group import RankGroup, gathered_sum
from outdraft.kernels.native.library import Library

# The names of `Traffic`, and those of csrc/ranks.h.
_SENT = {"sum": "sums", "turn": "turns", "join_rows": "joins", "gather": "gathers"}
FAILURES = {  # by what csrc/ranks.cpp returns
    1: "another rank does not answer: the group has ended",
    2: "another rank does not answer in time",
    3: "the ranks of a group do different operations",
}


class NativeMemoryTransports:
    """Transports over shared memory, see csrc/ranks.cpp."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._num_bytes = library.function("ranks_bytes", [c_int64], c_int64)

    def num_bytes(self, size: int) -> int:
        return self._num_bytes(size)

    def transport(self, memory: mmap, rank: int, size: int, timeout_s: float) -> "MemoryTransport":
        return MemoryTransport(self._library, memory, rank, size, timeout_s)


class MemoryTransport:
    """A rank's transport through memory. A rank that lets go of it ends the group.

    Attributes:
        own: address of the memory, rank, number of ranks, and the longest wait in us.

    Raises:
        RanksError: from every operation, if the group has ended or another rank does not answer in
            time, which ends it.
    """

    def __init__(
        self, library: Library, memory: mmap, rank: int, size: int, timeout_s: float
    ) -> None:
        """`memory`: that of all ranks of the group, zeros when the first one came."""

        def function(name: str, *arguments: type) -> Callable[..., int]:
            own = (c_void_p, c_int64, c_int64, c_int64)
            return library.function(name, [*own, *arguments], c_int32, releases_gil=True)

        self._size, self._memory = size, memory
        self.own = addressof(c_char.from_buffer(memory)), rank, size, int(timeout_s * 1e6)
        self._gather = function("ranks_gather", c_void_p, c_int64, c_void_p)
        self._sum = function("ranks_sum", c_void_p, c_int64, c_void_p, c_int32)
        self._exchange = function("ranks_exchange", c_void_p, c_void_p, c_void_p, c_void_p)
        self._num_rounds = library.function("ranks_num_rounds", [c_void_p, c_int64], c_int64)
        end = library.function("ranks_end", [c_void_p])
        self._end = weakref.finalize(self, _end, end, self.own[0], memory)

    def gather(self, data: Tensor) -> Tensor:
        result = data.new_empty(self._size, data.numel())
        _check(self._gather(*self.own, data.data_ptr(), data.numel(), result.data_ptr()))
        return result

    def sum(self, part: Tensor) -> Tensor:
        if part.dtype not in (torch.float32, torch.bfloat16):
            return gathered_sum(self, part)
        part, is_bf16 = part.contiguous(), part.dtype is torch.bfloat16
        result = torch.empty_like(part)
        addresses = part.data_ptr(), part.numel(), result.data_ptr()
        _check(self._sum(*self.own, *addresses, is_bf16))
        return result

    def exchange(self, data: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        result = data.new_empty(sum(received))
        sizes = ((c_int64 * self._size)(*each) for each in (sent, received))
        _check(self._exchange(*self.own, data.data_ptr(), *sizes, result.data_ptr()))
        return result

    @property
    def num_messages(self) -> int:
        """Messages; large ones count more than once."""
        return self._num_rounds(*self.own[:2])

    def abort(self) -> None:
        self._end()


class CRankLink(ctypes.Structure):
    _fields_ = (
        ("memory", c_void_p),
        *((name, c_int64) for name in ("rank", "size", "timeout_us")),
        *((f"{name}_{part}", c_int64) for name in _SENT.values() for part in ("calls", "bytes")),
        ("failure", c_int64),
    )


class RankLink:
    """A rank's end of a group, for calls into the library that exchange with other ranks.

    Attributes:
        native: their argument; one call at a time.
    """

    def __init__(self, group: RankGroup) -> None:
        """`group`: `shares_memory`."""
        assert isinstance(group.transport, MemoryTransport)
        self._group = group  # its transport keeps the memory
        self.native = CRankLink(*group.transport.own)

    def settle(self) -> None:
        """Count what a call has sent.

        Raises:
            RanksError: another rank did not answer.
        """
        native, traffic = self.native, self._group.traffic
        for operation, name in _SENT.items():
            if calls := getattr(native, f"{name}_calls"):
                traffic.calls[operation] += calls
                traffic.sent_bytes[operation] += getattr(native, f"{name}_bytes")
        failure = native.failure
        ctypes.memset(addressof(native) + CRankLink.sums_calls.offset, 0, _SETTLED_BYTES)
        _check(failure)


def shares_memory(group: RankGroup) -> bool:
    """The ranks of a group exchange through memory."""
    return isinstance(group.transport, MemoryTransport)


_SETTLED_BYTES = ctypes.sizeof(CRankLink) - CRankLink.sums_calls.offset


def _end(end: Callable[[int], None], address: int, _memory: mmap) -> None:
    end(address)


def _check(result: int) -> None:
    """Raises RanksError unless it says that all is well."""
    if result:
        raise RanksError(FAILURES[result])
