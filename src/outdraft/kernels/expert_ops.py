"""Mixtures of experts: each row goes through a few of many feed-forward blocks.

Dimension key: T rows, K experts of a row, X experts, D hidden, I intermediate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from outdraft.core.weight_format import WeightFormat
from outdraft.kernels.data.coded_weight import Codes


class Activation(StrEnum):
    """What becomes of the products of gate and up."""

    SILU = "silu"  # silu(gate) * up (Shazeer 2020)
    GELU = "gelu"  # gelu(gate) * up
    GELU_TANH = "gelu-tanh"  # the same, approximated with tanh (Hendrycks, Gimpel 2016)
    CLAMPED = "clamped"  # (up + 1) * gate * sigmoid(alpha * gate), of clamped gate and up (GPT-OSS)


@dataclass(frozen=True, slots=True)
class Gate:
    """What becomes of the products of gate and up.

    Attributes:
        alpha: of CLAMPED.
        limit: likewise: the gate is at most this, up between -limit and limit.
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


class Experts(Protocol):
    """y[t] = sum over k of weights[t, k] * down(gate(gate_up(x[t]))) of expert ids[t, k].

    On a CPU a row's bits depend neither on the rows beside it nor on the number of threads.

    Attributes:
        format: of the weights; where experts differ, that of the first one.
        nbytes: of its own copies of the weights; 0: it reads those that it was made from.
    """

    format: WeightFormat
    nbytes: int

    def __call__(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """[T, D], new, of x's dtype, which is the weights'.

        Between the two products numbers are of that dtype; what experts give is weighted and added
        in float32 or better, in ascending order of the experts, and rounded once.

        Args:
            expert_ids_TK: int64, from 0 to X; X: no expert, which adds nothing.
            weights_TK: of any floating dtype.

        Raises:
            IndexError: an id is out of range.
        """
        ...
