"""The weights of a decoder's layers, its rotary positions, and the one place where models use its
compiled passes.

One file for Llama, Mistral, Qwen 2, Qwen 3, MiMo and EAGLE: ModelConfig says which biases,
query-key norms and windows there are. What a pass computes is in kernels/torch/decoder.py.

Rotary positions are those of Su et al. 2021, in the layout of Hugging Face checkpoints: dimension i
of a head is rotated together with dimension i + C / 2. Frequencies may be stretched to contexts
longer than the trained one: linear (Chen et al. 2023), yarn (Peng et al. 2023), and the rule of
Llama 3.1.

Dimension key: R rows, D hidden, H heads, G kv heads, C head size, V vocabulary, M positions, F =
C / 2 frequencies.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outdraft.distributed.group import ALONE, RankGroup
from outdraft.distributed.vocabulary import VocabularyShard
from outdraft.kernels.decoder_ops import DecoderPass, DecoderSpec, LayerSpec
from outdraft.kernels.ops import Kernels, Product
from outdraft.kernels.products import RowParallel, ShardWrap
from outdraft.kernels.torch.pointwise import rotate
from outdraft.models.checkpoints.slots import Slot, own_slots
from outdraft.models.decoder.config import ModelConfig, RopeConfig, RopeKind
from outdraft.models.modules import Linear, RMSNorm, norm_weight

# Ids that a drafter with a large vocabulary chooses among, and the ids of its texts: 92 to
# 97 % of the tokens of English and code, in a vocabulary of 152,000.
FIRST_DRAFTS = 1 << 15
_TURNED = "self_attn.q_", "self_attn.k_"  # the beginnings of tensors whose heads turn


class Kind(TypedDict):
    """Dtype and device of the tensors of layers, which take them as keywords."""

    dtype: torch.dtype
    device: torch.device


_Part = tuple[int, int, int]  # of a rank's rows or columns: their number, the first, those of all


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
        q_size, kv_size = own.num_heads * config.head_size, own.num_kv_heads * config.head_size
        self._q, self._kv, self._intermediate = _parts(config, group)
        self._order_C = rotary_order(config.rope, config.head_size)
        spread: ShardWrap | None = None if group.size == 1 else partial(RowParallel, group)
        intermediate, mlp_bias = own.intermediate_size, config.mlp_bias
        self.input_norm = RMSNorm(size, eps, **kind) if has_input_norm else None
        self.qkv_proj = Linear(
            input_size or size, q_size + 2 * kv_size, bias=config.qkv_bias, **kind
        )
        self.q_norm = RMSNorm(config.head_size, eps, **kind) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_size, eps, **kind) if config.qk_norm else None
        self.o_proj = Linear(q_size, size, bias=config.o_bias, **kind, spread=spread)
        self.post_norm = RMSNorm(size, eps, **kind)
        self.gate_up_proj = Linear(size, 2 * intermediate, bias=mlp_bias, **kind)
        self.down_proj = Linear(intermediate, size, bias=mlp_bias, **kind, spread=spread)

    def spec(self, *, is_causal: bool = False) -> LayerSpec:
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
            is_causal=is_causal,
        )

    def slots(self) -> dict[str, Slot]:
        """The places of the layer's tensors, by their names without the prefix of the layer."""
        heads = {"q_proj": self._q, "k_proj": self._kv, "v_proj": self._kv}
        width = {"gate_proj": self._intermediate, "up_proj": self._intermediate}
        slots = {
            **own_slots(self.input_norm, "input_layernorm."),
            **own_slots(self.post_norm, "post_attention_layernorm."),
            **_fused("self_attn", self.qkv_proj, heads),
            **_summed("self_attn.o_proj.", self.o_proj, self._q),
            **own_slots(self.q_norm, "self_attn.q_norm."),
            **own_slots(self.k_norm, "self_attn.k_norm."),
            **_fused("mlp", self.gate_up_proj, width),
            **_summed("mlp.down_proj.", self.down_proj, self._intermediate),
        }
        if (order_C := self._order_C) is not None:
            for name in [one for one in slots if one.startswith(_TURNED)]:
                heads_HC = torch.arange(len(slots[name].to)).unflatten(0, (-1, len(order_C)))
                slots[name] = replace(slots[name], order=heads_HC[:, order_C].flatten())
        return slots


