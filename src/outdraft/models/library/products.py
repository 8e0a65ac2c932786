"""Products of a transformers model, and parts around them, by this engine's kernels.

Norms and feed-forward blocks are found by their names and compared with what replaces them on
random rows: what differs stays the library's. All replacements give a row the same bits whatever
rows are in the batch.

Dimension key: T rows, D inputs, E outputs, I intermediate.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outdraft.distributed.group import ALONE, RankGroup
from outdraft.kernels.ops import Kernels
from outdraft.kernels.products import EmbeddingTable, ExpertWeights, Gate, ShardWrap
from outdraft.models.checkpoints.stored import StoredParameter
from outdraft.models.library.checkpoint import CodedParameter, Packing, can_join, coded
from outdraft.models.library.experts import ACTIVATIONS, PackedExperts, present_modules
from outdraft.models.library.experts import keeps_codes as experts_keep_codes
from outdraft.models.library.operations import catch_operations, is_router
from outdraft.models.modules import Linear


class FlatLinear(nn.Module):
    """A packed product for inputs with leading dimensions [1, T] or [T]."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x_1TD: Tensor) -> Tensor:
        """[1, T, E], or [T, E]."""
        if x_1TD.dim() == 2:
            return self.linear(x_1TD)
        y_TE = self.linear(x_1TD.flatten(0, -2))
        return y_TE.view(*x_1TD.shape[:-1], y_TE.shape[-1])


class CodedEmbedding(nn.Embedding):
    """Reads vectors from codes; families do with them what they do with those of numbers."""

    table: EmbeddingTable
    packed_bytes: int  # of codes that no head counts

    def forward(self, input: Tensor) -> Tensor:
        """The vectors of int64 ids of any shape, [*, D]."""
        return self.table(input)


def table_of(embedding: nn.Embedding) -> EmbeddingTable:
    """The table that an embedding reads."""
    if isinstance(embedding, CodedEmbedding):
        return embedding.table
    return EmbeddingTable.of(embedding.weight.data)


def pack_products(
    model: nn.Module,
    packing: Packing,
    spreads: Mapping[nn.Module, ShardWrap] = MappingProxyType({}),
) -> None:
    """Replace all products by packed ones, each as it is reached, so that few are there twice.

    A router's weights are multiplied as they lie: it may call its product by name, not as a module.
    Its rows do not depend on each other either.
    """
    tables = [part for part in model.modules() if isinstance(part, nn.Embedding)]
    embeddings, heads = {id(part.weight) for part in tables}, dict[int, Linear]()
    for module in present_modules(model):
        if is_router(module):
            continue
        for name in [name for name, _ in module.named_children()]:
            part = module.get_submodule(name)
            if _is_product(part):
                linear = _packed(part, packing, spreads.get(part))
                if id(part.weight) in embeddings:
                    heads[id(part.weight)] = linear
                setattr(module, name, FlatLinear(linear))
    for part in tables:
        if isinstance(part.weight, CodedParameter):
            _pack_table(part, packing, heads.get(id(part.weight)))
    for module in model.modules():
        if is_router(module):
            catch_operations(module, packing.kernels)


def keeps_codes(module: nn.Module, name: str, stored: StoredParameter) -> bool:
    """Is true if a parameter's codes can be packed."""
    if isinstance(module, nn.Embedding):
        return name == "weight" and stored.tile is not None and stored.tile.is_blocks
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return name == "weight" and not stored.is_stack and not stored.is_transposed
    return stored.is_stack and experts_keep_codes(module, name, is_transposed=stored.is_transposed)


def _is_product(part: nn.Module) -> TypeGuard[nn.Linear | Conv1D]:
    """Is true if it computes x W^T + b, also where a family has written it anew."""
    if isinstance(part, Conv1D) or type(part).forward is nn.Linear.forward:
        return True
    if not isinstance(part, nn.Linear):
        return False
    x_2D = torch.randn(2, part.in_features, dtype=part.weight.dtype, device=part.weight.device)
    found, expected_2E = part(x_2D), nn.functional.linear(x_2D, part.weight, part.bias)
    tolerance = 1e-2 if part.weight.itemsize < 4 else 1e-4
    return isinstance(found, Tensor) and torch.allclose(found, expected_2E, tolerance, tolerance)


