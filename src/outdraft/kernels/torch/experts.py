"""Mixtures of experts in torch, for any device and floating dtype.

Dimension key: T rows, K experts of a row, X experts, D hidden, I intermediate, R rows of one
expert, E outputs of a product.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from outdraft.core.weights import WeightFormat
from outdraft.kernels.products import Activation, ExpertWeights, Gate
from outdraft.kernels.torch.linear import PlainProduct, pack_codes
from outdraft.kernels.torch.pointwise import sigmoid_mul, silu_mul


class TorchExperts:
    """The experts of a layer, one after the other, those that have rows.

    Their weights are neither changed nor written later.

    Args:
        quantization: weights have the numbers that it rounds them to; codes stay as they are.
    """

    def __init__(
        self, weights: ExpertWeights, gate: Gate, quantization: WeightFormat | None = None
    ) -> None:
        self._gate = gate
        pack_linear = partial(PlainProduct, quantization=quantization)
        self._gate_up_X, self._down_X = weights.packed(pack_linear, pack_codes)
        self.format = self._down_X[0].format
        self.nbytes = sum(product.nbytes for product in (*self._gate_up_X, *self._down_X))

    def __call__(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """[T, D]."""
        num_experts = len(self._down_X)
        chosen = expert_ids_TK.unique().tolist()
        if chosen and not 0 <= chosen[0] <= chosen[-1] <= num_experts:
            raise IndexError(f"ids of experts must be from 0 to {num_experts}, got {chosen}")
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        y_TD = torch.zeros(x_TD.shape, dtype=wide, device=x_TD.device)
        for expert in chosen:
            if expert == num_experts:
                continue
            rows_R, places_R = torch.where(expert_ids_TK == expert)
            h_RI = gated(self._gate_up_X[expert](x_TD[rows_R]), self._gate)
            out_RD = self._down_X[expert](h_RI).to(wide)
            y_TD.index_add_(0, rows_R, out_RD * weights_TK[rows_R, places_R, None].to(wide))
        return y_TD.to(x_TD.dtype)


def gated(gate_up_RE: Tensor, gate: Gate) -> Tensor:
    """[R, I] of [R, 2 I]."""
    if gate.activation is Activation.SILU:
        return silu_mul(gate_up_RE)
    gate_RI, up_RI = gate_up_RE.chunk(2, dim=-1)
    if gate.activation is Activation.CLAMPED:
        gate_RI = gate_RI.clamp(max=gate.limit)
        up_RI = up_RI.clamp(-gate.limit, gate.limit)
        return ((up_RI + 1) * sigmoid_mul(gate_RI, gate.alpha)).to(gate_RI.dtype)
    approximate = "tanh" if gate.activation is Activation.GELU_TANH else "none"
    # Each row by itself: torch computes vectors by one method and what is left by another.
    rows = [F.gelu(row_1I.clone(), approximate=approximate) for row_1I in gate_RI.split(1)]
    return torch.cat(rows) * up_RI if rows else gate_RI * up_RI
