"""Layers for multi-token prediction: further layers of a checkpoint, to draft with.

DeepSeek-V3 (2412.19437, section 2.2) was trained with a further layer that reads the state of each
position together with the token after it, and predicts the token after that. MiMo (2505.07608)
published such a layer for a network of Qwen 2's shape. It is an EAGLE drafter with two norms in
front and one after it; the state that it feeds back is the one after that norm. A checkpoint has
one such layer as a rule: it drafts several tokens one after the other.

Dimension key: D hidden.
"""

import logging
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from outdraft.core.draft import DraftSource
from outdraft.core.errors import ConfigError
from outdraft.core.weights import WeightFormat
from outdraft.models.base import StateNetwork
from outdraft.models.checkpoints.config_json import read_config
from outdraft.models.checkpoints.files import tensor_places, weight_files
from outdraft.models.checkpoints.slots import fill_slots
from outdraft.models.decoder.causal_lm import CausalLM
from outdraft.models.decoder.config import ModelConfig
from outdraft.models.drafters.eagle import EagleNetwork
from outdraft.models.drafters.eagle_config import EagleConfig
from outdraft.models.drafters.tables import TargetTables

FIELD = "num_nextn_predict_layers"
# Names of MiMo's, and what EAGLE's repository calls the same; others are of the layer.
_NAMES = {
    "token_layernorm.weight": "embedding_layernorm.weight",
    "hidden_layernorm.weight": "layers.0.hidden_norm.weight",
    "input_proj.weight": "fc.weight",
    "final_layernorm.weight": "pre_lm_head_layernorm.weight",
}
_logger = logging.getLogger(__name__)


def load_mtp(
    path: Path, tables: TargetTables, quantization: WeightFormat | None = None
) -> StateNetwork:
    """The first such layer of the target's checkpoint at `path`, ready to run; as load_eagle.

    Raises:
        ConfigError: the checkpoint has no such layer, the layer cannot be divided over its ranks,
            or a tensor is missing, unknown, damaged or of another shape.
    """
    count = num_layers(path, tables.target.config.architecture)
    if count > 1:
        _logger.info("%s has %d MTP layers: the first one makes all drafts", path, count)
    if isinstance(tables.target, CausalLM):
        return _load_mimo(path, tables.target.config, tables, quantization)
    load = import_module("outdraft.models.drafters.library_mtp").load_library_mtp
    return load(path, tables, quantization)


def num_layers(path: Path, architecture: str) -> int:
    """The number of such layers that config.json names.

    Raises:
        ConfigError: none.
    """
    raw = read_config(path)
    count: Any = raw.get(FIELD)
    if type(count) is not int or count < 1:
        has = "has no" if count is None else f"says {count!r} of"
        raise ConfigError(
            f"method 'mtp' needs a checkpoint with layers for multi-token prediction, but "
            f"config.json of {path} ({architecture}) {has} {FIELD}"
        )
    return count


def _load_mimo(
    path: Path, target: ModelConfig, tables: TargetTables, quantization: WeightFormat | None
) -> EagleNetwork:
    prefix = target.mtp_prefix
    if prefix is None:
        raise ConfigError(
            f"config.json of {path} names {FIELD}, but {target.architecture} has no MTP "
            "layers that outdraft knows: those of MiMoForCausalLM are known, and those of "
            "families that the transformers library computes"
        )
    first = f"{prefix}0."
    found = tensor_places(weight_files(path), lambda name: _canonical_name(name, first))
    if not found:
        raise ConfigError(f"config.json of {path} names {FIELD}, but it has no tensors {first}*")
    network = EagleNetwork(mtp_config(target), tables, None)
    fill_slots(network.checkpoint_slots(), found)
    fc = network.entry.fc
    assert fc is not None
    assert fc.weight is not None
    # The layout reads the state before the token, EAGLE the token before the state.
    fc.weight.data.copy_(fc.weight.data.roll(target.hidden_size, dims=1))
    for layer in network.decoder.layers:
        network.decoder.arrange(layer)
    network.pack(quantization)
    return network.eval()


def mtp_config(target: ModelConfig) -> EagleConfig:
    """The config of such a layer, which is like the target's last one."""
    return EagleConfig(
        version=DraftSource.MTP,
        layer=replace(target, num_layers=1, windows=target.windows[-1:]),
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        layernorms=True,
        input_norm=True,
        norm_output=True,
    )


def _canonical_name(name: str, prefix: str) -> str | None:
    if not name.startswith(prefix):
        return None
    own = name.removeprefix(prefix)
    return _NAMES.get(own, f"layers.0.{own}")
