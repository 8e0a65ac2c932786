"""From an EAGLE checkpoint and its target to a drafter that can run.

The published checkpoints are one network under a few sets of names. A checkpoint leaves out a
tensor if it is the same as the target's. Then the target's own tensor is used.

Dimension key: N draft vocabulary, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from outdraft.core.draft import DraftSource
from outdraft.core.errors import ConfigError
from outdraft.core.weight_format import WeightFormat
from outdraft.models.base import LanguageModel
from outdraft.models.decoder.config import read_json
from outdraft.models.decoder.loader import (
    Place,
    fill_slots,
    read_tensor,
    tensor_places,
    weight_files,
)
from outdraft.models.drafters.eagle import EagleNetwork
from outdraft.models.drafters.eagle_config import EagleConfig
from outdraft.models.drafters.target_tables import TargetTables
from outdraft.models.drafters.tensors import (
    OF_TRAINING,
    check_fit,
    drop_the_targets_embedding,
    take_draft_ids,
)

# Beginnings of names, and what they are in EAGLE's repository.
_OTHER_NAMES = {
    "midlayer.": "layers.0.",
    "transformer.": "layers.0.",
    "fusion_fc.": "fc.",
    "embed_layernorm.": "embedding_layernorm.",
    "hidden_layernorm.": "layers.0.input_layernorm.",
    "lm_head_layernorm.": "pre_lm_head_layernorm.",
}


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
    target, found = tables.target, tensor_places(weight_files(path), _canonical_name)
    drop_the_targets_embedding(found, target)
    raw = read_json(path / "config.json")
    config = _completed(EagleConfig.from_mapping(raw), found)
    _check_fit(config, target)
    network = EagleNetwork(config, tables, take_draft_ids(config, found))
    fill_slots(network.checkpoint_slots(), found)
    for layer in network.decoder.layers:
        network.decoder.arrange(layer)
    network.pack(quantization)
    return network.eval()


def _canonical_name(name: str) -> str | None:
    """The name in EAGLE's repository, with layers.0 for its midlayer."""
    name = name.removeprefix("model.")
    for prefix, own in _OTHER_NAMES.items():
        if name.startswith(prefix):
            name = own + name.removeprefix(prefix)
    return None if name in OF_TRAINING else name


def _completed(config: EagleConfig, found: Mapping[str, Place]) -> EagleConfig:
    """The config with what the checkpoint has: config.json does not always tell."""
    layer, mask = config.layer, found.get("mask_hidden")
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
        own_embedding="embed_tokens.weight" in found,
        own_head="lm_head.weight" in found,
        fc_bias=config.fc_bias or "fc.bias" in found,
        layernorms=layernorms,
        input_norm=layernorms or "layers.0.input_layernorm.weight" in found,
        mask_shape=None if mask is None else tuple(read_tensor(mask).shape),
    )


def _check_fit(config: EagleConfig, target: LanguageModel) -> None:
    """As `check_fit`, and whether its mask is as wide as one of the states that it reads."""
    check_fit(config, target, reads_own_size=config.version is DraftSource.EAGLE)
    size, own_size = target.config.hidden_size, config.layer.hidden_size
    widths = [len(config.taps_of(target.config.num_layers)) * size, own_size]
    if config.mask_shape is not None and torch.Size(config.mask_shape).numel() not in widths:
        raise ConfigError(
            f"tensor 'mask_hidden' has shape {list(config.mask_shape)}, but config.json asks for "
            f"{widths[0] or widths[1]} numbers"
        )
