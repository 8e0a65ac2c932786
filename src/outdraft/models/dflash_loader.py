"""From a DFlash or DSpark checkpoint and its target to a drafter that can run."""

from pathlib import Path

from outdraft.core.errors import ConfigError
from outdraft.core.weight_format import WeightFormat
from outdraft.kernels.ops import Kernels
from outdraft.models.base import LanguageModel
from outdraft.models.config import read_json
from outdraft.models.dflash import DFlashNetwork
from outdraft.models.dflash_config import DFlashConfig
from outdraft.models.drafter_tensors import (
    VOCABULARY_TENSORS,
    draft_ids,
    drop_the_targets_embedding,
    drop_the_targets_head,
)
from outdraft.models.loader import fill_slots, tensor_places, weight_files
from outdraft.models.target_tables import TargetTables

_OF_TRAINING = ("verifier_norm.weight", "verifier_lm_head.weight")  # copies of the target's


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
    _check_fit(config, target, borrows=not (own_embedding and own_head))
    if not own_head and config.draft_vocab_size < config.layer.vocab_size:
        raise ConfigError(
            "the checkpoint lacks tensors: lm_head.weight, which a draft vocabulary of "
            f"{config.draft_vocab_size} tokens needs"
        )
    ids_N = draft_ids(config.draft_vocab_size, config.layer.vocab_size, found)
    network = DFlashNetwork(
        config, tables, kernels, ids_N, own_embedding=own_embedding, own_head=own_head
    )
    weights = {slot: place for slot, place in found.items() if slot not in VOCABULARY_TENSORS}
    fill_slots(network.checkpoint_slots(), weights)
    network.pack(quantization)
    return network.eval()


def _canonical_name(name: str) -> str | None:
    """The name in DFlash's own files."""
    name = name.removeprefix("model.")
    return None if name in _OF_TRAINING else name


def _check_fit(config: DFlashConfig, target: LanguageModel, *, borrows: bool) -> None:
    """Whether the drafter can read this target's streams, and both mean the same tokens."""
    size, own_size = target.config.hidden_size, config.layer.hidden_size
    if config.target_hidden_size != size:
        raise ConfigError(
            f"the drafter reads states of size {config.target_hidden_size}, but the target's "
            f"hidden size is {size}"
        )
    if own_size != size and borrows:
        raise ConfigError(
            f"the drafter has a hidden size of {own_size}, so that it cannot go on with what it "
            f"takes of the target, whose hidden size is {size}"
        )
    if config.layer.vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"the drafter knows {config.layer.vocab_size} tokens, but the target "
            f"{target.config.vocab_size}: they must have the same vocabulary"
        )
