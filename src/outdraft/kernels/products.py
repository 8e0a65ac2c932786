"""Products of rows with weights: plain, of experts, spread over ranks, and as tables of vectors.

Dimension key: T rows, D inputs, E outputs, N of them that one rank computes, S the most that one
does; K experts of a row, X experts, I intermediate (D is then hidden); V tokens, D numbers of a
token's vector.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from outdraft.core.weights import WeightFormat
from outdraft.distributed.group import RankGroup
from outdraft.distributed.vocabulary import VocabularyShard
from outdraft.kernels.data.coded_weight import Codes


class Product(Protocol):
    """x W^T + b, with a weight that is kept as it is read fastest.

    A row's bits depend neither on the rows beside it nor on the number of threads. Where the weight
    is quantised, rows may be rounded first: of every 128 inputs of a row, or of each group of the
    format if that is smaller, the number of largest size to 15 bits, and the others as far.

    Attributes:
        nbytes: of its own copy of the weight; 0: it reads the one that it was made from.
    """

    format: WeightFormat
    nbytes: int

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, E], of x's dtype, which is the weight's. float32 sums or better; rounded once."""
        ...

    def rows(self, outputs_T: Tensor) -> Tensor:
        """[T, D]: the weights of some outputs, int64 ids below E. Only of a weight in blocks, or of
        plain numbers."""
        ...


Packed = TypeVar("Packed", bound=Product)

# From one rank's product and the bias of all ranks' product to the product of the model.
ShardWrap = Callable[[Product, Tensor | None], Product]


class RowParallel:
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


class VocabParallel:
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


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingTable:
    """Vectors as numbers, or as the outputs of a product, which keeps their codes.

    Attributes:
        source: [V, D], of `dtype`; or the product, whose head it may be, too.
        num_tokens, size: V and D.
        dtype: of the vectors that are read.
    """

    source: Tensor | Product
    num_tokens: int
    size: int
    dtype: torch.dtype

    @staticmethod
    def of(numbers_VD: Tensor) -> "EmbeddingTable":
        """The table with these numbers."""
        num_tokens, size = numbers_VD.shape
        return EmbeddingTable(numbers_VD, num_tokens, size, numbers_VD.dtype)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """The vectors of int64 ids of any shape, [*, D]."""
        if isinstance(self.source, Tensor):
            return torch.nn.functional.embedding(token_ids, self.source)
        return self.source.rows(token_ids.flatten()).view(*token_ids.shape, self.size)

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers or codes."""
        return self.source.nbytes


class Activation(StrEnum):
    """The function of the products of gate and up."""

    SILU = "silu"  # silu(gate) * up (Shazeer 2020)
    GELU = "gelu"  # gelu(gate) * up
    GELU_TANH = "gelu-tanh"  # the same, approximated with tanh (Hendrycks, Gimpel 2016)
    CLAMPED = "clamped"  # (up + 1) * gate * sigmoid(alpha * gate), of clamped gate and up (GPT-OSS)


@dataclass(frozen=True, slots=True)
class Gate:
    """An activation and its parameters.

    Attributes:
        alpha: of CLAMPED.
        limit: of CLAMPED: the gate is at most this, up between -limit and limit.
    """

    activation: Activation = Activation.SILU
    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of all experts of a layer, of one dtype, or codes.

    They are asked for one by one and in order, those of codes once.

    Attributes:
        gate_up_X: for each expert [2 I, D], the gate's rows first; or parts of it that lie apart,
            each some of its rows.
        down_X: for each expert [D, I].
        dtype: of the rows.
        gate_up_bias_XE: [X, 2 I].
        down_bias_XD: for each expert what is added to its output.
    """

    gate_up_X: Sequence[Tensor | Sequence[Tensor] | Codes]
    down_X: Sequence[Tensor | Codes]
    dtype: torch.dtype = field(kw_only=True)
    gate_up_bias_XE: Tensor | None = None
    down_bias_XD: Tensor | None = None

    def packed(
        self,
        pack_linear: Callable[[Tensor | Sequence[Tensor], Tensor | None], Packed],
        pack_codes: Callable[[Codes, Tensor | None, torch.dtype], Packed],
    ) -> tuple[list[Packed], list[Packed]]:
        """The products of gate and up of all experts, and those of down."""

        def products(
            weights_X: Sequence[Tensor | Sequence[Tensor] | Codes], biases_XE: Tensor | None
        ) -> list[Packed]:
            made = list[Packed]()
            for expert, weight in enumerate(weights_X):
                bias_E = None if biases_XE is None else biases_XE[expert]
                if isinstance(weight, Codes):
                    made.append(pack_codes(weight, bias_E, self.dtype))
                else:
                    made.append(pack_linear(weight, bias_E))
            return made

        gate_up_X = products(self.gate_up_X, self.gate_up_bias_XE)
        return gate_up_X, products(self.down_X, self.down_bias_XD)


class Experts(Protocol):
    """y[t] = sum over k of weights[t, k] * down(gate(gate_up(x[t]))) of expert ids[t, k].

    On a CPU a row's bits depend neither on the rows beside it nor on the number of threads.

    Attributes:
        format: of the weights; where experts differ, that of the first one.
        nbytes: of its own copies of the weights; 0: it reads those that it was made from.
    """

    format: WeightFormat
    nbytes: int

    def __call__(
        self, x_TD: Tensor, expert_ids_TK: Tensor | None = None, weights_TK: Tensor | None = None
    ) -> Tensor:
        """[T, D], new, of x's dtype, which is the weights'.

        Between the two products numbers are of that dtype; what experts give is weighted and added
        in float32 or better, on a CPU in ascending order of the experts, and rounded once.

        Args:
            expert_ids_TK: int64, from 0 to X; X: no expert, which adds nothing. None: there is one
                expert, which all rows meet with weight 1.
            weights_TK: of any floating dtype.

        Raises:
            IndexError: an id is out of range, on a CPU.
        """
        ...
