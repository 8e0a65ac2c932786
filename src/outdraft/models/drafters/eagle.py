"""EAGLE drafters: one decoder layer or a few that continue from the target's hidden states.

EAGLE (Li et al. 2024, arXiv 2401.15077) reads the token after position i together with the
target's state of position i, and writes a state like it, from which the target's own head predicts
the token after that. EAGLE-3 (Li et al. 2025, arXiv 2503.01840) reads states that are tapped
between the target's layers, and has a head of its own, often for the frequent tokens only. In both,
the next drafted token is read together with the drafter's own state, in place of the target's.

The published checkpoints are one network under a few sets of names. A checkpoint leaves out a
tensor if it is the same as the target's. Then the target's own tensor is used.

Layers for multi-token prediction are further layers of the target's checkpoint. DeepSeek-V3
(2412.19437, section 2.2) was trained with a further layer that reads the state of each position
together with the token after it, and predicts the token after that. MiMo (2505.07608) published
such a layer for a network of Qwen 2's shape. It is an EAGLE drafter with two norms in front and one
after it; the state that it feeds back is the one after that norm. A checkpoint has one such layer
as a rule: it drafts several tokens one after the other.

Dimension key: T rows, R rows that need logits, Q of them on this rank, D hidden of the drafter, F
what is kept of the target's pass for a row, S hidden of the target, K taps, W = K * S, N draft
vocabulary, V vocabulary.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outdraft.attention.base import AttentionMetadata, LayerCache
from outdraft.core.draft import DraftSource
from outdraft.core.errors import ConfigError
from outdraft.core.weights import WeightFormat
from outdraft.distributed.group import ALL_HERE, RequestShares
from outdraft.kernels.decoder_ops import FusedPasses, StateEntry
from outdraft.models.base import StateNetwork
from outdraft.models.checkpoints.config_json import read_config, read_json
from outdraft.models.checkpoints.files import Place, read_tensor, tensor_places, weight_files
from outdraft.models.checkpoints.slots import Slot, fill_slots, own_slots
from outdraft.models.decoder.causal_lm import CausalLM
from outdraft.models.decoder.config import ModelConfig
from outdraft.models.decoder.layers import Decoder, Kind, product_of
from outdraft.models.drafters.config import EagleConfig
from outdraft.models.drafters.tables import OF_TRAINING, LayeredDrafter, TargetTables
from outdraft.models.modules import Linear, RMSNorm, norm_weight

# Beginnings of names, and what they are in EAGLE's repository.
_OTHER_NAMES = {
    "midlayer.": "layers.0.",
    "transformer.": "layers.0.",
    "fusion_fc.": "fc.",
    "embed_layernorm.": "embedding_layernorm.",
    "hidden_layernorm.": "layers.0.input_layernorm.",
    "lm_head_layernorm.": "pre_lm_head_layernorm.",
}
_MTP_FIELD = "num_nextn_predict_layers"
# Names of MiMo's, and what EAGLE's repository calls the same; others are of the layer.
_MTP_NAMES = {
    "token_layernorm.weight": "embedding_layernorm.weight",
    "hidden_layernorm.weight": "layers.0.hidden_norm.weight",
    "input_proj.weight": "fc.weight",
    "final_layernorm.weight": "pre_lm_head_layernorm.weight",
}
_logger = logging.getLogger(__name__)


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
            pairs = zip(self._norms, states_TW.chunk(len(self._norms), dim=-1), strict=True)
            states_TW = torch.cat([norm(tap_TS.contiguous()) for norm, tap_TS in pairs], dim=-1)
        return self.fc(states_TW)


class EagleNetwork(LayeredDrafter):
    """An EAGLE drafter. Weights are not initialised.

    Its row for position i of a text reads the token at i + 1 and the features of position i; its
    keys are at cache index i.
    """

    def __init__(self, config: EagleConfig, tables: TargetTables, found: dict[str, Place]) -> None:
        is_first = config.version is DraftSource.EAGLE
        super().__init__(config, tables, found, reads_own_size=is_first)
        layer, kind, self.config = config.layer, self.kind, config
        size, eps = layer.hidden_size, layer.rms_norm_eps
        is_newer = config.version is DraftSource.EAGLE3
        self.fusion = TapFusion(config, len(self.taps), kind) if is_newer else None
        self.fc = None if is_newer else Linear(2 * size, size, bias=config.fc_bias, **kind)
        has_norms = is_newer or config.layernorms  # EAGLE has them only by exception
        self.token_norm = RMSNorm(size, eps, **kind) if has_norms else None
        self.state_norm = None if is_first else RMSNorm(size, eps, **kind)
        self.decoder = Decoder(
            layer,
            self.kernels,
            kind,
            2 * size if is_newer else size,
            has_first_norm=not is_newer and config.input_norm,
            group=tables.group,
        )
        self.norm = RMSNorm(size, eps, **kind) if has_norms else None
        self.mask_hidden: nn.Parameter | None = None
        if "mask_hidden" in found:
            shape = read_tensor(found["mask_hidden"]).shape
            widths = [len(self.taps) * config.target_hidden_size, layer.hidden_size]
            if shape.numel() not in widths:
                raise ConfigError(
                    f"tensor 'mask_hidden' has shape {list(shape)}, but config.json asks for "
                    f"{widths[0] or widths[1]} numbers"
                )
            self.mask_hidden = nn.Parameter(torch.empty(shape, **kind), requires_grad=False)

    def features(self, hidden_TD: Tensor, tapped_TKS: Tensor) -> Tensor:
        """[T, F]: what a row reads of the target's pass over its position.

        Args:
            hidden_TD: the target's states after its final norm: EAGLE reads them as they are.
            tapped_TKS: the residual streams of `taps` in their order.
        """
        return hidden_TD if self.fusion is None else self.fusion(tapped_TKS.flatten(1))

    def mask_state(self) -> Tensor:
        """[D]: what `forward` reads for a state not known yet; only if `has_mask_state`."""
        assert self.mask_hidden is not None, "the checkpoint has no mask_hidden"
        state = self.mask_hidden.data.flatten()
        if self.fusion is not None and len(state) == self.fusion.num_inputs:
            return self.fusion(state[None])[0]
        return state

    @property
    def has_mask_state(self) -> bool:
        """Is true if it was trained to draft several tokens in one pass (P-EAGLE, 2602.01469)."""
        return self.mask_hidden is not None

    def pass_options(self) -> dict[str, Any]:
        entry = StateEntry(
            token_norm_D=norm_weight(self.token_norm),
            state_norm_D=norm_weight(self.state_norm),
            fc=None if self.fc is None else product_of(self.fc),
            adds_to_normed=self.config.norm_before_residual,
            leaves_out_first=self.config.version is DraftSource.MTP,
        )
        norm_D, is_fed_back = norm_weight(self.norm), self.config.norm_output
        return {
            "final_norm_D": norm_D if is_fed_back else None,
            "head_norm_D": None if is_fed_back else norm_D,
            "entry": entry,
        }

    def forward(
        self,
        token_ids_T: Tensor,
        states_TF: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """The state of each row, [T, D]: for `logits`, and for the rows that continue it.

        Writes the keys and values of the rows to the caches, one cache a layer.

        Args:
            token_ids_T: int64, the token after each row's position.
            states_TF: `features` of the row's position; in a draft, the state of its parent.
        """
        return self.passes(token_ids_T, caches, metadata, states_TD=states_TF)[0]

    def logits(self, states_RD: Tensor, shares: RequestShares = ALL_HERE) -> Tensor:
        """[Q, V] over the target's vocabulary, of the rows that are this rank's; -inf where the
        drafter has no such token."""
        return self.over_vocabulary(self.known_logits(states_RD, shares))

    @property
    def fused(self) -> FusedPasses | None:
        return self.passes.fused

    @property
    def weight_bytes(self) -> int:
        """Weights that one step of a draft reads as they lie in memory, the target's head included:
        taps are fused once a draft."""
        of_mask = 0 if self.mask_hidden is None else self.mask_hidden.nbytes
        return self.bytes_read(self.fusion) - of_mask

    def checkpoint_slots(self) -> dict[str, Slot]:
        """The names are those of EAGLE's repository, with layers.0 for its midlayer."""
        norm, token_norm = "pre_lm_head_layernorm.", "embedding_layernorm."
        if self.fusion is not None:
            norm, token_norm = "norm.", "layers.0.input_layernorm."
        slots = {
            **own_slots(self.fc, "fc."),
            **own_slots(self.token_norm, token_norm),
            **own_slots(self.state_norm, "layers.0.hidden_norm."),
            **own_slots(self.fusion),
            **super().checkpoint_slots(),
            **own_slots(self.norm, norm),
        }
        if self.mask_hidden is not None:
            slots["mask_hidden"] = Slot(self.mask_hidden.data)
        return slots


