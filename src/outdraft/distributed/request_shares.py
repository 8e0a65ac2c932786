"""Whose rows are whose, where ranks compute a batch together and each looks at a part of it alone.

Dimension key: G requests of the batch, R rows of them, S columns that one rank has, B requests of
this rank, Q rows of them, V columns of all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outdraft.distributed.group import ALONE, RankGroup


@dataclass(frozen=True, slots=True)
class RequestShares:
    """The requests that each rank of a group looks at.

    Attributes:
        counts: the first counts[0] requests of the batch are rank 0's, the next counts[1] rank 1's,
            and so on. A rank that is alone has all, whatever they say.
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
            num_columns: V; what ranks have behind these is left out.
        """
        if self.group.size == 1:
            return logits_RS
        num_each = len(logits_RS) // sum(self.counts)
        rows = [num_each * count for count in self.counts]
        return self.group.turn(logits_RS, rows)[:, :num_columns].contiguous()

    def join(self, part: Tensor) -> Tensor:
        """[G, ...]: what all ranks say of their requests; of this rank's [B, ...]."""
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
