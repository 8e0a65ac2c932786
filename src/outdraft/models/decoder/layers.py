"""The weights of a decoder's layers, and the one place where models use its compiled passes.

One file for Llama, Mistral, Qwen 2, Qwen 3, MiMo and EAGLE: ModelConfig says which biases,
query-key norms and windows there are. What a pass computes is in kernels/torch/decoder.py.

Dimension key: R rows, D hidden, H heads, G kv heads, C head size, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypedDict

import torch
from torch import Tensor, nn

from outdraft.distributed.group import ALONE, RankGroup
from outdraft.distributed.vocabulary import VocabularyShard
from outdraft.kernels.decoder_ops import DecoderPass, DecoderSpec, LayerSpec, StateEntry
from outdraft.kernels.ops import Kernels, Product
from outdraft.kernels.products import EmbeddingTable, RowParallel, ShardWrap
from outdraft.kernels.torch.pointwise import rotate
from outdraft.models.checkpoints.slots import Slot, Slots, slot_of
from outdraft.models.decoder.config import ModelConfig
from outdraft.models.decoder.rotary import Rotary
from outdraft.models.modules import Linear, RMSNorm, norm_weight

# Ids that a drafter with a large vocabulary chooses among, and the ids of its texts: 92 to
# 97 % of the tokens of English and code, in a vocabulary of 152,000.
FIRST_DRAFTS = 1 << 15


class Kind(TypedDict):
    """Dtype and device of the tensors of layers, which take them as keywords."""

    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows or columns of a weight that a rank has."""

    size: int
    rank: int
    whole: int

    @property
    def start(self) -> int:
        return self.rank * self.size


class DecoderLayer(nn.Module):
    """The weights of one layer, or of several ranks' this one's part."""

    def __init__(
        self,
        config: ModelConfig,
        window: int | None,
        kind: Kind,
        input_size: int | None = None,
        *,
        has_input_norm: bool = True,
        group: RankGroup = ALONE,
    ) -> None:
        """
        Args:
            config: of the whole model.
            input_size: what the first product reads, where that is not the hidden size.
            group: over which heads and the feed-forward block are spread.
        """
        super().__init__()
        own, size, eps = config.shard(group.size), config.hidden_size, config.rms_norm_eps
        self.head_size, self.window = config.head_size, window
        self._q, self._kv, self._intermediate = _parts(config, group)
        spread: ShardWrap | None = None if group.size == 1 else partial(RowParallel, group)
        intermediate, mlp_bias = own.intermediate_size, config.mlp_bias
        qkv_size = self._q.size + 2 * self._kv.size
        self.input_norm = RMSNorm(size, eps, **kind) if has_input_norm else None
        self.qkv_proj = Linear(input_size or size, qkv_size, bias=config.qkv_bias, **kind)
        self.q_norm = RMSNorm(config.head_size, eps, **kind) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_size, eps, **kind) if config.qk_norm else None
        self.o_proj = Linear(self._q.size, size, bias=config.o_bias, **kind, spread=spread)
        self.post_norm = RMSNorm(size, eps, **kind)
        self.gate_up_proj = Linear(size, 2 * intermediate, bias=mlp_bias, **kind)
        self.down_proj = Linear(intermediate, size, bias=mlp_bias, **kind, spread=spread)

    def spec(self) -> LayerSpec:
        """The layer as kernels read it, once the products are packed."""
        return LayerSpec(
            input_norm_D=norm_weight(self.input_norm),
            post_norm_D=self.post_norm.weight.data,
            q_norm_C=norm_weight(self.q_norm),
            k_norm_C=norm_weight(self.k_norm),
            qkv=product_of(self.qkv_proj),
            o=product_of(self.o_proj),
            gate_up=product_of(self.gate_up_proj),
            down=product_of(self.down_proj),
            window=self.window,
        )

    def slots(self) -> Slots:
        """The places of the layer's tensors, by their names without the prefix of the layer."""
        yield "input_layernorm.weight", slot_of(norm_weight(self.input_norm))
        yield "post_attention_layernorm.weight", slot_of(self.post_norm.weight)
        parts = {"q_proj": self._q, "k_proj": self._kv, "v_proj": self._kv}
        yield from _fused("self_attn", self.qkv_proj, parts)
        yield from _summed("self_attn.o_proj", self.o_proj, self._q)
        yield "self_attn.q_norm.weight", slot_of(norm_weight(self.q_norm))
        yield "self_attn.k_norm.weight", slot_of(norm_weight(self.k_norm))
        parts = {"gate_proj": self._intermediate, "up_proj": self._intermediate}
        yield from _fused("mlp", self.gate_up_proj, parts)
        yield from _summed("mlp.down_proj", self.down_proj, self._intermediate)

    def arrange(self, order_C: Tensor) -> None:
        """Permute queries and keys into the order of `Rotary`, once the weights are there."""
        for weight in (self.qkv_proj.weight, self.qkv_proj.bias):
            if weight is not None:
                rotated = weight.data[: self._q.size + self._kv.size]
                heads_HC = rotated.unflatten(0, (-1, self.head_size))
                heads_HC.copy_(heads_HC[:, order_C.to(weight.device)])
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.weight.data.copy_(norm.weight.data[order_C.to(norm.weight.device)])


