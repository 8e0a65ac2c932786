"""Groups of processes, which exchange tensors over shared memory, Gloo or NCCL."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed does not name them

from outdraft.core.errors import RanksError
from outdraft.distributed.group import ALONE, RankGroup, Ranks, Transport, gathered_sum
from outdraft.distributed.shared_memory import MemoryTransports, shared_memory

# Gathers of at most this are exchanges, for which Gloo takes half the time. For more its own gather
# is faster.
EXCHANGED_BYTES = 1 << 20


def join_ranks(
    store: Store,
    rank: int,
    size: int,
    draft_size: int,
    device: torch.device,
    timeout_s: float,
    over_memory: MemoryTransports | None,
    host: str = "127.0.0.1",
) -> Ranks:
    """Make the groups of one rank, once all ranks have come.

    CPU ranks of one machine share memory, others use Gloo; GPU ranks use NCCL.
    No global state of torch.distributed is used, so that one process can have several engines.

    Args:
        store: one of all ranks, and of no other groups.
        size, draft_size: t and d; d divides t.
        timeout_s: for one rank to wait for another in an operation.
        over_memory: None: this rank cannot share memory.
        host: address of this machine, at which Gloo listens.

    Raises:
        RanksError: another rank did not come.
    """
    if size % draft_size:
        raise ValueError(f"draft groups of {draft_size} ranks do not divide {size} ranks")

    def group(name: str, members: Sequence[int]) -> RankGroup:
        if len(members) == 1:
            return ALONE
        place = members.index(rank), len(members)
        own, transport = PrefixStore(name, store), None
        try:
            if device.type == "cpu":
                transport = _over_memory(own, *place, timeout_s, over_memory, host)
            if transport is None:
                transport = ProcessTransport(own, *place, device, timeout_s, host)
        except RuntimeError as error:
            what = f"rank {place[0]} cannot join its group of {place[1]}"
            raise RanksError(f"{what}: {error}") from error
        return RankGroup(*place, transport)

    first = rank - rank % draft_size
    ranks = Ranks(
        target=group("target", range(size)),
        draft=group(f"draft-{first}", range(first, first + draft_size)),
    )
    ranks.target.meet(device)  # after this the store, which may end with one rank, is not needed
    return ranks


def _over_memory(
    store: Store,
    rank: int,
    size: int,
    timeout_s: float,
    transports: MemoryTransports | None,
    host: str,
) -> Transport | None:
    """Make a transport; None: not all ranks can share memory, or they have several addresses."""
    num_bytes = None if transports is None else transports.num_bytes(size)
    memory = shared_memory(store, rank, size, num_bytes, timedelta(seconds=timeout_s), host)
    if transports is None or memory is None:
        return None
    return transports.transport(memory, rank, size, timeout_s)


class ProcessTransport:
    """A `Transport` between processes.

    Raises:
        RanksError: from every operation, if another rank died or does not answer in time.
    """

    def __init__(
        self, store: Store, rank: int, size: int, device: torch.device, timeout_s: float, host: str
    ) -> None:
        self._size, self._device = size, device
        self.num_messages = 0
        is_gpu = device.type == "cuda"
        kind: Any = dist.ProcessGroupNCCL if is_gpu else dist.ProcessGroupGloo
        options = kind.Options() if is_gpu else kind._Options()
        options._timeout = timedelta(seconds=timeout_s)
        if not is_gpu:
            options._devices = [kind.create_device(hostname=host)]
        self._group: Any = kind(store, rank, size, options)  # torch does not declare its methods

    def gather(self, data: Tensor) -> Tensor:
        if self._device.type == "cpu" and data.numel() <= EXCHANGED_BYTES:
            counts = [data.numel()] * self._size
            return self.exchange(data.repeat(self._size), counts, counts).view(self._size, -1)
        result = data.new_empty(self._size * data.numel())
        self._wait(lambda: self._group._allgather_base(result, data))
        return result.view(self._size, data.numel())

    def sum(self, part: Tensor) -> Tensor:
        return gathered_sum(self, part)

    def exchange(self, data: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        result = data.new_empty(sum(received))
        self._wait(lambda: self._group.alltoall_base(result, data, list(received), list(sent)))
        return result

    def abort(self) -> None:
        """End NCCL's operations; Gloo notices the end of a process by itself."""
        self._group.abort()

    def _wait(self, start: Callable[[], dist.Work]) -> None:
        self.num_messages += 1
        try:
            start().wait()
        except RuntimeError as error:
            raise RanksError(f"another rank does not answer: {error}") from error