class Decoder(nn.Module):
    """The layers of a network and their rotary positions."""

    cos_sin_MC: Tensor

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
        table_MC = rotary_table(config.rope, config.head_size, num_positions, kind)
        self.register_buffer("cos_sin_MC", table_MC, persistent=False)
        first, *further = config.windows
        self.decoder_layers = [
            DecoderLayer(
                config, first, kind, input_size, has_input_norm=has_first_norm, group=group
            ),
            *(DecoderLayer(config, window, kind, group=group) for window in further),
        ]
        self.layers = nn.ModuleList(self.decoder_layers)

    def compile_passes(
        self, *, is_causal: Sequence[bool] | None = None, **options: Any
    ) -> DecoderPass:
        """The passes, once all products are packed.

        Args:
            is_causal: of each layer, as in LayerSpec; None: no layer is.
            options: the fields of `DecoderSpec` that do not follow from the layers.
        """
        config = self.config
        is_causal = is_causal or [False] * len(self.decoder_layers)
        pairs = zip(self.decoder_layers, is_causal, strict=True)
        spec = DecoderSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            intermediate_size=config.intermediate_size,
            eps=config.rms_norm_eps,
            scale=config.head_size**-0.5,
            cos_sin_MC=self.cos_sin_MC,
            layers=[layer.spec(is_causal=one) for layer, one in pairs],
            attention=self.kernels.attention,
            **options,
        )
        return self.kernels.compile_decoder(spec)

    def parts(self, prefix: str) -> Iterator[tuple["DecoderLayer", dict[str, Slot]]]:
        """Each layer with its part of CausalLM.checkpoint_slots."""
        for index, layer in enumerate(self.decoder_layers):
            start = f"{prefix}layers.{index}."
            yield layer, {start + name: slot for name, slot in layer.slots().items()}

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
        return rotate(q_RHC, self.cos_sin_MC.index_select(0, positions_R))


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
    q_size, kv_size = own.num_heads * head_size, own.num_kv_heads * head_size
    # Neighbouring ranks have the same kv head, where there are fewer heads than ranks.
    kv_rank = group.rank * config.num_kv_heads // (group.size * own.num_kv_heads)
    width = own.intermediate_size
    return (
        (q_size, group.rank * q_size, config.num_heads * head_size),
        (kv_size, kv_rank * kv_size, config.num_kv_heads * head_size),
        (width, group.rank * width, config.intermediate_size),
    )


def _fused(prefix: str, linear: Linear, parts: dict[str, _Part]) -> dict[str, Slot]:
    """Rows of one fused weight and bias, by the names of the parts."""
    return {
        f"{prefix}.{name}.{kind}": Slot(rows, 0, first, whole)
        for kind, fused in own_slots(linear).items()
        for (name, (_, first, whole)), rows in zip(
            parts.items(), fused.to.split([size for size, _, _ in parts.values()]), strict=True
        )
    }


def _summed(prefix: str, linear: Linear, part: _Part) -> dict[str, Slot]:
    """Columns of a weight; the bias is whole on every rank."""
    slots = own_slots(linear, prefix)
    slots[f"{prefix}weight"] = Slot(slots[f"{prefix}weight"].to, 1, *part[1:])
    return slots


