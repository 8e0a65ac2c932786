"""The layers of an EAGLE drafter that a Llama does not have: they read the target's states.

Dimension key: T rows, D hidden of the drafter, S hidden of the target, K taps, W = K * S.
"""

from collections.abc import Iterator
from typing import TypedDict

import torch
from torch import Tensor, nn

from outdraft.kernels.ops import Kernels
from outdraft.models.compiled_forward import LayerParts, norm_address, packed_addresses
from outdraft.models.config import ModelConfig
from outdraft.models.eagle_config import EagleConfig
from outdraft.models.entry_kernels import Entry
from outdraft.models.layers.linear import Linear
from outdraft.models.layers.norm import RMSNorm
from outdraft.models.layers.rotary import Rotary
from outdraft.models.llama import FeedForward, SelfAttention, layer_parts

Slots = Iterator[tuple[str, Tensor | None]]


class Kind(TypedDict):
    """What kind of tensors the layers make; they take it as keywords."""

    dtype: torch.dtype
    device: torch.device


class TapFusion(nn.Module):
    """EAGLE-3: the states of a row, tapped between the target's layers, as one of the drafter."""

    def __init__(self, config: EagleConfig, num_taps: int, has_bias: bool, kind: Kind) -> None:
        super().__init__()
        state_size, eps = config.target_hidden_size, config.layer.rms_norm_eps
        self.num_inputs = num_taps * state_size
        self.fc = Linear(self.num_inputs, config.layer.hidden_size, bias=has_bias, **kind)
        self.input_norm = RMSNorm(self.num_inputs, eps, **kind) if config.norm_before_fc else None
        num_norms = num_taps if config.fc_norm else 0
        self._norms = [RMSNorm(state_size, eps, **kind) for _ in range(num_norms)]
        self.fc_norm = nn.ModuleList(self._norms)

    def forward(self, states_TW: Tensor) -> Tensor:
        """[T, D]."""
        if self.input_norm is not None:
            states_TW = self.input_norm(states_TW)
        if self._norms:
            taps_KTS = states_TW.chunk(len(self._norms), dim=-1)
            pairs = zip(self._norms, taps_KTS, strict=True)
            states_TW = torch.cat([norm(tap_TS.contiguous()) for norm, tap_TS in pairs], dim=-1)
        return self.fc(states_TW)

    def slots(self) -> Slots:
        """As EagleNetwork.checkpoint_slots."""
        yield "fc.weight", self.fc.weight
        yield "fc.bias", self.fc.bias
        yield "input_norm.weight", _weight(self.input_norm)
        for index, norm in enumerate(self._norms):
            yield f"fc_norm.{index}.weight", norm.weight


class PairEntry(nn.Module):
    """EAGLE-3: layer 0 reads the token and the state side by side."""

    def __init__(self, config: EagleConfig, kind: Kind) -> None:
        super().__init__()
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, **kind)
        self.hidden_norm = RMSNorm(size, eps, **kind)
        self.num_outputs = 2 * size
        self._adds_to_normed = config.norm_before_residual

    def forward(self, embedded_TD: Tensor, states_TD: Tensor) -> tuple[Tensor, Tensor]:
        """What the attention of layer 0 reads, and a new tensor [T, D] that its result adds to."""
        normed_TD = self.hidden_norm(states_TD)
        x_T2D = torch.cat((self.input_layernorm(embedded_TD), normed_TD), dim=-1)
        return x_T2D, normed_TD if self._adds_to_normed else states_TD.clone()

    def compiled(self) -> Entry:
        """For the compiled pass."""
        return Entry(
            reads_states=True,
            token_norm=norm_address(self.input_layernorm),
            state_norm=norm_address(self.hidden_norm),
            adds_to_normed=self._adds_to_normed,
        )

    def slots(self) -> Slots:
        """As EagleNetwork.checkpoint_slots."""
        yield "layers.0.input_layernorm.weight", self.input_layernorm.weight
        yield "layers.0.hidden_norm.weight", self.hidden_norm.weight


class FusedEntry(nn.Module):
    """EAGLE: layer 0 reads one state made of the token and the target's."""

    def __init__(
        self, config: EagleConfig, has_bias: bool, has_input_norm: bool, kind: Kind
    ) -> None:
        super().__init__()
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self.fc = Linear(2 * size, size, bias=has_bias, **kind)
        self.embedding_layernorm = RMSNorm(size, eps, **kind) if config.layernorms else None
        self.input_layernorm = RMSNorm(size, eps, **kind) if has_input_norm else None
        self.num_outputs = size

    def forward(self, embedded_TD: Tensor, states_TD: Tensor) -> tuple[Tensor, Tensor]:
        """As PairEntry; without an input norm both are one tensor."""
        if self.embedding_layernorm is not None:
            embedded_TD = self.embedding_layernorm(embedded_TD)
        x_TD = self.fc(torch.cat((embedded_TD, states_TD), dim=-1))
        return x_TD if self.input_layernorm is None else self.input_layernorm(x_TD), x_TD

    def compiled(self) -> Entry:
        """For the compiled pass."""
        weights, bias = packed_addresses(self.fc)
        return Entry(
            reads_states=True,
            token_norm=norm_address(self.embedding_layernorm),
            fc=weights,
            fc_bias=bias,
            input_norm=norm_address(self.input_layernorm),
        )

    def slots(self) -> Slots:
        """As EagleNetwork.checkpoint_slots."""
        yield "fc.weight", self.fc.weight
        yield "fc.bias", self.fc.bias
        yield "embedding_layernorm.weight", _weight(self.embedding_layernorm)
        yield "layers.0.input_layernorm.weight", _weight(self.input_layernorm)


class FirstLayer(nn.Module):
    """Layer 0 behind its entry: as DecoderLayer, less the norm of what it reads."""

    def __init__(
        self,
        config: ModelConfig,
        input_size: int,
        kernels: Kernels,
        rotary: Rotary,
        kind: Kind,
    ) -> None:
        super().__init__()
        self.self_attn = SelfAttention(
            config, config.windows[0], kernels, rotary, **kind, input_size=input_size
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **kind)
        self.mlp = FeedForward(config, **kind)

    def parts(self) -> LayerParts:
        """For the compiled pass."""
        return layer_parts(None, self.self_attn, self.post_attention_layernorm, self.mlp)

    def slots(self) -> Slots:
        """As CausalLM.checkpoint_slots, without the prefix of the layer."""
        yield "post_attention_layernorm.weight", self.post_attention_layernorm.weight
        for prefix, module in (("self_attn", self.self_attn), ("mlp", self.mlp)):
            for name, slot in module.slots():
                yield f"{prefix}.{name}", slot


def _weight(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight
