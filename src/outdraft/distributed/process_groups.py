"""Groups of processes: Gloo between CPUs, NCCL between GPUs."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed does not name them

from outdraft.core.errors import RanksError
from outdraft.distributed.group import ALONE, RankGroup, Ranks


def join_ranks(
    store: Store,
    rank: int,
    size: int,
    draft_size: int,
    device: torch.device,
    timeout_s: float,
) -> Ranks:
    """The groups of one rank, once all ranks have come.

    No global state of torch.distributed is used, so that one process can have several engines.

    Args:
        store: one of all ranks, and of no other groups.
        size, draft_size: t and d; d divides t.
        timeout_s: how long one rank waits for another in an operation.

    Raises:
        RanksError: another rank did not come.
    """
    if size % draft_size:
        raise ValueError(f"draft groups of {draft_size} ranks do not divide {size} ranks")

    def group(name: str, members: Sequence[int]) -> RankGroup:
        if len(members) == 1:
            return ALONE
        own = PrefixStore(name, store)
        transport = ProcessTransport(own, members.index(rank), len(members), device, timeout_s)
        return RankGroup(members.index(rank), len(members), transport)

    first, place = rank - rank % draft_size, rank % draft_size
    return Ranks(
        target=group("target", range(size)),
        draft=group(f"draft-{first}", range(first, first + draft_size)),
        peers=group(f"peers-{place}", range(place, size, draft_size)),
    )


class ProcessTransport:
    """As `Transport`, between processes.

    Raises:
        RanksError: from every operation, if another rank died or does not answer in time.
    """

    def __init__(
        self, store: Store, rank: int, size: int, device: torch.device, timeout_s: float
    ) -> None:
        self._size, self._device = size, device
        self._group: Any  # torch does not tell what its groups can do
        timeout = timedelta(seconds=timeout_s)
        try:
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group = dist.ProcessGroupNCCL(store, rank, size, options)
            else:
                self._group = dist.ProcessGroupGloo(store, rank, size, timeout)
        except RuntimeError as error:
            raise RanksError(f"rank {rank} cannot join its group of {size}: {error}") from error

    def gather(self, data: Tensor) -> list[Tensor]:
        """As `Transport.gather`."""
        parts = [torch.empty_like(data) for _ in range(self._size)]
        self._wait(lambda: self._group.allgather([parts], [data]))
        return parts

    def exchange(self, data: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """As `Transport.exchange`."""
        result = data.new_empty(sum(received))
        self._wait(lambda: self._group.alltoall_base(result, data, list(received), list(sent)))
        return result

    def _wait(self, start: Callable[[], dist.Work]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise RanksError(f"another rank does not answer: {error}") from error