class Decoder(nn.Module):
    """The layers of a network and their rotary positions."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        kind: Kind,
        input_size: int | None = None,
        *,
        has_first_norm: bool = True,
        group: RankGroup = ALONE,
        num_positions: int | None = None,
    ) -> None:
        """
        Args:
            config: of the whole network.
            input_size: what layer 0 reads.
            has_first_norm: whether it norms that.
            group: over which the layers are spread.
            num_positions: of rows, where they are more than those of a text.
        """
        super().__init__()
        self.config, self.kernels = config.shard(group.size), kernels
        num_positions = num_positions or config.max_model_len
        self.rotary = Rotary(config.rope, config.head_size, num_positions, **kind)
        first, *further = config.windows
        self.decoder_layers = [
            DecoderLayer(
                config, first, kind, input_size, has_input_norm=has_first_norm, group=group
            ),
            *(DecoderLayer(config, window, kind, group=group) for window in further),
        ]
        self.layers = nn.ModuleList(self.decoder_layers)

    def compile_passes(
        self,
        embedding: EmbeddingTable,
        head: Product,
        *,
        final_norm: RMSNorm | None = None,
        head_norm: RMSNorm | None = None,
        entry: StateEntry | None = None,
        draft_ids_N: Tensor | None = None,
        num_first_drafts: int = 0,
        shard: VocabularyShard | None = None,
        is_causal: Sequence[bool] | None = None,
    ) -> DecoderPass:
        """The passes, once all products are packed.

        Args:
            shard: of a network that is spread over ranks, the tokens of `embedding`.
            is_causal: of each layer, as in LayerSpec; None: no layer is.
        """
        config = self.config
        layers = [layer.spec() for layer in self.decoder_layers]
        if is_causal is not None:
            pairs = zip(layers, is_causal, strict=True)
            layers = [replace(layer, is_causal=one) for layer, one in pairs]
        spec = DecoderSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            intermediate_size=config.intermediate_size,
            eps=config.rms_norm_eps,
            scale=config.head_size**-0.5,
            embedding=embedding,
            cos_sin_MC=self.rotary.cos_sin_MC,
            layers=layers,
            attention=self.kernels.attention,
            final_norm_D=norm_weight(final_norm),
            entry=entry,
            head=head,
            head_norm_D=norm_weight(head_norm),
            draft_ids_N=draft_ids_N,
            num_first_drafts=num_first_drafts,
            shard=shard,
        )
        return self.kernels.compile_decoder(spec)

    def parts(self, prefix: str) -> Iterator[tuple["DecoderLayer", dict[str, Slot]]]:
        """Each layer with its part of CausalLM.checkpoint_slots."""
        for index, layer in enumerate(self.decoder_layers):
            start = f"{prefix}layers.{index}."
            yield layer, {start + name: slot for name, slot in layer.slots() if slot is not None}

    def queries(self, index: int, residual_RD: Tensor, positions_R: Tensor) -> Tensor:
        """[R, H, C] of the stream's dtype: the queries of rows in a layer, as they meet the keys.

        Args:
            residual_RD: the stream that enters the layer.
            positions_R: int64; of the rows in their texts.
        """
        layer = self.decoder_layers[index]
        x_RD = residual_RD if layer.input_norm is None else layer.input_norm(residual_RD)
        q_RHC = layer.qkv_proj(x_RD).unflatten(-1, (-1, layer.head_size))
        q_RHC = q_RHC[:, : self.config.num_heads]
        if layer.q_norm is not None:
            q_RHC = layer.q_norm(q_RHC)
        return rotate(q_RHC, self.rotary.cos_sin_MC.index_select(0, positions_R))

    def arrange(self, part: nn.Module) -> None:
        """Permute queries and keys of a layer into the order of `Rotary`, once."""
        if self.rotary.order_C is not None and isinstance(part, DecoderLayer):
            part.arrange(self.rotary.order_C)

    def permutes(self, part: nn.Module, linear: Linear) -> bool:
        """Is true if `arrange` changes the weight of a product of that part."""
        is_layer = self.rotary.order_C is not None and isinstance(part, DecoderLayer)
        return is_layer and linear is part.qkv_proj


def first_drafts(vocabulary: VocabularyShard) -> int:
    """`DecoderSpec.num_first_drafts` for a drafter's vocabulary: 0 unless it is much larger."""
    is_large = vocabulary.num_tokens >= 3 * FIRST_DRAFTS
    return FIRST_DRAFTS if is_large and vocabulary.group.size == 1 else 0


