"""Ranks of one machine exchange bytes through memory that they share, by the compiled library."""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from mmap import mmap
from typing import Any

import torch
from torch import Tensor

from outdraft.core.errors import RanksError
from outdraft.distributed.group import RankGroup, gathered_sum
from outdraft.kernels.native.library import Library, Struct

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
        self._library, self._num_bytes = library, library.function("ranks_bytes")

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
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.own = address, rank, size, int(timeout_s * 1e6)
        self.library, self._memory, self._size = library, memory, size
        self._gather, self._sum, self._exchange = (
            library.function(f"ranks_{name}", releases_gil=True)
            for name in ("gather", "sum", "exchange")
        )
        self._num_rounds = library.function("ranks_num_rounds")
        self._end = weakref.finalize(self, _end, library.function("ranks_end"), address, memory)

    def gather(self, data: Tensor) -> Tensor:
        result = data.new_empty(self._size, data.numel())
        _check(self._gather(*self.own, data, data.numel(), result))
        return result

    def sum(self, part: Tensor) -> Tensor:
        if part.dtype not in (torch.float32, torch.bfloat16):
            return gathered_sum(self, part)
        result = torch.empty(part.shape, dtype=part.dtype)
        is_bf16 = part.dtype is torch.bfloat16
        _check(self._sum(*self.own, part, part.numel(), result, is_bf16))
        return result

    def exchange(self, data: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        result = data.new_empty(sum(received))
        _check(self._exchange(*self.own, data, [*sent], [*received], result))
        return result

    @property
    def num_messages(self) -> int:
        """Messages; large ones count more than once."""
        return self._num_rounds(*self.own[:2])

    def abort(self) -> None:
        self._end()


class RankLink:
    """A rank's end of a group, for calls into the library that exchange with other ranks.

    Attributes:
        native: their argument; one call at a time.
    """

    def __init__(self, group: RankGroup) -> None:
        """`group`: `shares_memory`."""
        assert isinstance(group.transport, MemoryTransport)
        self._group = group  # its transport keeps the memory
        names = "memory", "rank", "size", "timeout_us"
        own: dict[str, Any] = dict(zip(names, group.transport.own, strict=True))
        self.native: Struct = group.transport.library.struct("RankLink", **own)

    def settle(self) -> None:
        """Count what a call has sent.

        Raises:
            RanksError: another rank did not answer.
        """
        native, group = self.native, self._group
        for operation, name in _SENT.items():
            sent = getattr(native, name)  # calls and bytes
            if sent[0]:
                group.calls[operation] += sent[0]
                group.sent_bytes[operation] += sent[1]
            sent[:] = (0, 0)
        failure: int = getattr(native, "failure")  # noqa: B009
        native.fill(failure=0)
        _check(failure)


def shares_memory(group: RankGroup) -> bool:
    """The ranks of a group exchange through memory."""
    return isinstance(group.transport, MemoryTransport)


def _end(end: Callable[[int], None], address: int, _memory: mmap) -> None:
    end(address)


def _check(result: int) -> None:
    """Raises RanksError unless it says that all is well."""
    if result:
        raise RanksError(FAILURES[result])
