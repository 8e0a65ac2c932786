"""What an EAGLE drafter has in front of its layers: weights that take in the target's states.

Dimension key: T rows, D hidden of the drafter, S hidden of the target, K taps, W = K * S.
"""

import torch
from torch import Tensor, nn

from outdraft.core.draft import DraftSource
from outdraft.kernels.decoder_ops import StateEntry
from outdraft.models.checkpoints.slots import Slots, slot_of
from outdraft.models.decoder.layers import Kind, product_of
from outdraft.models.decoder.linear import Linear
from outdraft.models.decoder.norm import RMSNorm, norm_weight
from outdraft.models.drafters.eagle_config import EagleConfig


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
        yield "fc.weight", slot_of(self.fc.weight)
        yield "fc.bias", slot_of(self.fc.bias)
        yield "input_norm.weight", slot_of(norm_weight(self.input_norm))
        for index, norm in enumerate(self._norms):
            yield f"fc_norm.{index}.weight", slot_of(norm.weight)


class Entry(nn.Module):
    """What layer 0 reads: in EAGLE and MTP one state made of the token and the target's state, in
    EAGLE-3 both side by side."""

    def __init__(self, config: EagleConfig, kind: Kind) -> None:
        super().__init__()
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self._adds_to_normed = config.norm_before_residual
        self.fc: Linear | None = None
        self.token_norm: RMSNorm | None = None
        self.state_norm: RMSNorm | None = None
        if config.version is not DraftSource.EAGLE3:
            self.fc = Linear(2 * size, size, bias=config.fc_bias, **kind)
        if config.version is not DraftSource.EAGLE:
            self.state_norm = RMSNorm(size, eps, **kind)
        self._leaves_out_first = config.version is DraftSource.MTP
        if self.fc is None or config.layernorms:
            self.token_norm = RMSNorm(size, eps, **kind)
        self.num_outputs = 2 * size if self.fc is None else size

    def spec(self) -> StateEntry:
        """For the kernels, once the product is packed."""
        return StateEntry(
            token_norm_D=norm_weight(self.token_norm),
            state_norm_D=norm_weight(self.state_norm),
            fc=None if self.fc is None else product_of(self.fc),
            adds_to_normed=self._adds_to_normed,
            leaves_out_first=self._leaves_out_first,
        )

    def slots(self) -> Slots:
        """As EagleNetwork.checkpoint_slots."""
        if self.fc is not None:
            yield "fc.weight", slot_of(self.fc.weight)
            yield "fc.bias", slot_of(self.fc.bias)
            yield "embedding_layernorm.weight", slot_of(norm_weight(self.token_norm))
        else:
            yield "layers.0.input_layernorm.weight", slot_of(norm_weight(self.token_norm))
        yield "layers.0.hidden_norm.weight", slot_of(norm_weight(self.state_norm))