def drafted_share(vocabulary: VocabularyShard) -> float:
    """The share of its head that a drafter with this vocabulary reads, before texts add to it."""
    return (first_drafts(vocabulary) or vocabulary.num_tokens) / vocabulary.num_tokens


def product_of(linear: Linear) -> Product:
    """The product of a packed layer."""
    assert linear.product is not None, "the weights are not packed"
    return linear.product


def _parts(config: ModelConfig, group: RankGroup) -> tuple[_Part, _Part, _Part]:
    """A rank's parts of the queries, of keys or values, and of the feed-forward block."""
    own, head_size = config.shard(group.size), config.head_size
    # Neighbouring ranks have the same kv head, where there are fewer heads than ranks.
    kv_rank = group.rank * config.num_kv_heads // (group.size * own.num_kv_heads)
    return (
        _Part(own.num_heads * head_size, group.rank, config.num_heads * head_size),
        _Part(own.num_kv_heads * head_size, kv_rank, config.num_kv_heads * head_size),
        _Part(own.intermediate_size, group.rank, config.intermediate_size),
    )


def _fused(prefix: str, linear: Linear, parts: dict[str, _Part]) -> Slots:
    """Rows of one fused weight and bias, by the names of the parts."""
    assert linear.weight is not None, "the weights are packed"
    sizes = [part.size for part in parts.values()]
    for kind, fused in (("weight", linear.weight), ("bias", linear.bias)):
        if fused is not None:
            for (name, part), rows in zip(parts.items(), fused.data.split(sizes), strict=True):
                yield f"{prefix}.{name}.{kind}", Slot(rows, 0, part.start, part.whole)


def _summed(name: str, linear: Linear, part: _Part) -> Slots:
    """Columns of a weight; the bias is whole on every rank."""
    assert linear.weight is not None, "the weights are packed"
    yield f"{name}.weight", Slot(linear.weight.data, 1, part.start, part.whole)
    yield f"{name}.bias", slot_of(linear.bias)
