"""What an EAGLE drafter has in front of its layers: weights that take in the target's states.

Dimension key: T rows, D hidden of the drafter, S hidden of the target, K taps, W = K * S.
"""

import torch
from torch import Tensor, nn

from outdraft.kernels.ops import StateEntry
from outdraft.models.decoder import Kind, Slots, product_of
from outdraft.models.eagle_config import EagleConfig
from outdraft.models.layers.linear import Linear
from outdraft.models.layers.norm import RMSNorm, norm_weight


class TapFusion(nn.Module):
    """EAGLE-3: the states of a row, tapped between the target's layers, as one of the drafter."""

    def __init__(self, config: EagleConfig, num_taps: int, kind: Kind) -> None:
        super().__init__()
        state_size, eps = config.target_hidden_size, config.layer.rms_norm_eps
        self.num_inputs = num_taps * state_size
        self.fc = Linear(self.num_inputs, config.layer.hidden_size, bias=config.fc_bias, **kind)
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
        yield "input_norm.weight", norm_weight(self.input_norm)
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

    def spec(self) -> StateEntry:
        """For the kernels."""
        return StateEntry(
            token_norm_D=self.input_layernorm.weight.data,
            state_norm_D=self.hidden_norm.weight.data,
            adds_to_normed=self._adds_to_normed,
        )

    def slots(self) -> Slots:
        """As EagleNetwork.checkpoint_slots."""
        yield "layers.0.input_layernorm.weight", self.input_layernorm.weight
        yield "layers.0.hidden_norm.weight", self.hidden_norm.weight


class FusedEntry(nn.Module):
    """EAGLE: layer 0 reads one state made of the token and the target's."""

    def __init__(self, config: EagleConfig, kind: Kind) -> None:
        super().__init__()
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self.fc = Linear(2 * size, size, bias=config.fc_bias, **kind)
        self.embedding_layernorm = RMSNorm(size, eps, **kind) if config.layernorms else None
        self.num_outputs = size

    def spec(self) -> StateEntry:
        """For the kernels, once the product is packed."""
        return StateEntry(
            token_norm_D=norm_weight(self.embedding_layernorm),
            state_norm_D=None,
            fc=product_of(self.fc),
        )

    def slots(self) -> Slots:
        """As EagleNetwork.checkpoint_slots."""
        yield "fc.weight", self.fc.weight
        yield "fc.bias", self.fc.bias
        yield "embedding_layernorm.weight", norm_weight(self.embedding_layernorm)
