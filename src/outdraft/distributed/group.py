"""Groups of ranks that compute one network together, and their collective operations.

Every rank of a group calls the same operations in the same order with tensors of matching shapes.
Each rank counts the bytes that it sends, so that tests can check what a step costs.

Dimension key: R rows, S columns that one rank has, t ranks.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Transport(Protocol):
    """Moves bytes between the ranks of a group; every rank calls the same."""

    def gather(self, data: Tensor) -> Tensor:
        """uint8 [t, bytes]: the data of all ranks, which are of one size, in rank order."""
        ...

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' tensors of one shape, as `gathered_sum` computes it."""
        ...

    def exchange(self, data: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """The parts of all ranks' uint8 tensors that are for this one, in rank order.

        Args:
            sent: bytes of `data` for each rank.
            received: bytes that come from each rank.
        """
        ...

    @property
    def num_messages(self) -> int:
        """Operations that this rank has taken part in, those within a pass included; it grows
        while one goes on. Any thread may read it."""
        ...

    def abort(self) -> None:
        """End operations in which other threads wait, on all ranks; there are no more of them."""
        ...


def gathered_sum(transport: Transport, part: Tensor) -> Tensor:
    """The sum of all ranks' tensors, which are of one shape, in rank order.

    16-bit numbers are summed in float32, and rounded once.
    """
    first, *further = _gathered(transport, part)
    total = first.to(torch.promote_types(part.dtype, torch.float32))
    for other in further:
        total = total + other
    return total.to(part.dtype)


class RankGroup:
    """One rank's view of a group.

    Attributes:
        rank: among the ranks of the group, from 0.
        calls: of each operation.
        sent_bytes: that left this rank, by operation.
        transport: None: this rank is alone.
    """

    def __init__(self, rank: int = 0, size: int = 1, transport: Transport | None = None) -> None:
        assert 0 <= rank < size
        assert (transport is None) == (size == 1), "one rank sends nothing"
        self.rank, self.size, self.transport = rank, size, transport
        self.calls, self.sent_bytes = Counter[str](), Counter[str]()

    def meet(self, device: torch.device) -> None:
        """Wait until all ranks have come."""
        if self.transport is not None:
            self.transport.gather(torch.zeros(1, dtype=torch.uint8, device=device))

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' tensors, in rank order, so that each number has the same bits
        on all ranks and in tensors of any shape. Sums of 16-bit numbers are rounded once."""
        if self.transport is None:
            return part
        self._count("sum", (self.size - 1) * part.nbytes)
        return self.transport.sum(part)

    def gather(self, part: Tensor) -> Tensor:
        """[t, *shape]: the tensors of all ranks, which are of one shape."""
        if self.transport is None:
            return part[None]
        self._count("gather", (self.size - 1) * part.nbytes)
        return _gathered(self.transport, part)

    def join_rows(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        """[sum(counts), ...]: the rows of all ranks, in rank order.

        Args:
            part: [counts[rank], ...]; all but the number of rows is the same on all ranks.
        """
        assert part.shape[0] == counts[self.rank]
        if self.transport is None:
            return part
        padded = part.new_zeros(max(counts), *part.shape[1:])
        padded[: len(part)] = part
        self._count("join_rows", (self.size - 1) * padded.nbytes)
        parts = _gathered(self.transport, padded)
        return torch.cat([one[:count] for one, count in zip(parts, counts, strict=True)])

    def turn(self, part_RS: Tensor, counts: Sequence[int]) -> Tensor:
        """[counts[rank], t * S]: of all columns the rows that belong to this rank.

        Args:
            part_RS: this rank's columns of all rows: the first counts[0] rows belong to rank 0, the
                next counts[1] to rank 1, and so on.
        """
        assert part_RS.shape[0] == sum(counts)
        if self.transport is None:
            return part_RS
        width = part_RS.shape[1]
        row_bytes, own = width * part_RS.element_size(), counts[self.rank]
        sent = [count * row_bytes for count in counts]
        received = [own * row_bytes] * self.size
        self._count("turn", sum(sent) - sent[self.rank])
        data = self.transport.exchange(_as_bytes(part_RS), sent, received)
        parts_tRS = data.view(part_RS.dtype).view(self.size, own, width)
        return parts_tRS.transpose(0, 1).reshape(own, self.size * width)

    def _count(self, operation: str, num_bytes: int) -> None:
        self.calls[operation] += 1
        self.sent_bytes[operation] += num_bytes


ALONE = RankGroup()


@dataclass(frozen=True, slots=True)
class Ranks:
    """The groups of one rank of a target of t ranks, whose drafters have d ranks each.

    Attributes:
        target: all t ranks.
        draft: the d ranks that draft for the same requests, with one drafter.
    """

    target: RankGroup = ALONE
    draft: RankGroup = ALONE

    @property
    def num_draft_groups(self) -> int:
        """t / d."""
        return self.target.size // self.draft.size

    @property
    def draft_group(self) -> int:
        """Number of the draft group that this rank belongs to."""
        return self.target.rank // self.draft.size

    @property
    def num_messages(self) -> int:
        """Operations that this rank has taken part in, in all groups."""
        return sum(one.num_messages for one in self._transports)

    def abort(self) -> None:
        """End the waits of other threads in all groups; every later operation fails."""
        for transport in self._transports:
            transport.abort()

    @property
    def _transports(self) -> list[Transport]:
        groups = self.target, self.draft
        return [one.transport for one in groups if one.transport is not None]


ONE_RANK = Ranks()


def _gathered(transport: Transport, part: Tensor) -> Tensor:
    """[t, *shape]."""
    data = transport.gather(_as_bytes(part))
    return data.flatten().view(part.dtype).view(len(data), *part.shape)


def _as_bytes(tensor: Tensor) -> Tensor:
    """uint8 [bytes]."""
    return tensor.contiguous().view(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class RequestShares:
    """The requests that each rank of a group works on.

    Attributes:
        counts: the first counts[0] requests of the batch are rank 0's, the next counts[1] rank 1's,
            and so on. A rank that is alone has all, and ignores them.
    """

    group: RankGroup = ALONE
    counts: tuple[int, ...] = ()

    @property
    def first(self) -> int:
        """The first request of this rank."""
        return sum(self.counts[: self.group.rank])

    def own(self, every: Tensor) -> Tensor:
        """[B, ...]: this rank's part of [G, ...]; a view."""
        if self.group.size == 1:
            return every
        return every.narrow(0, self.first, self.counts[self.group.rank])

    def turn(self, logits_RS: Tensor, num_columns: int) -> Tensor:
        """[Q, V], contiguous: whole rows of this rank's requests.

        Args:
            logits_RS: this rank's columns of all rows; each request has as many rows as the others.
            num_columns: V; the ranks' columns after these are left out.
        """
        if self.group.size == 1:
            return logits_RS
        num_each = len(logits_RS) // sum(self.counts)
        rows = [num_each * count for count in self.counts]
        return self.group.turn(logits_RS, rows)[:, :num_columns].contiguous()

    def join(self, part: Tensor) -> Tensor:
        """[G, ...]: the rows of all ranks' requests; `part`: this rank's [B, ...]."""
        return part if self.group.size == 1 else self.group.join_rows(part, self.counts)

    def of_rows(self, requests: Sequence[int]) -> "RequestShares":
        """The shares of a batch of rows that each belong to one request.

        Args:
            requests: of each row, ascending.
        """
        counts, end = list[int](), 0
        for count in self.counts:
            start, end = end, end + count
            counts.append(sum([start <= request < end for request in requests]))
        return RequestShares(self.group, tuple(counts))


ALL_HERE = RequestShares()