def load_eagle(
    path: Path, tables: TargetTables, quantization: WeightFormat | None = None
) -> EagleNetwork:
    """The drafter of a checkpoint directory, ready to run, its weights packed for the device.

    It has the dtype, the device and the kernels of the target, whose tables it may read. All ranks
    of the target call this together.

    Raises:
        ConfigError: the config is not supported, does not fit the target or cannot be divided over
            its ranks, or a tensor is missing, unknown, damaged or of another shape.
    """
    found = tensor_places(weight_files(path), _canonical_name)
    config = _completed(EagleConfig.from_mapping(read_json(path / "config.json")), found)
    return EagleNetwork(config, tables, found).filled(found, quantization)


def _canonical_name(name: str) -> str | None:
    """The name in EAGLE's repository, with layers.0 for its midlayer."""
    name = name.removeprefix("model.")
    for prefix, own in _OTHER_NAMES.items():
        if name.startswith(prefix):
            name = own + name.removeprefix(prefix)
    return None if name in OF_TRAINING else name


def _completed(config: EagleConfig, found: Mapping[str, Place]) -> EagleConfig:
    """The config with what the checkpoint has: config.json does not always have it."""
    layer = config.layer
    layer = replace(
        layer,
        qkv_bias=layer.qkv_bias or "layers.0.self_attn.q_proj.bias" in found,
        o_bias=layer.o_bias or "layers.0.self_attn.o_proj.bias" in found,
        mlp_bias=layer.mlp_bias or "layers.0.mlp.gate_proj.bias" in found,
    )
    is_normed = config.version is DraftSource.EAGLE and "embedding_layernorm.weight" in found
    layernorms = config.layernorms or is_normed
    return replace(
        config,
        layer=layer,
        fc_bias=config.fc_bias or "fc.bias" in found,
        layernorms=layernorms,
        input_norm=layernorms or "layers.0.input_layernorm.weight" in found,
    )


