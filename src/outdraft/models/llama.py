"""The decoder-only network of Llama, Mistral, Qwen 2 and Qwen 3.

One file for four families: ModelConfig says which biases, query-key norms and windows there are.
A layer is four products, two attention calls and four fused pointwise calls.

Dimension key: T rows, R rows that need logits, D hidden, H heads, G kv heads, C head size,
I intermediate, V vocabulary, E = (H + 2 G) * C, K tapped layers.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from outdraft.attention.base import AttentionMetadata, LayerCache
from outdraft.attention.cpu import CpuAttention
from outdraft.core.weight_format import WeightFormat
from outdraft.kernels.ops import Kernels
from outdraft.models import forward_kernels
from outdraft.models.compiled_forward import (
    MAX_ROWS,
    CompiledForward,
    LayerParts,
    norm_address,
    packed_head,
)
from outdraft.models.config import ModelConfig
from outdraft.models.entry_kernels import Entry
from outdraft.models.layers.activation import silu_mul, silu_mul_cpu
from outdraft.models.layers.embedding import Embedding
from outdraft.models.layers.linear import (
    Linear,
    are_bfloat16,
    linears_of,
    memory_bytes,
    pack_linears,
)
from outdraft.models.layers.linear_team import shared_team
from outdraft.models.layers.norm import RMSNorm
from outdraft.models.layers.rotary import Rotary


class SelfAttention(nn.Module):
    """Attention of one layer, over the paged cache."""

    def __init__(
        self,
        config: ModelConfig,
        window: int | None,
        kernels: Kernels,
        rotary: Rotary,
        *,
        dtype: torch.dtype,
        device: torch.device,
        input_size: int | None = None,
    ) -> None:
        """`input_size`: of the rows, where it is not the hidden size."""
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.scale = config.head_size**-0.5
        self.window = window
        self.attention = kernels.attention
        self.rotary = rotary
        q_size = config.num_heads * config.head_size
        kv_size = config.num_kv_heads * config.head_size
        self.qkv_proj = Linear(
            input_size or config.hidden_size,
            q_size + 2 * kv_size,
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.o_proj = Linear(
            q_size, config.hidden_size, bias=config.o_bias, dtype=dtype, device=device
        )
        self.norms: tuple[RMSNorm, RMSNorm] | None = None
        if config.qk_norm:
            size, eps = config.head_size, config.rms_norm_eps
            self.q_norm = RMSNorm(size, eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(size, eps, dtype=dtype, device=device)
            self.norms = (self.q_norm, self.k_norm)

    def forward(
        self, x_TD: Tensor, cos_sin_TC: Tensor, cache: LayerCache, metadata: AttentionMetadata
    ) -> Tensor:
        """[T, D]."""
        q_THC, k_TGC, v_TGC = self.rotary.split(
            self.qkv_proj(x_TD), cos_sin_TC, self.num_heads, self.num_kv_heads, self.norms
        )
        self.attention.write(k_TGC, v_TGC, cache, metadata.slots_T)
        out_THC = self.attention.attend(q_THC, cache, metadata, self.scale, self.window)
        return self.o_proj(out_THC.flatten(1))

    def arrange(self) -> None:
        """Put queries and keys in the order in which they turn, once the weights are there."""
        order_C = self.rotary.order_C
        if order_C is None:
            return
        head_size = len(order_C)
        num_turning = (self.num_heads + self.num_kv_heads) * head_size
        for weight in (self.qkv_proj.weight, self.qkv_proj.bias):
            if weight is None:
                continue
            heads_HC = weight.data[:num_turning].unflatten(0, (-1, head_size))
            heads_HC.copy_(heads_HC[:, order_C.to(weight.device)])
        for norm in self.norms or ():
            norm.weight.data.copy_(norm.weight.data[order_C.to(norm.weight.device)])

    def slots(self) -> Iterator[tuple[str, Tensor | None]]:
        """As CausalLM.checkpoint_slots, without the prefix of the layer."""
        kv_size = self.num_kv_heads * self.rotary.cos_sin_MC.shape[1]
        q_size = self.num_heads * self.rotary.cos_sin_MC.shape[1]
        yield from _fused(self.qkv_proj, ("q_proj", "k_proj", "v_proj"), (q_size, kv_size, kv_size))
        yield from _fused(self.o_proj, ("o_proj",), (self.o_proj.num_outputs,))
        if self.norms is not None:
            yield "q_norm.weight", self.q_norm.weight
            yield "k_norm.weight", self.k_norm.weight


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, intermediate, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(hidden, 2 * intermediate, bias=bias, dtype=dtype, device=device)
        self.down_proj = Linear(intermediate, hidden, bias=bias, dtype=dtype, device=device)
        self._silu_mul = silu_mul_cpu if device.type == "cpu" else silu_mul

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D]."""
        return self.down_proj(self._silu_mul(self.gate_up_proj(x_TD)))

    def slots(self) -> Iterator[tuple[str, Tensor | None]]:
        """As CausalLM.checkpoint_slots, without the prefix of the layer."""
        size = self.gate_up_proj.num_outputs // 2
        yield from _fused(self.gate_up_proj, ("gate_proj", "up_proj"), (size, size))
        yield from _fused(self.down_proj, ("down_proj",), (self.down_proj.num_outputs,))


