"""Parts of a transformers model that this engine's kernels compute in fewer calls.

Each part is found by its names and compared with what replaces it on random rows: what differs
stays the library's. All of them give a row the same bits whatever rows are beside it.

Dimension key: T rows, D inputs and outputs, I intermediate, E outputs of several products.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outdraft.distributed.group import ALONE, RankGroup
from outdraft.kernels.ops import Kernels
from outdraft.kernels.products import ExpertWeights, Gate
from outdraft.models.experts import ACTIVATIONS, PackedExperts, present_modules
from outdraft.models.layers.linear import Linear
from outdraft.models.quantized.stand_ins import Packing

_READ_TOGETHER = ("q_proj", "k_proj", "v_proj")


def fuse_layers(model: nn.Module, packing: Packing, group: RankGroup = ALONE) -> None:
    """Replace norms, feed-forward blocks, and products that read the same rows. Codes of several
    formats stay products of their own.

    Args:
        group: the ranks over which the products are spread already.
    """
    for module in present_modules(model):
        for name, part in list(module.named_children()):
            found = _norm(part, packing.kernels)
            if found is None and group.size == 1:  # else parts of a block are to be summed
                found = _block(part, packing)
            if found is not None:
                setattr(module, name, found)
        parts = [getattr(module, name, None) for name in _READ_TOGETHER]
        is_one = all(type(part) is nn.Linear for part in parts)
        if is_one and packing.stand_ins.can_join([part.weight for part in parts if part]):
            fused = _FusedProducts(_joined(parts, packing), parts)
            for index, name in enumerate(_READ_TOGETHER):
                setattr(module, name, _FusedPart(fused, index))


class FusedNorm(nn.Module):
    """x / rms(x) * weight, rounded before the weight, as the library's."""

    def __init__(self, weight_D: nn.Parameter, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight, self._eps, self._kernels = weight_D, eps, kernels

    def forward(self, x_1TD: Tensor) -> Tensor:
        """The same shape."""
        rows_TD = x_1TD.reshape(-1, x_1TD.shape[-1])
        scaled_TD = self._kernels.scale_to_rms(rows_TD, 1.0, self._eps)
        return (scaled_TD * self.weight).view(x_1TD.shape)


class FusedBlock(nn.Module):
    """down(act(gate) * up): a mixture of one expert."""

    def __init__(self, experts: PackedExperts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x_1TD: Tensor) -> Tensor:
        """The same shape."""
        rows_TD = x_1TD.reshape(-1, x_1TD.shape[-1])
        ids_T1 = torch.zeros((len(rows_TD), 1), dtype=torch.int64, device=x_1TD.device)
        weights_T1 = torch.ones((len(rows_TD), 1), device=x_1TD.device)
        return self.experts(rows_TD, ids_T1, weights_T1).view(x_1TD.shape)


class _FusedProducts:
    """Several products with the same rows, computed when the first of them is asked for."""

    def __init__(self, linear: Linear, parts: list[Any]) -> None:
        self.linear, self._sizes = linear, [part.out_features for part in parts]
        self._x: Tensor | None = None
        self._found: list[Tensor | None] = []

    def part(self, x_1TD: Tensor, index: int) -> Tensor:
        """[1, T, E] of one product."""
        if x_1TD is not self._x or self._found[index] is None:
            y_TE = self.linear(x_1TD.flatten(0, -2))
            self._x, self._found = x_1TD, [*y_TE.split(self._sizes, dim=-1)]
        y_TE, self._found[index] = self._found[index], None
        assert y_TE is not None
        if all(part is None for part in self._found):
            self._x = None
        return y_TE.view(*x_1TD.shape[:-1], y_TE.shape[-1])


class _FusedPart(nn.Module):
    def __init__(self, fused: _FusedProducts, index: int) -> None:
        super().__init__()
        self._fused, self._index = fused, index
        if index == 0:
            self.linear = fused.linear  # once, for who counts weights

    def forward(self, x_1TD: Tensor) -> Tensor:
        return self._fused.part(x_1TD, self._index)


def _norm(part: nn.Module, kernels: Kernels) -> FusedNorm | None:
    weight = getattr(part, "weight", None)
    eps = getattr(part, "variance_epsilon", getattr(part, "eps", None))
    if not type(part).__name__.endswith("RMSNorm") or not isinstance(weight, nn.Parameter):
        return None
    if weight.dim() != 1 or not isinstance(eps, float):
        return None
    fused = FusedNorm(weight, eps, kernels)
    x_2D = _random(2, len(weight), weight)
    return fused if _is_same(part(x_2D), fused(x_2D)) else None


def _block(part: Any, packing: Packing) -> FusedBlock | None:
    names = ("gate_proj", "up_proj", "down_proj")
    products: list[Any] = [getattr(part, name, None) for name in names]
    if not all(type(one) is nn.Linear and getattr(one, "bias", None) is None for one in products):
        return None
    activation = ACTIVATIONS.get(type(getattr(part, "act_fn", None)).__name__)
    if activation is None:
        return None
    kept, stand_ins = [one.weight for one in products], packing.stand_ins
    if not stand_ins.can_join(kept[:2]):
        return None
    gate, up, down = (weight.detach() for weight in kept)
    x_2D = _random(2, gate.shape[1], gate)
    between_2I = part.act_fn(F.linear(x_2D, gate)) * F.linear(x_2D, up)
    if not _is_same(part(x_2D), F.linear(between_2I, down)):
        return None
    weights = ExpertWeights(
        [stand_ins.coded(kept[:2]) or (gate, up)],
        [stand_ins.coded(kept[2:]) or down],
        dtype=down.dtype,
    )
    experts = packing.kernels.pack_experts(weights, Gate(activation), packing.quantization)
    return FusedBlock(PackedExperts(experts, 1, gate.nbytes + up.nbytes + down.nbytes))


def _joined(parts: list[Any], packing: Packing) -> Linear:
    weight = parts[0].weight
    biases = [part.bias for part in parts]
    sizes = [part.out_features for part in parts]
    has_bias = any(bias is not None for bias in biases)
    linear = Linear(
        weight.shape[1], sum(sizes), bias=has_bias, dtype=weight.dtype, device=weight.device
    )
    if linear.bias is not None:
        for to, bias in zip(linear.bias.data.split(sizes), biases, strict=True):
            to.copy_(bias) if bias is not None else to.zero_()
    weights = [part.weight for part in parts]
    packing.pack(linear, weights, [weight.detach() for weight in weights])
    return linear


def _random(num_rows: int, size: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, size, generator=generator)
    return rows.to(dtype=like.dtype, device=like.device)


def _is_same(found: Any, expected: Tensor) -> bool:
    tolerance = 2e-2 if expected.dtype.itemsize < 4 else 1e-4
    return isinstance(found, Tensor) and torch.allclose(found, expected, tolerance, tolerance)
