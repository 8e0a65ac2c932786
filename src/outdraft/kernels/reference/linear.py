"""Products of rows with a weight, in torch.

On a CPU a row's result does not depend on the rows beside it, bit for bit: a text does not change
with what is computed together. Libraries choose other code, with another order of the sums, for
one row, or for as few rows as each thread happens to get. So rows are multiplied one by one.

Dimension key: T rows, D inputs, E outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from outdraft.kernels.ops import WeightFormat


def linear(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """x W^T + b: [T, E]."""
    if x_TD.device.type != "cpu" or x_TD.shape[0] == 0:
        return F.linear(x_TD, weight_ED, bias_E)
    # Every row is copied to an address of its own: where a row begins may change its sums too.
    return torch.cat([F.linear(x_1D.clone(), weight_ED, bias_E) for x_1D in x_TD.split(1)])


class PlainProduct:
    """As `ops.Product`: reads the weight that it was given."""

    format = WeightFormat.PLAIN
    nbytes = 0

    def __init__(self, weight_ED: Tensor, bias_E: Tensor | None) -> None:
        self._weight_ED, self._bias_E = weight_ED, bias_E

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, E]."""
        return linear(x_TD, self._weight_ED, self._bias_E)


def pack_linear(
    weight_ED: Tensor, bias_E: Tensor | None, quantization: WeightFormat | None = None
) -> PlainProduct:
    """As `ops.PackLinear`."""
    return PlainProduct(weight_ED, bias_E)
