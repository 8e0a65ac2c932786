"""Products whose weight is spread over the ranks of a group.

Dimension key: T rows, D inputs, E outputs, N of them that one rank computes, S the most that one
does.
"""

from collections.abc import Callable

from torch import Tensor

from outdraft.distributed.group import RankGroup
from outdraft.distributed.vocabulary import VocabularyShard
from outdraft.kernels.ops import Product

# Makes of one rank's product, and the bias of all ranks' product, what the model computes.
Spread = Callable[[Product, Tensor | None], Product]


class SummedProduct:
    """As `ops.Product`: each rank has some of the inputs; every rank gets the sum.

    Each rank rounds its part to the dtype of the rows. The sum is rounded once, and so is the bias
    added to it.
    """

    def __init__(self, group: RankGroup, own: Product, bias_E: Tensor | None) -> None:
        self.format, self.nbytes = own.format, own.nbytes
        self._group, self._own, self._bias_E = group, own, bias_E

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, E], of this rank's inputs."""
        sum_TE = self._group.sum(self._own(x_TD))
        return sum_TE if self._bias_E is None else sum_TE + self._bias_E


class PaddedProduct:
    """As `ops.Product`, without a bias: each rank gets its own outputs, padded with -inf."""

    def __init__(self, shard: VocabularyShard, own: Product, bias_E: Tensor | None = None) -> None:
        assert bias_E is None
        self.format, self.nbytes = own.format, own.nbytes
        self._shard, self._own = shard, own

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, S]."""
        return self._shard.padded(self._own(x_TD))
