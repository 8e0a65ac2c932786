"""How far float32 sums may be off, whatever the processor: bounds from the length of the sum.

A sum of n products in float32 is within n * 2**-24 of the sum of their sizes, in any order, with or
without fused multiply-adds (Higham, Accuracy and Stability of Numerical Algorithms, 3.1).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

UNIT = 2.0**-24  # of float32
# Two evaluations of a small model in float32: about a thousand roundings lie between a token and
# its logits, which are of size one.
MODEL_ROUNDING = 1000 * UNIT


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
