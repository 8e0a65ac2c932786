"""Products whose weight is spread over the ranks of a group.

Dimension key: T rows, D inputs, E outputs, N of them that one rank computes, S the most that one
does.
"""

from collections.abc import Callable

from torch import Tensor

from outdraft.distributed.group import RankGroup
from outdraft.distributed.vocabulary import VocabularyShard
from outdraft.kernels.ops import Product

# From one rank's product and the bias of all ranks' product to the product of the model.
Spread = Callable[[Product, Tensor | None], Product]


class SummedProduct:
    """A product whose inputs are spread over the ranks; every rank gets the sum.

    Each rank rounds its part to the dtype of the rows. The sum is rounded once, and so is the bias
    added to it.

    Attributes:
        own: to this rank's part of the sum.
    """

    def __init__(self, group: RankGroup, own: Product, bias_E: Tensor | None) -> None:
        self.format, self.nbytes = own.format, own.nbytes
        self.own, self.bias_E = own, bias_E
        self._group = group

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, E], of this rank's inputs."""
        sum_TE = self._group.sum(self.own(x_TD))
        return sum_TE if self.bias_E is None else sum_TE + self.bias_E

    def rows(self, outputs_T: Tensor) -> Tensor:
        """[T, D]: this rank's inputs of some outputs."""
        return self.own.rows(outputs_T)


class PaddedProduct:
    """A product without a bias: each rank gets its own outputs, padded with -inf.

    Attributes:
        shard: the outputs.
        own: to those of this rank.
    """

    def __init__(self, shard: VocabularyShard, own: Product, bias_E: Tensor | None = None) -> None:
        assert bias_E is None
        self.format, self.nbytes = own.format, own.nbytes
        self.shard, self.own = shard, own

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, S]."""
        return self.shard.padded(self.own(x_TD))

    def rows(self, outputs_T: Tensor) -> Tensor:
        """[T, D]: of this rank's outputs."""
        return self.own.rows(outputs_T)