def layer_parts(
    input_norm: RMSNorm | None, attention: SelfAttention, post_norm: RMSNorm, mlp: FeedForward
) -> LayerParts:
    """A layer for the compiled pass; without an input norm where something else takes its place."""
    norms = [(forward_kernels.POST_NORM, post_norm)]
    if input_norm is not None:
        norms.append((forward_kernels.INPUT_NORM, input_norm))
    if attention.norms is not None:
        q_norm, k_norm = attention.norms
        norms += [(forward_kernels.Q_NORM, q_norm), (forward_kernels.K_NORM, k_norm)]
    linears = [
        (forward_kernels.QKV, attention.qkv_proj),
        (forward_kernels.O, attention.o_proj),
        (forward_kernels.GATE_UP, mlp.gate_up_proj),
        (forward_kernels.DOWN, mlp.down_proj),
    ]
    return LayerParts(norms, linears)


class DecoderLayer(nn.Module):
    """Attention, then the feed-forward block, each behind a norm and added to the residual."""

    def __init__(
        self,
        config: ModelConfig,
        window: int | None,
        kernels: Kernels,
        rotary: Rotary,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.self_attn = SelfAttention(config, window, kernels, rotary, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mlp = FeedForward(config, dtype=dtype, device=device)

    def parts(self) -> LayerParts:
        """For the compiled pass."""
        return layer_parts(
            self.input_layernorm, self.self_attn, self.post_attention_layernorm, self.mlp
        )

    def slots(self) -> Iterator[tuple[str, Tensor | None]]:
        """As CausalLM.checkpoint_slots, without the prefix of the layer."""
        yield "input_layernorm.weight", self.input_layernorm.weight
        yield "post_attention_layernorm.weight", self.post_attention_layernorm.weight
        for prefix, module in (("self_attn", self.self_attn), ("mlp", self.mlp)):
            for name, slot in module.slots():
                yield f"{prefix}.{name}", slot


class CausalLM(nn.Module):
    """A decoder-only language model over a paged cache. Weights are not initialised."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.config = config
        self.dtype, self.device = dtype, device
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, dtype=dtype, device=device
        )
        self.rotary = Rotary(
            config.rope, config.head_size, config.max_model_len, dtype=dtype, device=device
        )
        self._layers = [
            DecoderLayer(config, window, kernels, self.rotary, dtype=dtype, device=device)
            for window in config.windows
        ]
        self.layers = nn.ModuleList(self._layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        # One call makes the sum behind a layer and the norm before the next one.
        self._next_norms = [layer.input_layernorm for layer in self._layers[1:]] + [self.norm]
        self.lm_head = Linear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            dtype=dtype,
            device=device,
            weight=self.embed_tokens.weight if config.tie_word_embeddings else None,
        )
        self.kernels = kernels
        self._compiled: CompiledForward | None = None
        self._packed_head: forward_kernels.Head | None = None

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """The first part of `forward_tapped`."""
        return self.forward_tapped(token_ids_T, positions_T, caches, metadata, ())[0]

    def forward_tapped(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        taps: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """As `forward_by_layers`; a few rows on a CPU in one compiled call."""
        if self._compiled is not None and self._compiled.suits([metadata]):
            return self._compiled(token_ids_T, caches, metadata, taps)
        return self.forward_by_layers(token_ids_T, positions_T, caches, metadata, taps)

    def forward_by_layers(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor]:
        """What a pass computes, all of the model's dtype.

        The hidden state of each row behind the final norm, [T, D], and the residual stream behind
        the first taps[k] layers, [K, T, D]. Writes the keys and values of the rows to the caches,
        one cache a layer.

        Args:
            token_ids_T: int64.
            positions_T: int64, below max_model_len.
            taps: each from 0 (the embedding) to the number of layers.
        """
        residual_TD = self.embed_tokens(token_ids_T)
        tapped = {0: residual_TD.clone()} if 0 in taps else {}
        cos_sin_TC = self.rotary.at(positions_T)
        x_TD = self._layers[0].input_layernorm(residual_TD)
        parts = zip(self._layers, self._next_norms, caches, strict=True)
        for num_layers, (layer, next_norm, cache) in enumerate(parts, start=1):
            x_TD = layer.self_attn(x_TD, cos_sin_TC, cache, metadata)
            x_TD = layer.post_attention_layernorm.add(x_TD, residual_TD)
            x_TD = next_norm.add(layer.mlp(x_TD), residual_TD)
            if num_layers in taps:
                tapped[num_layers] = residual_TD.clone()  # the next layer adds to it in place
        tapped_KTD = residual_TD.new_empty(0, *residual_TD.shape)
        if taps:
            tapped_KTD = torch.stack([tapped[tap] for tap in taps])
        return x_TD, tapped_KTD

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """[R, V] of float32; of float64 for a float64 model."""
        return self.lm_head(hidden_RD).to(torch.promote_types(self.dtype, torch.float32))

    def checked_best_tokens(self, hidden_RD: Tensor) -> tuple[Tensor, Tensor]:
        """The best tokens; bool [R]: the logits have a best one: no NaN or inf, not all -inf."""
        head = self._packed_head
        if self._compiled is not None and head is not None and len(hidden_RD) <= MAX_ROWS:
            return self._compiled.best_tokens(hidden_RD, head)
        logits_RV = self.logits(hidden_RD)
        best_R = logits_RV.argmax(dim=-1)  # a NaN counts as the largest
        return best_R, logits_RV.gather(1, best_R[:, None])[:, 0].isfinite()

    @property
    def weight_bytes(self) -> int:
        """Weights that one step reads as they lie in memory, whatever the number of rows.

        A step reads a few rows of the embedding table only. The table counts as the head alone:
        in a tied model that is not packed.
        """
        table = self.embed_tokens.weight
        return self.memory_bytes - (0 if self.lm_head.weight is table else table.nbytes)

    @property
    def numbers(self) -> str:
        """What is computed, over which weights if they are kept otherwise: for people."""
        name = str(self.dtype).removeprefix("torch.")
        kept = {linear.format for linear in linears_of(self)} - {WeightFormat.PLAIN, name}
        return f"{name} over {' and '.join(sorted(kept))} weights" if kept else name

    @property
    def memory_bytes(self) -> int:
        """What the weights take, packed ones included; a packed tied head is a copy."""
        return memory_bytes(self)

    def checkpoint_slots(self) -> dict[str, Tensor]:
        """Where each tensor of a Hugging Face checkpoint belongs: a view into this model.

        Only before the weights are packed. The head of a tied model has no place of its own.
        """
        slots: dict[str, Tensor | None] = {
            "model.embed_tokens.weight": self.embed_tokens.weight,
            "model.norm.weight": self.norm.weight,
        }
        for index, layer in enumerate(self._layers):
            slots |= {f"model.layers.{index}.{name}": slot for name, slot in layer.slots()}
        if not self.config.tie_word_embeddings:
            slots["lm_head.weight"] = self.lm_head.weight
        return {name: slot.data for name, slot in slots.items() if slot is not None}

    def pack(self, quantization: WeightFormat | None = None) -> None:
        """Make all products, once and for good.

        A packed head is a copy: the table of a tied model stays plain, as the embedding needs it.
        """
        pack_linears(self, self.kernels, quantization)
        if self.dtype is torch.float32 and are_bfloat16(self):
            self._compiled = self._compile()
            self._packed_head = packed_head(self.lm_head)

    def _compile(self) -> CompiledForward | None:
        """The compiled pass, where the attention has a compiled kernel."""
        if not isinstance(self.kernels.attention, CpuAttention):
            return None
        return CompiledForward(
            self.config,
            Entry(token_norm=norm_address(self._layers[0].input_layernorm)),
            self.embed_tokens.weight,
            self.rotary,
            [layer.parts() for layer in self._layers],
            self.norm,
            shared_team(torch.get_num_threads()),
        )


def _fused(
    linear: Linear, names: Sequence[str], sizes: Sequence[int]
) -> Iterator[tuple[str, Tensor | None]]:
    """Rows of one fused weight and bias, by the names of the parts."""
    assert linear.weight is not None, "the weights are packed"
    for name, weight in zip(names, linear.weight.data.split(list(sizes)), strict=True):
        yield f"{name}.weight", weight
    if linear.bias is not None:
        for name, bias in zip(names, linear.bias.data.split(list(sizes)), strict=True):
            yield f"{name}.bias", bias
