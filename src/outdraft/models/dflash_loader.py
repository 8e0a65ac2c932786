"""From a DFlash or DSpark checkpoint and its target to a drafter that can run."""

from pathlib import Path

from outdraft.core.weight_format import WeightFormat
from outdraft.kernels.ops import Kernels
from outdraft.models.base import LanguageModel
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
    path: Path,
    target: LanguageModel,
    kernels: Kernels,
    quantization: WeightFormat | None = None,
    tables: TargetTables | None = None,
) -> DFlashNetwork:
    """The drafter of a checkpoint directory, ready to run, its weights packed for the device.

    It has the dtype and the device of the target, whose embedding and head it may read.

    Args:
        tables: the target's, where one of both is spread over ranks. All ranks of the target call
            this together.

    Raises:
        ConfigError: the config is not supported, does not fit the target or cannot be divided over
            its ranks, or a tensor is missing, unknown, damaged or of another shape.
    """
    tables = tables or TargetTables(target)
    config = DFlashConfig.from_mapping(read_json(path / "config.json"))
    found = tensor_places(weight_files(path), _canonical_name)
    drop_the_targets_embedding(found, target)
    if config.draft_vocab_size == config.layer.vocab_size:
        drop_the_targets_head(found, target, tables.path)
    own_embedding, own_head = "embed_tokens.weight" in found, "lm_head.weight" in found
    check_fit(config, target, own_head=own_head, goes_on=not (own_embedding and own_head))
    ids_N = take_draft_ids(config, found)
    network = DFlashNetwork(
        config, tables, kernels, ids_N, own_embedding=own_embedding, own_head=own_head
    )
    fill_slots(network.checkpoint_slots(), found)
    network.pack(quantization)
    return network.eval()


def _canonical_name(name: str) -> str | None:
    """The name in DFlash's own files."""
    name = name.removeprefix("model.")
    return None if name in OF_TRAINING else name
