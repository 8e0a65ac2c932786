"""Mixtures of experts in torch, for any device and floating dtype.

Dimension key: T rows, K experts of a row, X experts, D hidden, I intermediate, R rows of one
expert, E outputs of a product.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outdraft.core.weights import WeightFormat
from outdraft.kernels.data.coded_weight import Codes
from outdraft.kernels.products import Activation, ExpertWeights, Gate
from outdraft.kernels.torch.linear import PlainProduct, pack_codes
from outdraft.kernels.torch.pointwise import silu_mul


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
        self._gate_up_X = [
            _pack(weight, _row(weights.gate_up_bias_XE, expert), quantization, weights.dtype)
            for expert, weight in enumerate(weights.gate_up_X)
        ]
        self._down_X = [
            _pack(weight, _row(weights.down_bias_XD, expert), quantization, weights.dtype)
            for expert, weight in enumerate(weights.down_X)
        ]
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
        return ((up_RI + 1) * _sigmoid_mul(gate_RI, gate.alpha)).to(gate_RI.dtype)
    approximate = "tanh" if gate.activation is Activation.GELU_TANH else "none"
    # Each row by itself: torch computes vectors by one method and what is left by another.
    rows = [F.gelu(row_1I.clone(), approximate=approximate) for row_1I in gate_RI.split(1)]
    return torch.cat(rows) * up_RI if rows else gate_RI * up_RI


def _sigmoid_mul(x_RI: Tensor, alpha: float) -> Tensor:
    """x * sigmoid(alpha x), in float32 or better; exp as in `silu_mul`."""
    if x_RI.device.type != "cpu":
        return x_RI * torch.sigmoid(alpha * x_RI)
    wide_RI = x_RI.to(torch.promote_types(x_RI.dtype, torch.float32)).numpy()
    with np.errstate(over="ignore"):  # infinity is right
        return torch.from_numpy(wide_RI / (1 + np.exp(-alpha * wide_RI)))


def _pack(
    weight: Tensor | Sequence[Tensor] | Codes,
    bias_E: Tensor | None,
    quantization: WeightFormat | None,
    dtype: torch.dtype,
) -> PlainProduct:
    if isinstance(weight, Codes):
        return pack_codes(weight, bias_E, dtype)
    return PlainProduct(weight, bias_E, quantization)


def _row(bias_XE: Tensor | None, expert: int) -> Tensor | None:
    return None if bias_XE is None else bias_XE[expert]
