"""Steps that loading has in common for several drafters, and the method that a checkpoint is for.

A checkpoint may hold a copy of a table of the target's, and it may draft some tokens only.

Dimension key: N draft vocabulary, V vocabulary, D hidden.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outdraft.core.errors import ConfigError
from outdraft.models.base import LanguageModel
from outdraft.models.checkpoints.config_json import read_json
from outdraft.models.checkpoints.files import Place, read_tensor, tensor_places, weight_files
from outdraft.models.checkpoints.gguf_file import is_gguf
from outdraft.models.checkpoints.slots import read_part, rows_of
from outdraft.models.decoder.causal_lm import EMBEDDING_NAME, HEAD_NAME
from outdraft.models.drafters.config import SPECULATORS_KIND, DrafterConfig

OF_TRAINING = ("verifier_norm.weight", "verifier_lm_head.weight")  # copies of the target's
# Parts of names that config.json gives, and the methods they are for; the first one counts.
_METHODS = {
    "medusa": "medusa",
    "mlp_speculator": "mlp_speculator",
    "mlpspeculator": "mlp_speculator",
    "dspark": "dspark",
    "dflash": "dflash",
    "eagle3": "eagle3",
    "peagle": "eagle3",
    "eagle": "eagle",
}


def check_sizes(raw: Mapping[str, Any], target: LanguageModel, *, hidden_key: str) -> None:
    """Raise ConfigError if heads on the target's last states name other sizes than the target's.

    A key that is missing is no contradiction: the shapes of the tensors are checked later.
    """
    sizes = {hidden_key: target.config.hidden_size, "vocab_size": target.config.vocab_size}
    for key, expected in sizes.items():
        if raw.get(key) is not None and raw[key] != expected:
            raise ConfigError(
                f"the draft heads are for another model: config.json has {key}={raw[key]!r}, "
                f"the target {expected}"
            )


def check_fit(config: DrafterConfig, target: LanguageModel, *, reads_own_size: bool) -> None:
    """Raise ConfigError if a drafter cannot read this target's states, or both mean other tokens.

    Args:
        reads_own_size: the states that it reads must be of its own size.
    """
    size, own_size = target.config.hidden_size, config.layer.hidden_size
    borrows = not (config.own_embedding and config.own_head)
    if config.target_hidden_size != size:
        raise ConfigError(
            f"the drafter reads states of size {config.target_hidden_size}, but the target's "
            f"hidden size is {size}"
        )
    if own_size != size and (borrows or reads_own_size):
        raise ConfigError(
            f"the drafter has a hidden size of {own_size}, so that it cannot go on with what it "
            f"takes of the target, whose hidden size is {size}"
        )
    vocab_size = config.layer.vocab_size
    if vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"the drafter knows {vocab_size} tokens, but the target "
            f"{target.config.vocab_size}: they must have the same vocabulary"
        )
    if not config.own_head and config.draft_vocab_size < vocab_size:
        raise ConfigError(
            "the checkpoint lacks tensors: lm_head.weight, which a draft vocabulary of "
            f"{config.draft_vocab_size} tokens needs"
        )


def drop_the_targets_embedding(found: dict[str, Place], target: LanguageModel) -> None:
    """Drop a copy of the target's embedding: it is large, and not kept twice. Each rank looks at
    the vectors of its own tokens."""
    place, own_ND = found.get("embed_tokens.weight"), target.embed_tokens.table.source
    if place is not None and isinstance(own_ND, Tensor):  # plain numbers are no codes
        stored_ND = read_part(place, rows_of(target.vocabulary, own_ND))
        is_own = stored_ND is not None and torch.equal(stored_ND.to(own_ND), own_ND)
        if bool(target.group.gather(torch.tensor(is_own, device=target.device)).all()):
            del found["embed_tokens.weight"]


def drop_the_targets_head(
    found: dict[str, Place], target: LanguageModel, path: Path | None
) -> None:
    """Drop a copy of the target's head. The target's own is packed: its numbers are compared in the
    checkpoint at `path`; None: they cannot be."""
    place = found.get("lm_head.weight")
    if place is None or path is None or is_gguf(path):
        return
    name = EMBEDDING_NAME if target.config.tie_word_embeddings else HEAD_NAME
    places = tensor_places(weight_files(path))
    if name not in places:
        return
    stored, own = read_tensor(place), read_tensor(places[name])
    if stored.dtype == own.dtype and torch.equal(stored, own):
        del found["lm_head.weight"]


def take_draft_ids(config: DrafterConfig, found: dict[str, Place]) -> Tensor | None:
    """int64 [N]: the target's id of each draft token; None if it is the same id. The tensors that
    map them are no weights: they are taken out of `found`.

    Raises:
        ConfigError: these tensors are missing or contradict each other.
    """
    num_drafts, vocab_size = config.draft_vocab_size, config.layer.vocab_size
    own_N = torch.arange(num_drafts)
    ids_N, offsets, marks = own_N, found.pop("d2t", None), found.pop("t2d", None)
    if offsets is not None:
        ids_N = own_N + _read_ints(offsets, (num_drafts,))
    elif num_drafts < vocab_size:
        raise ConfigError(
            f"the checkpoint lacks tensors: d2t, which a draft vocabulary of {num_drafts} of "
            f"{vocab_size} tokens needs"
        )
    if not bool(((ids_N >= 0) & (ids_N < vocab_size)).all()):
        raise ConfigError(f"tensor 'd2t' leads out of the vocabulary of {vocab_size} tokens")
    if len(ids_N.unique()) != num_drafts:
        raise ConfigError("tensor 'd2t' maps several draft tokens to one token")
    if marks is not None:
        is_draft_V = _read_ints(marks, (vocab_size,)) != 0
        if not torch.equal(is_draft_V.nonzero().flatten(), ids_N.sort().values):
            raise ConfigError("tensors 't2d' and 'd2t' contradict each other")
    return None if num_drafts == vocab_size and torch.equal(ids_N, own_N) else ids_N


def _read_ints(place: Place, shape: tuple[int, ...]) -> Tensor:
    """int64, of a tensor of whole numbers or bools."""
    tensor = read_tensor(place)
    if tensor.shape != shape or tensor.is_floating_point():
        raise ConfigError(
            f"tensor {place[1]!r} is {list(tensor.shape)} of {tensor.dtype}, but config.json "
            f"asks for {list(shape)} of whole numbers"
        )
    return tensor.long()


def drafter_method(path: Path) -> str | None:
    """The method whose drafter a checkpoint holds; None: as far as can be seen it is a model.

    Raises:
        ConfigError: there is no readable config.json, or there are no readable weights.
    """
    if is_gguf(path):
        return None
    raw = read_json(path / "config.json")
    kinds = raw.get(SPECULATORS_KIND), raw.get("model_type"), raw.get("architectures")
    names = str(kinds).lower()
    for part, method in _METHODS.items():
        if part in names:
            return method
    if "medusa_num_heads" in raw:
        return "medusa"
    # EAGLE's authors call theirs a Llama.
    if raw.get("draft_vocab_size") is not None:
        return "eagle3"
    places = tensor_places(weight_files(path), lambda name: name.removeprefix("model."))
    return "eagle" if "fc.weight" in places else None
