"""Products of rows with a weight, in torch.

On a CPU a row's result does not depend on the rows beside it, bit for bit: a text does not change
with what is computed together. Libraries choose other code, with another order of the sums, for
one row, or for as few rows as each thread happens to get. So rows are multiplied one by one.

Dimension key: T rows, D inputs, E outputs.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outdraft.core.weights import WeightFormat
from outdraft.kernels.data.coded_weight import Codes


def linear(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """x W^T + b: [T, E]."""
    if x_TD.device.type != "cpu" or x_TD.shape[0] == 0:
        return F.linear(x_TD, weight_ED, bias_E)
    # Every row is copied to an address of its own: where a row begins may change its sums too.
    return torch.cat([F.linear(x_1D.clone(), weight_ED, bias_E) for x_1D in x_TD.split(1)])


def quantized(weight_ED: Tensor, quantization: WeightFormat) -> Tensor:
    """The numbers that a format makes of a weight, in its dtype.

    int8: the largest size of an output, or of a group, becomes 127. int4: the number of the largest
    size in a group becomes -8; or with a zero point the smallest and the largest one, zero among
    them, 0 and 15. Scales are rounded to bfloat16.
    """
    group_inputs = quantization.group_inputs or weight_ED.shape[1]
    groups = [_quantized_group(part, quantization) for part in weight_ED.split(group_inputs, dim=1)]
    return torch.cat(groups, dim=1).to(weight_ED.dtype)


def _quantized_group(weight_ED: Tensor, quantization: WeightFormat) -> Tensor:
    weight_ED = weight_ED.float()
    low_E1 = weight_ED.amin(dim=1, keepdim=True).clamp(max=0)
    high_E1 = weight_ED.amax(dim=1, keepdim=True).clamp(min=0)
    largest_E1 = torch.where(-low_E1 > high_E1, low_E1, high_E1)
    least, most = -8, 7
    if quantization.is_int8:
        least, most, size_E1 = -127, 127, largest_E1.abs() / 127
    elif quantization.has_zero:
        size_E1 = (high_E1 - low_E1) / 15
    else:
        size_E1 = largest_E1 / -8
    scale_E1 = size_E1.bfloat16().float()
    shift_E1 = torch.zeros_like(scale_E1)
    if quantization.has_zero:
        shift_E1 = torch.where(scale_E1 == 0, 0, 8 - (-low_E1 / scale_E1).round())
    codes_ED = ((weight_ED / scale_E1).round() - shift_E1).clamp(least, most)
    return torch.where(scale_E1 == 0, 0, (codes_ED + shift_E1) * scale_E1)


class PlainProduct:
    """A product that reads the weight that it was given, or one of its own that it made of it.

    It makes one of the numbers that a format rounds to, and of parts that lie apart. Neither weight
    is changed or written later.

    Attributes:
        weight_ED: what it multiplies with.

    Args:
        weight_ED: or parts of it that lie apart, each some of its rows, all of one dtype.
        quantization: the numbers are those that it rounds the weight to; None: those of the weight.
    """

    def __init__(
        self,
        weight_ED: Tensor | Sequence[Tensor],
        bias_E: Tensor | None,
        quantization: WeightFormat | None = None,
    ) -> None:
        self.format = quantization or WeightFormat.PLAIN
        given_ED = weight_ED
        if not isinstance(weight_ED, Tensor):
            weight_ED = torch.cat(list(weight_ED))
        if quantization is not None:
            weight_ED = quantized(weight_ED, quantization)
        self.nbytes = 0 if weight_ED is given_ED else weight_ED.nbytes
        self.weight_ED, self._bias_E = weight_ED, bias_E

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, E]."""
        return linear(x_TD, self.weight_ED, self._bias_E)

    def rows(self, outputs_T: Tensor) -> Tensor:
        """[T, D]."""
        return self.weight_ED[outputs_T]


def pack_codes(weight: Codes, bias_E: Tensor | None, dtype: torch.dtype) -> PlainProduct:
    """Make the product with a weight that comes as integers; a fast one keeps them as they are.

    This one multiplies by their numbers, rounded to `dtype`, that of the rows that it is for.
    """
    product = PlainProduct([weight.numbers().to(dtype)], bias_E)
    product.format = weight.format
    return product
