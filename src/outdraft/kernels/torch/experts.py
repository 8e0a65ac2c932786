"""Mixtures of experts in torch.

Dimension key: T rows, K experts of a row, N = T K, X experts, D hidden, I intermediate, R rows of
one expert, E outputs of a product.
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
    """The experts of a layer, one after the other, those that have rows; for any device and
    floating dtype. On a GPU the host waits for their ids.

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

    def __call__(
        self, x_TD: Tensor, expert_ids_TK: Tensor | None = None, weights_TK: Tensor | None = None
    ) -> Tensor:
        """[T, D]."""
        if expert_ids_TK is None:
            return self._down_X[0](gated(self._gate_up_X[0](x_TD), self._gate))
        assert weights_TK is not None
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


class GroupedExperts(TorchExperts):
    """The experts of a layer, all at once; for bfloat16 on a GPU.

    Rows are sorted by their experts, and a product of all groups is one launch. The host waits for
    nothing, on a GPU of compute capability 9.0 or more: on others torch multiplies group by group,
    and reads on the host where they end. Weights lie in one copy of their own.
    """

    def __init__(
        self, weights: ExpertWeights, gate: Gate, quantization: WeightFormat | None = None
    ) -> None:
        super().__init__(weights, gate, quantization)
        self._num_experts = len(self._down_X)
        self._biases = weights.gate_up_bias_XE, weights.down_bias_XD
        plain = [[one.weight_ED for one in of_X] for of_X in (self._gate_up_X, self._down_X)]
        if self._num_experts == 1:
            self._weights = [weight_ED.T[None] for [weight_ED] in plain]
            return
        self._weights = [torch.stack(of_X).transpose(1, 2) for of_X in plain]
        self.nbytes = sum(weight.nbytes for weight in self._weights)
        self._gate_up_X, self._down_X = [], []

    def __call__(
        self, x_TD: Tensor, expert_ids_TK: Tensor | None = None, weights_TK: Tensor | None = None
    ) -> Tensor:
        """[T, D]."""
        if expert_ids_TK is None:
            return super().__call__(x_TD)
        assert weights_TK is not None
        per_row = expert_ids_TK.shape[1]
        sorted_N, order_N = expert_ids_TK.flatten().sort(stable=True)
        experts_X = torch.arange(self._num_experts, device=x_TD.device)
        ends_X = torch.searchsorted(sorted_N, experts_X, right=True, out_int32=True)
        expert_N = sorted_N.clamp_max(self._num_experts - 1)  # of rows without an expert any one
        h_NI = gated(self._product(0, x_TD[order_N // per_row], ends_X, expert_N), self._gate)
        out_ND = self._product(1, h_NI, ends_X, expert_N).float()
        # Rows without an expert are in no group: what they hold is not a number, perhaps.
        out_ND = out_ND.masked_fill((sorted_N == self._num_experts)[:, None], 0)
        out_TKD = (
            torch.empty_like(out_ND).index_copy_(0, order_N, out_ND).unflatten(0, (-1, per_row))
        )
        return (out_TKD * weights_TK.float()[:, :, None]).sum(1).to(x_TD.dtype)

    def _product(self, which: int, x_ND: Tensor, ends_X: Tensor, expert_N: Tensor) -> Tensor:
        """The product of gate and up, or of down, of rows that are sorted by their experts."""
        y_NE = F.grouped_mm(x_ND, self._weights[which], offs=ends_X)
        bias_XE = self._biases[which]
        return y_NE if bias_XE is None else y_NE + bias_XE[expert_N]


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
    if gate_RI.device.type != "cpu":
        return F.gelu(gate_RI, approximate=approximate) * up_RI
    # Each row by itself: torch computes vectors by one method and what is left by another.
    rows = [F.gelu(row_1I.clone(), approximate=approximate) for row_1I in gate_RI.split(1)]
    return torch.cat(rows) * up_RI if rows else gate_RI * up_RI
