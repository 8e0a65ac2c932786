"""The weights of a decoder's layers, and the one place where models use its compiled passes.

One file for Llama, Mistral, Qwen 2, Qwen 3 and EAGLE: ModelConfig says which biases, query-key
norms and windows there are. What a pass computes is in kernels/reference/decoder.py.

Dimension key: T rows, D hidden, H heads, G kv heads, C head size, V vocabulary.
"""

from collections.abc import Iterator
from typing import TypedDict

import torch
from torch import Tensor, nn

from outdraft.kernels.ops import DecoderPass, DecoderSpec, Kernels, LayerSpec, Product, StateEntry
from outdraft.models.config import ModelConfig
from outdraft.models.layers.linear import Linear
from outdraft.models.layers.norm import RMSNorm, norm_weight
from outdraft.models.layers.rotary import Rotary

Slots = Iterator[tuple[str, Tensor | None]]


class Kind(TypedDict):
    """What kind of tensors the layers hold; they take it as keywords."""

    dtype: torch.dtype
    device: torch.device


class DecoderLayer(nn.Module):
    """The weights of one layer."""

    def __init__(
        self,
        config: ModelConfig,
        window: int | None,
        kind: Kind,
        input_size: int | None = None,
        *,
        has_input_norm: bool = True,
    ) -> None:
        """`input_size`: what the first product reads, where that is not the hidden size."""
        super().__init__()
        size, eps, intermediate = config.hidden_size, config.rms_norm_eps, config.intermediate_size
        self.head_size, self.window = config.head_size, window
        self._q_size = config.num_heads * config.head_size
        self._kv_size = config.num_kv_heads * config.head_size
        qkv_size, mlp_bias = self._q_size + 2 * self._kv_size, config.mlp_bias
        self.input_norm = RMSNorm(size, eps, **kind) if has_input_norm else None
        self.qkv_proj = Linear(input_size or size, qkv_size, bias=config.qkv_bias, **kind)
        self.q_norm = RMSNorm(config.head_size, eps, **kind) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_size, eps, **kind) if config.qk_norm else None
        self.o_proj = Linear(self._q_size, size, bias=config.o_bias, **kind)
        self.post_norm = RMSNorm(size, eps, **kind)
        self.gate_up_proj = Linear(size, 2 * intermediate, bias=mlp_bias, **kind)
        self.down_proj = Linear(intermediate, size, bias=mlp_bias, **kind)

    def spec(self) -> LayerSpec:
        """For the kernels, once the products are packed."""
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
        """As CausalLM.checkpoint_slots, without the prefix of the layer."""
        yield "input_layernorm.weight", norm_weight(self.input_norm)
        yield "post_attention_layernorm.weight", self.post_norm.weight
        q_size, kv_size = self._q_size, self._kv_size
        sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        yield from _fused("self_attn", self.qkv_proj, sizes)
        yield from _fused("self_attn", self.o_proj, {"o_proj": self.o_proj.num_outputs})
        yield "self_attn.q_norm.weight", norm_weight(self.q_norm)
        yield "self_attn.k_norm.weight", norm_weight(self.k_norm)
        size = self.gate_up_proj.num_outputs // 2
        yield from _fused("mlp", self.gate_up_proj, {"gate_proj": size, "up_proj": size})
        yield from _fused("mlp", self.down_proj, {"down_proj": self.down_proj.num_outputs})

    def arrange(self, order_C: Tensor) -> None:
        """Put queries and keys in the order in which they turn, once the weights are there."""
        for weight in (self.qkv_proj.weight, self.qkv_proj.bias):
            if weight is not None:
                turning = weight.data[: self._q_size + self._kv_size]
                heads_HC = turning.unflatten(0, (-1, self.head_size))
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
    ) -> None:
        """`input_size`: what layer 0 reads; `has_first_norm`: whether it norms that."""
        super().__init__()
        self.config, self.kernels = config, kernels
        self.rotary = Rotary(config.rope, config.head_size, config.max_model_len, **kind)
        first, *further = config.windows
        self._layers = [
            DecoderLayer(config, first, kind, input_size, has_input_norm=has_first_norm),
            *(DecoderLayer(config, window, kind) for window in further),
        ]
        self.layers = nn.ModuleList(self._layers)

    def compile_passes(
        self,
        embedding_VD: Tensor,
        head: Linear,
        *,
        final_norm: RMSNorm | None = None,
        head_norm: RMSNorm | None = None,
        entry: StateEntry | None = None,
        draft_ids_N: Tensor | None = None,
    ) -> DecoderPass:
        """The passes, once all products are packed."""
        config = self.config
        spec = DecoderSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            intermediate_size=config.intermediate_size,
            eps=config.rms_norm_eps,
            scale=config.head_size**-0.5,
            embedding_VD=embedding_VD,
            cos_sin_MC=self.rotary.cos_sin_MC,
            layers=[layer.spec() for layer in self._layers],
            attention=self.kernels.attention,
            final_norm_D=norm_weight(final_norm),
            entry=entry,
            head=product_of(head),
            head_norm_D=norm_weight(head_norm),
            draft_ids_N=draft_ids_N,
        )
        return self.kernels.compile_decoder(spec)

    def parts(self, prefix: str) -> Iterator[tuple["DecoderLayer", dict[str, Tensor]]]:
        """Each layer with its part of CausalLM.checkpoint_slots."""
        for index, layer in enumerate(self._layers):
            start = f"{prefix}layers.{index}."
            yield layer, {start + name: slot for name, slot in layer.slots() if slot is not None}

    def arrange(self, part: nn.Module) -> None:
        """Put queries and keys of a layer in the order in which they turn, once."""
        if self.rotary.order_C is not None and isinstance(part, DecoderLayer):
            part.arrange(self.rotary.order_C)


def product_of(linear: Linear) -> Product:
    """What a packed layer computes."""
    assert linear.product is not None, "the weights are not packed"
    return linear.product


def _fused(prefix: str, linear: Linear, sizes: dict[str, int]) -> Slots:
    """Rows of one fused weight and bias, by the names of the parts."""
    assert linear.weight is not None, "the weights are packed"
    for kind, fused in (("weight", linear.weight), ("bias", linear.bias)):
        if fused is not None:
            for name, part in zip(sizes, fused.data.split(list(sizes.values())), strict=True):
                yield f"{prefix}.{name}.{kind}", part