def load_mtp(
    path: Path, tables: TargetTables, quantization: WeightFormat | None = None
) -> StateNetwork:
    """The first layer for multi-token prediction of the target's checkpoint at `path`, ready to
    run; as load_eagle.

    Raises:
        ConfigError: the checkpoint has no such layer, the layer cannot be divided over its ranks,
            or a tensor is missing, unknown, damaged or of another shape.
    """
    target, count = tables.target, read_config(path).get(_MTP_FIELD)
    if type(count) is not int or count < 1:
        has = "has no" if count is None else f"says {count!r} of"
        raise ConfigError(
            f"method 'mtp' needs a checkpoint with layers for multi-token prediction, but "
            f"config.json of {path} ({target.config.architecture}) {has} {_MTP_FIELD}"
        )
    if count > 1:
        _logger.info("%s has %d MTP layers: the first one makes all drafts", path, count)
    if isinstance(target, CausalLM):
        return _load_mimo(path, target.config, tables, quantization)
    library: Any = import_module("outdraft.models.drafters.library_mtp")
    return library.load_library_mtp(path, tables, quantization)


def _load_mimo(
    path: Path, target: ModelConfig, tables: TargetTables, quantization: WeightFormat | None
) -> EagleNetwork:
    prefix = target.mtp_prefix
    if prefix is None:
        raise ConfigError(
            f"config.json of {path} names {_MTP_FIELD}, but {target.architecture} has no MTP "
            "layers that outdraft knows: those of MiMoForCausalLM are known, and those of "
            "families that the transformers library computes"
        )
    first = f"{prefix}0."

    def own_name(name: str) -> str | None:
        rest = name.removeprefix(first)
        return None if rest == name else _MTP_NAMES.get(rest, f"layers.0.{rest}")

    found = tensor_places(weight_files(path), own_name)
    if not found:
        raise ConfigError(
            f"config.json of {path} names {_MTP_FIELD}, but it has no tensors {first}*"
        )
    config = EagleConfig(
        version=DraftSource.MTP,
        layer=replace(target, num_layers=1, windows=target.windows[-1:]),  # as the target's last
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        layernorms=True,
        input_norm=True,
        norm_output=True,
    )
    network = EagleNetwork(config, tables, found)
    fill_slots(network.checkpoint_slots(), found)
    # The layout reads the state before the token, EAGLE the token before the state.
    weight = own_slots(network.fc)["weight"].to
    weight.copy_(weight.roll(target.hidden_size, dims=1))
    network.pack(quantization)
    return network.eval()
