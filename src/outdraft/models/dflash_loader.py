"""From a DFlash or DSpark checkpoint and its target to a drafter that can run."""

from dataclasses import replace
from pathlib import Path

from outdraft.core.weight_format import WeightFormat
from outdraft.models.config import read_json
from outdraft.models.dflash import DFlashNetwork
from outdraft.models.dflash_config import DFlashConfig
from outdraft.models.drafter_tensors import (
    OF_TRAINING,
    check_fit,
    drop_the_targets_embedding,
    drop_the_targets_head,
    take_draft_ids,
)
from outdraft.models.loader import fill_slots, tensor_places, weight_files
from outdraft.models.target_tables import TargetTables


def load_dflash(
    path: Path, tables: TargetTables, quantization: WeightFormat | None = None
) -> DFlashNetwork:
    """As load_eagle."""
    target = tables.target
    config = DFlashConfig.from_mapping(read_json(path / "config.json"))
    found = tensor_places(weight_files(path), _canonical_name)
    drop_the_targets_embedding(found, target)
    if config.draft_vocab_size == config.layer.vocab_size:
        drop_the_targets_head(found, target, tables.path)
    config = replace(
        config,
        own_embedding="embed_tokens.weight" in found,
        own_head="lm_head.weight" in found,
    )
    check_fit(config, target, reads_own_size=False)
    network = DFlashNetwork(config, tables, take_draft_ids(config, found))
    fill_slots(network.checkpoint_slots(), found)
    network.pack(quantization)
    return network.eval()


def _canonical_name(name: str) -> str | None:
    """The name in DFlash's own files."""
    name = name.removeprefix("model.")
    return None if name in OF_TRAINING else name