def rotary_table(config: RopeConfig, head_size: int, max_positions: int, kind: Kind) -> Tensor:
    """[M, C], float32 at least: cos of all frequencies, then sin, for all positions."""
    table_dtype = torch.promote_types(kind["dtype"], torch.float32)
    positions_M = torch.arange(max_positions, dtype=table_dtype)
    angles_MF = positions_M[:, None] * frequencies(config, head_size).to(table_dtype)
    factor, padding = attention_factor(config), (0, head_size // 2 - angles_MF.shape[1])
    cos_MF = F.pad(angles_MF.cos() * factor, padding, value=1.0)
    sin_MF = F.pad(angles_MF.sin() * factor, padding, value=0.0)
    return torch.cat((cos_MF, sin_MF), dim=-1).to(kind["device"])


def rotary_order(config: RopeConfig, head_size: int) -> Tensor | None:
    """int64 [C]: which dimension of the checkpoint each of ours is; None: the same.

    Queries and keys that are put in this order have the same products.
    """
    rotary_size = config.rotary_size(head_size)
    if rotary_size == head_size:
        return None
    low, high = torch.arange(rotary_size).chunk(2)
    rest_low, rest_high = torch.arange(rotary_size, head_size).chunk(2)
    return torch.cat((low, rest_low, high, rest_high))


def frequencies(config: RopeConfig, head_size: int) -> Tensor:
    """float32 [F], radians a position, of the rotated dimensions.

    float32 as in training: far positions feel the rounding.
    """
    rotary_size = config.rotary_size(head_size)
    exponents_F = torch.arange(0, rotary_size, 2, dtype=torch.float32) / rotary_size
    plain_F = 1.0 / config.theta**exponents_F
    match config.kind:
        case RopeKind.PLAIN:
            return plain_F
        case RopeKind.LINEAR:
            return plain_F / config.factor
        case RopeKind.DYNAMIC:
            return 1.0 / _dynamic_theta(config, rotary_size) ** exponents_F
        case RopeKind.LLAMA3:
            return _llama3(plain_F, config)
        case RopeKind.LONGROPE:
            is_long = config.context_len > config.original_max_len
            factors = config.long_factor if is_long else config.short_factor
            return 1.0 / (torch.tensor(factors) * config.theta**exponents_F)
        case RopeKind.YARN:
            return _yarn(plain_F, config)


def attention_factor(config: RopeConfig) -> float:
    """The factor of cos and sin."""
    if config.kind not in (RopeKind.YARN, RopeKind.LONGROPE):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.factor <= 1:
        return 1.0
    if config.kind is RopeKind.LONGROPE:
        return math.sqrt(1 + math.log(config.factor) / math.log(config.original_max_len))
    return 0.1 * math.log(config.factor) + 1.0


def _dynamic_theta(config: RopeConfig, rotary_size: int) -> float:
    """The base with which the slowest frequency spans the context as it spanned the trained one."""
    stretch = max(config.context_len, config.original_max_len) / config.original_max_len
    base = config.factor * stretch - (config.factor - 1)
    return config.theta * base ** (rotary_size / (rotary_size - 2))


def _llama3(plain_F: Tensor, config: RopeConfig) -> Tensor:
    """Keep the fast frequencies, divide the slow ones, blend between the two."""
    turns_F = config.original_max_len * plain_F / (2 * math.pi)  # over the trained context
    span = config.high_freq_factor - config.low_freq_factor
    kept_F = ((turns_F - config.low_freq_factor) / span).clamp(0, 1)
    return plain_F * kept_F + plain_F / config.factor * (1 - kept_F)


def _yarn(plain_F: Tensor, config: RopeConfig) -> Tensor:
    """Keep frequencies that turn more than beta_fast times over the trained context, divide those
    that turn less than beta_slow times, blend by dimension between the two."""
    num_frequencies = len(plain_F)

    def dimension_of(turns: float) -> float:
        trained = config.original_max_len / (turns * 2 * math.pi)
        return num_frequencies * math.log(trained) / math.log(config.theta)

    first, last = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_frequencies - 1)
    width = last - first or 0.001
    divided_F = ((torch.arange(num_frequencies) - first) / width).clamp(0, 1)
    return plain_F * (1 - divided_F) + plain_F / config.factor * divided_F
