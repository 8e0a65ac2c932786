"""How far float32 sums may be off, whatever the processor: bounds from the length of the sum.

A sum of n products in float32 is within n * 2**-24 of the sum of their sizes, in any order, with or
without fused multiply-adds (Higham, Accuracy and Stability of Numerical Algorithms, 3.1).
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from outdraft.core.weights import QUANTIZATIONS, WeightFormat

UNIT = 2.0**-24  # of float32
# Two evaluations of a small model in float32: about a thousand roundings lie between a token and
# its logits, which are of size one.
MODEL_ROUNDING = 1000 * UNIT
# The same where rows become integers of 16 bits before they meet quantised weights: ten such
# products lie between a token and its logits, and each is off by a few halves of the last bit.
SHORTS_ROUNDING = 32 * 2.0**-15


def model_bound(formats: Iterable[WeightFormat]) -> float:
    """How far two evaluations of a small model may be apart, from how its weights are kept."""
    has_codes = any(format in QUANTIZATIONS or format.is_blocks for format in formats)
    return SHORTS_ROUNDING if has_codes else 4 * MODEL_ROUNDING


def as_shorts(x_TD: Tensor, group_inputs: int) -> Tensor:
    """Rows as csrc/linear_rows.cpp rounds them for quantised weights, float32.

    In each group of inputs the number of largest size has 15 bits, and the others are rounded as
    far, ties to even. 32,768 steps become 32,767.
    """
    groups = []
    for group_TG in x_TD.double().split(group_inputs, dim=1):
        _, exponent_T1 = torch.frexp(group_TG.abs().amax(dim=1, keepdim=True))
        step_T1 = torch.ldexp(torch.ones_like(exponent_T1.double()), exponent_T1 - 15)
        groups.append((group_TG / step_T1).round().clamp(-32767, 32767) * step_T1)
    return torch.cat(groups, dim=1).float()


def as_bytes(x_TD: Tensor, group_inputs: int) -> Tensor:
    """Rows as csrc/linear_rows.cpp rounds them to 8 bits, float64.

    In each group of inputs the number of largest size becomes 127 steps or -127.
    """
    num_inputs = x_TD.shape[1]
    padded_TD = F.pad(x_TD.float(), (0, -num_inputs % group_inputs))
    x_TNG = padded_TD.unflatten(1, (-1, group_inputs))
    most_TN1 = x_TNG.abs().amax(dim=2, keepdim=True)
    codes_TNG = (x_TNG * (127 / most_TN1)).round()
    return (codes_TNG.double() * (most_TN1 / 127).double()).flatten(1)[:, :num_inputs]


def assert_float32_products(
    got_TE: Tensor, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None
) -> None:
    """`got_TE` is x W^T + b as float32 may give it; if it has another dtype, rounded to that."""
    exact = [None if one is None else one.double() for one in (x_TD, weight_ED, bias_E)]
    sizes = [None if one is None else one.abs() for one in exact]
    want_TE, size_TE = F.linear(*exact), F.linear(*sizes)
    num_roundings = x_TD.shape[1] + 2  # a term each, the bias, and float32 itself
    bound_TE = 1.01 * num_roundings * UNIT * size_TE
    if got_TE.dtype is not torch.float32:
        bound_TE = bound_TE + (want_TE.abs() + bound_TE) * torch.finfo(got_TE.dtype).eps / 2
    assert got_TE.shape == want_TE.shape
    error_TE = (got_TE.double() - want_TE).abs()
    assert (error_TE <= bound_TE).all(), f"{(error_TE / bound_TE).max():.2f} of the bound"
