"""Products of a transformers model by this engine's kernels.

Dimension key: T rows, D inputs, E outputs.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outdraft.kernels.products import EmbeddingTable, ShardWrap
from outdraft.models.experts import keeps_codes as experts_keep_codes
from outdraft.models.experts import present_modules
from outdraft.models.layers.linear import Linear
from outdraft.models.quantized.deferred import StoredParameter
from outdraft.models.quantized.stand_ins import Packing
from outdraft.models.transformers_operations import catch_operations, is_router


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
    """What an embedding reads."""
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
        for name, part in list(module.named_children()):
            if _is_product(part):
                is_tied = id(part.weight) in embeddings
                linear = _packed(part, packing, spreads.get(part), is_tied=is_tied)
                if is_tied:
                    heads[id(part.weight)] = linear
                setattr(module, name, FlatLinear(linear))
    for part in tables:
        if packing.stand_ins.stored(part.weight) is not None:
            _pack_table(part, packing, heads.get(id(part.weight)))
    for module in model.modules():
        if is_router(module):
            catch_operations(module, packing.kernels)


def keeps_codes(module: nn.Module, name: str, stored: StoredParameter) -> bool:
    """Whether a parameter's codes can be packed."""
    if isinstance(module, nn.Embedding):
        return name == "weight" and stored.tile is not None and stored.tile.is_blocks
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return name == "weight" and not stored.is_stack and not stored.is_turned
    return stored.is_stack and experts_keep_codes(module, name, is_turned=stored.is_turned)


def _is_product(part: nn.Module) -> TypeGuard[nn.Linear | Conv1D]:
    """Whether it computes x W^T + b, also where a family has written it anew."""
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
        coded = packing.stand_ins.coded([weight_VD])
        assert coded is not None
        product = packing.kernels.pack_codes(coded, None, weight_VD.dtype)
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


def _packed(
    part: nn.Linear | Conv1D, packing: Packing, spread: ShardWrap | None, *, is_tied: bool
) -> Linear:
    """`is_tied`: the weight is a table of embeddings too, which stays as it is."""
    weight_ED = part.weight.data
    if isinstance(part, Conv1D):
        weight_ED = weight_ED.T.contiguous()
    bias: Any = part.bias
    linear = Linear(
        weight_ED.shape[1],
        weight_ED.shape[0],
        bias=bias is not None,
        dtype=weight_ED.dtype,
        device=weight_ED.device,
        weight=nn.Parameter(weight_ED, requires_grad=False),
        spread=spread,
    )
    if linear.bias is not None:
        linear.bias.data.copy_(bias)
    packing.pack(linear, [part.weight])
    if not is_tied and not isinstance(part, Conv1D):
        part.weight = None  # pyright: ignore[reportAttributeAccessIssue]  # it is packed now
    return linear