def _pack_table(embedding: nn.Embedding, packing: Packing, head: Linear | None) -> None:
    """Keep the codes of an embedding; those of a tied head are the same."""
    weight_VD = embedding.weight
    if head is None:
        codes = coded([weight_VD])
        assert codes is not None
        product = packing.kernels.pack_codes(codes, None, weight_VD.dtype)
    else:
        assert head.product is not None
        product = head.product
    kind = type(embedding)
    bases = (CodedEmbedding,) if kind is nn.Embedding else (kind, CodedEmbedding)
    embedding.__class__ = type(f"Coded{kind.__name__}", bases, {})
    assert isinstance(embedding, CodedEmbedding)
    num_tokens, size = weight_VD.shape
    embedding.table = EmbeddingTable(product, num_tokens, size, weight_VD.dtype)
    embedding.packed_bytes = 0 if head is not None else product.nbytes
    # Gemma's asks for its dtype.
    embedding.weight = nn.Parameter(weight_VD.new_empty((0, size)), requires_grad=False)


def _packed(part: Any, packing: Packing, spread: ShardWrap | None = None) -> Linear:
    weight_ED: Tensor = part.weight.detach()
    if isinstance(part, Conv1D):
        weight_ED = weight_ED.T.contiguous()
    linear = Linear(
        weight_ED.shape[1],
        len(weight_ED),
        bias=part.bias is not None,
        dtype=weight_ED.dtype,
        device=weight_ED.device,
        weight=nn.Parameter(weight_ED, requires_grad=False),
        spread=spread,
    )
    if linear.bias is not None:
        linear.bias.data.copy_(part.bias.detach())
    packing.pack(linear, part.weight)
    return linear


def fuse_layers(model: nn.Module, packing: Packing, group: RankGroup = ALONE) -> None:
    """Replace norms and feed-forward blocks.

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


class FusedNorm(nn.Module):
    """x / rms(x) * weight, in the dtype of the weight, which may be above that of x."""

    def __init__(self, weight_D: nn.Parameter, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight, self._eps, self._kernels = weight_D, eps, kernels

    def forward(self, x_1TD: Tensor) -> Tensor:
        """[1, T, D] of the same shape."""
        rows_TD = x_1TD.reshape(-1, x_1TD.shape[-1]).to(self.weight.dtype)
        scaled_TD = self._kernels.scale_to_rms(rows_TD, 1.0, self._eps)
        return (scaled_TD * self.weight).to(x_1TD.dtype).view(x_1TD.shape)


class FusedBlock(PackedExperts):
    """down(act(gate) * up): a mixture of one expert."""

    def forward(self, x_1TD: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[1, T, D] of the same shape."""
        return self.experts(x_1TD.reshape(-1, x_1TD.shape[-1])).view(x_1TD.shape)


def _norm(part: nn.Module, kernels: Kernels) -> FusedNorm | None:
    weight = getattr(part, "weight", None)
    eps = getattr(part, "variance_epsilon", getattr(part, "eps", None))
    if not type(part).__name__.endswith("RMSNorm") or not isinstance(weight, nn.Parameter):
        return None
    if weight.dim() != 1 or not isinstance(eps, float):
        return None
    x_2D = _random(2, len(weight), weight)
    expected_2D = part(x_2D)
    above_one = nn.Parameter(1.0 + weight.detach().float(), requires_grad=False)  # Gemma's
    fused = (FusedNorm(factor, eps, kernels) for factor in (weight, above_one))
    return next((one for one in fused if _is_same(one(x_2D), expected_2D)), None)


def _block(part: Any, packing: Packing) -> FusedBlock | None:
    names = ("gate_proj", "up_proj", "down_proj")
    products: list[Any] = [getattr(part, name, None) for name in names]
    if not all(type(one) is nn.Linear and getattr(one, "bias", None) is None for one in products):
        return None
    activation = ACTIVATIONS.get(type(getattr(part, "act_fn", None)).__name__)
    if activation is None:
        return None
    kept = [one.weight for one in products]
    if not can_join(kept[:2]):
        return None
    gate, up, down = (weight.detach() for weight in kept)
    x_2D = _random(2, gate.shape[1], gate)
    between_2I = part.act_fn(F.linear(x_2D, gate)) * F.linear(x_2D, up)
    if not _is_same(part(x_2D), F.linear(between_2I, down)):
        return None
    weights = ExpertWeights(
        [coded(kept[:2]) or (gate, up)], [coded(kept[2:]) or down], dtype=down.dtype
    )
    experts = packing.kernels.pack_experts(weights, Gate(activation), packing.quantization)
    return FusedBlock(experts, 1, gate.nbytes + up.nbytes + down.nbytes)


def _random(num_rows: int, size: int, like: Tensor) -> Tensor:
    rows = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(0))
    return rows.to(dtype=like.dtype, device=like.device)


def _is_same(found: Any, expected: Tensor) -> bool:
    tolerance = 2e-2 if expected.dtype.itemsize < 4 else 1e-4
    return isinstance(found, Tensor) and torch.allclose(found, expected, tolerance, tolerance)
