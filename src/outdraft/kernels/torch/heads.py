"""Computations of draft heads between their products.

Dimension key: R rows, D hidden, S state, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def add_silu(x_RD: Tensor, y_RD: Tensor) -> Tensor:
    """x + silu(y), [R, D], of x's dtype, which is y's: a residual block of a draft head."""
    return x_RD + F.silu(y_RD)


def scale_to_rms(x_RS: Tensor, rms: float, eps: float) -> Tensor:
    """Rows of one root mean square, x / sqrt(mean(x ** 2) + eps) * rms: [R, S], of x's dtype.

    Statistics are float32 at least.
    """
    wide_RS = x_RS.to(torch.promote_types(x_RS.dtype, torch.float32))
    scale_R1 = torch.rsqrt(wide_RS.square().mean(-1, keepdim=True) + eps)
    return (wide_RS * scale_R1 * rms).to(x_RS.dtype)


def mix_tokens(
    z_RS: Tensor, ids_R: Tensor, embedding_VS: Tensor, share: float, norm_2S: Tensor, eps: float
) -> Tensor:
    """The state of an MLP speculator after tokens: gelu(n(z + share * embedding) * w + b).

    n scales a row to a root mean square of 1. [R, S], of z's dtype, which is that of all numbers.

    Args:
        ids_R: int64.
        norm_2S: w, then b; contiguous, as the embedding.
    """
    mixed_RS = torch.add(z_RS, F.embedding(ids_R, embedding_VS), alpha=share)
    weight_S, bias_S = norm_2S
    return F.gelu(scale_to_rms(mixed_RS, 1.0, eps) * weight_S + bias_S)
