"""From the name of a checkpoint to a model that can run.

Only safetensors are read, since a pickle runs any code that it holds. All names and shapes are
compared before any weight is copied, so a wrong checkpoint fails at once and by name.
"""

import logging
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from outdraft.core.errors import ConfigError
from outdraft.core.weight_format import WeightFormat
from outdraft.distributed.group import ALONE, RankGroup
from outdraft.kernels.ops import Kernels
from outdraft.models.checkpoints.gguf_file import is_gguf, open_gguf
from outdraft.models.checkpoints.gguf_weights import gguf_weights
from outdraft.models.checkpoints.placing import (
    Placing,
    check_quantization,
    fill_stored,
    kept_already,
    place,
    summary,
)
from outdraft.models.checkpoints.quantization import Quantization
from outdraft.models.checkpoints.reader import read_stored
from outdraft.models.checkpoints.slots import Slot
from outdraft.models.checkpoints.stored import StoredWeight
from outdraft.models.checkpoints.tensors import Place, StoredTensors
from outdraft.models.decoder.causal_lm import EMBEDDING_NAME, HEAD_NAME, CausalLM
from outdraft.models.decoder.config import ModelConfig, read_json
from outdraft.models.decoder.linear import Linear, linears_of

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]
_UNWANTED = ["*/*", "consolidated*"]  # the same weights again, under other names
_READABLE = {"F64", "F32", "F16", "BF16"}
_MAX_NAMED = 5  # tensors that an error names
_WEIGHT_ONLY = "the checkpoint was made for %s: only its weights are quantised here"
_GPU = "a GPU multiplies numbers"
_logger = logging.getLogger(__name__)


def resolve_model_path(
    name_or_path: str | os.PathLike[str], revision: str | None = None, *, with_weights: bool = True
) -> Path:
    """The directory of a checkpoint: a local one, else one of the hub, downloaded if need be. A
    GGUF file is a checkpoint of its own.

    Args:
        revision: branch, tag or commit on the hub; None: the main branch.
        with_weights: whether the weights are downloaded, too.

    Raises:
        ConfigError: there is neither, or the hub cannot be reached and has not been cached, or a
            revision is asked of a local directory.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ConfigError(
                f"revision {revision!r} is for models of the hub, and {str(path)!r} is a directory"
            )
        return path
    if path.is_file() and is_gguf(path):
        return path
    if path.exists():
        raise ConfigError(
            f"model {str(path)!r} is a file: give the directory of the checkpoint, or a GGUF file, "
            "which begins with GGUF"
        )
    name = str(name_or_path)
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ConfigError(f"model {name!r}: there is no such directory")
    from huggingface_hub import snapshot_download  # a directory needs none of it

    try:
        found = snapshot_download(
            name,
            revision=revision,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED if with_weights else [*_UNWANTED, "*.safetensors"],
        )
    except (OSError, ValueError) as error:  # the hub's own errors are one or the other
        raise ConfigError(
            f"model {name!r} is neither a directory nor a checkpoint that the hub can give: {error}"
        ) from error
    return Path(found)


def load_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    kernels: Kernels,
    max_model_len: int | None = None,
    quantization: WeightFormat | None = None,
    group: RankGroup = ALONE,
    *,
    drafts: bool = False,
    has_random_weights: bool = False,
) -> CausalLM:
    """As load_language_model, of a family that has a network here."""
    config = ModelConfig.from_directory(path).for_context(max_model_len)
    if has_random_weights:
        check_unquantised(path, config.quantization)
    model = CausalLM(config, kernels, dtype, device, group, drafts=drafts)
    if has_random_weights:
        _fill_randomly(model)
        model.pack(quantization)
    else:
        checkpoint = open_checkpoint(path, config, model.checkpoint_slots())
        load_weights(model, checkpoint, quantization)
    return model.eval()


def _fill_randomly(model: CausalLM) -> None:
    """With the same numbers every time, over any number of ranks, which the checkpoint's own dtype
    can hold."""
    own_dtype: torch.dtype = getattr(torch, model.config.torch_dtype or "float32")
    generator = torch.Generator().manual_seed(0)
    for slot in model.checkpoint_slots().values():
        values = torch.empty(slot.shape).uniform_(-1e-3, 1e-3, generator=generator)
        slot.to.copy_(slot.part_of(values).to(own_dtype))


def check_unquantised(path: Path, quantization: Quantization | None) -> None:
    """Raise ConfigError if random weights would not be as those of the checkpoint are."""
    if quantization is not None:
        raise ConfigError(
            f"load_format 'dummy' makes plain weights, but those of {path} are quantised "
            f"({quantization.method})"
        )


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory, in the order of their names.

    Raises:
        ConfigError: there are none, or the index names one that is not there.
    """
    if (path / _INDEX).is_file():
        weight_map = read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{path / _INDEX} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if Path(name).name != name:
                raise ConfigError(f"{path / _INDEX} names {name!r}, outside of its directory")
            if not (path / name).is_file():
                raise ConfigError(f"{path / _INDEX} names {name!r}, which is missing")
        return [path / name for name in names]
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    if any(path.glob("*.bin")) or any(path.glob("*.pt")):
        raise ConfigError(
            f"{path} has pickled weights only, which can run code when they are read: "
            f"convert them to {_SINGLE}"
        )
    raise ConfigError(f"{path} has neither {_SINGLE} nor {_INDEX}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Tensors by the names of a model's slots.

    Attributes:
        places: of plain tensors.
        stored: the others.
        release: gives memory back that was mapped to read them.
    """

    places: dict[str, Place]
    stored: dict[str, StoredWeight]
    release: Callable[[], None] = lambda: None


def open_checkpoint(path: Path, config: ModelConfig, wanted: Container[str]) -> Checkpoint:
    """The tensors of a checkpoint.

    Args:
        wanted: the names of a model's slots.

    Raises:
        ConfigError: a file is missing or damaged, or tensors of quantised weights do not fit each
            other.
    """
    if is_gguf(path):
        return Checkpoint({}, gguf_weights(path), open_gguf(path).release)
    places, quantization = tensor_places(weight_files(path)), config.quantization
    if config.mtp_prefix is not None:
        places = {name: p for name, p in places.items() if not name.startswith(config.mtp_prefix)}
    if config.tie_word_embeddings:  # some checkpoints store the tied head again
        places.pop(HEAD_NAME, None)
    if quantization is None:
        return Checkpoint(places, {})
    tell_purpose(quantization)
    stored, rest = read_stored(quantization, places, wanted)
    return Checkpoint(rest, stored)


def tell_purpose(quantization: Quantization) -> None:
    """Log what a checkpoint was made for besides, which is not quantised here."""
    if quantization.activations:
        _logger.info(_WEIGHT_ONLY, quantization.activations)
    if quantization.kv_cache:
        _logger.info("the checkpoint was made for a quantised cache: keys and values stay as wide")


def load_weights(
    model: CausalLM, checkpoint: Checkpoint, quantization: WeightFormat | None = None
) -> None:
    """Read a checkpoint and pack it part by part; q, k, v and gate, up are fused here.

    Weights of products are packed from the files as the system maps them, unless their numbers or
    their order change on the way.

    Raises:
        ConfigError: as load_language_model.
    """
    places, stored = checkpoint.places, checkpoint.stored
    if model.device.type != "cpu":
        kept = next((one for one in stored.values() if one.tile is not None), None)
        if quantization is not None and kept is not None:
            raise kept_already(quantization, kept)
        stored = {name: replace(one, tile=None, reason=_GPU) for name, one in stored.items()}
    check_slots(model.checkpoint_slots(), places, stored)
    placings: list[Placing] = []
    others: list[StoredWeight] = []
    table: Slot | None = None
    for part, slots in model.parts():
        of_linears = placings_of(model, part, slots, stored)
        placings += of_linears.values()
        check_quantization(placings, quantization)
        tensors = _mapped(slots, places)
        lent: dict[Linear, list[Tensor]] = {}
        if model.decoder.rotary.order_C is None:
            lent = {linear: _lent(linear, slots, tensors) for linear in linears_of(part)}
        for name, slot in slots.items():
            if name in tensors:
                slot.to.copy_(tensors.pop(name))
        if EMBEDDING_NAME in slots and keeps_blocks(stored.get(EMBEDDING_NAME)):
            table = slots.pop(EMBEDDING_NAME)
        others += fill_stored(slots, stored, of_linears)
        del slots  # so that a plain weight is gone when it is packed
        model.decoder.arrange(part)
        for linear in linears_of(part):
            if linear in of_linears and of_linears[linear].tile is not None:
                linear.pack_codes(model.kernels, of_linears[linear].coded(), model.dtype)
            else:
                linear.pack(model.kernels, quantization, lent.pop(linear, ()))
        checkpoint.release()
    if table is not None:
        _keep_table(model, stored[EMBEDDING_NAME], table)
        checkpoint.release()
    for line in summary(placings, others):
        _logger.info("%s", line)


def keeps_blocks(weight: StoredWeight | None) -> bool:
    """Whether a weight stays in the blocks of a GGUF file, an embedding, too."""
    return weight is not None and weight.tile is not None and weight.tile.is_blocks


def _keep_table(model: CausalLM, weight: StoredWeight, slot: Slot) -> None:
    """Keep the codes of the embedding; a tied head has them already."""
    head = model.lm_head.product
    if model.config.tie_word_embeddings and head is not None:
        model.embed_tokens.take(head, is_shared=True)
        return
    coded = place((EMBEDDING_NAME,), {EMBEDDING_NAME: weight}, {EMBEDDING_NAME: slot}).coded()
    product = model.kernels.pack_codes(coded, None, model.dtype)
    model.embed_tokens.take(product, is_shared=False)


def placings_of(
    model: CausalLM,
    part: nn.Module,
    slots: Mapping[str, Slot],
    stored: Mapping[str, StoredWeight],
) -> dict[Linear, Placing]:
    """How the products of a part keep their weights, where the checkpoint quantised some."""
    if not stored:
        return {}
    found: dict[Linear, Placing] = {}
    for linear in linears_of(part):
        names = [name for name, slot in slots.items() if linear.owns(slot.to)]
        if not names and linear is model.lm_head:  # a tied one, which reads what the table is of
            names = [EMBEDDING_NAME]
        is_turned = model.decoder.is_turned(part, linear)
        found[linear] = place(names, stored, slots, is_turned=is_turned)
    return found


def _mapped(slots: Mapping[str, Slot], places: Mapping[str, Place]) -> dict[str, Tensor]:
    """What the checkpoint has for these slots, or this rank's parts of it; what was read of a file
    leaves the memory with them."""
    by_file: dict[Path, list[str]] = {}
    for name, (file, _) in places.items():
        if name in slots:
            by_file.setdefault(file, []).append(name)
    mapped: dict[str, Tensor] = {}
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as tensors:
            for name in names:
                mapped[name] = _part(tensors, places[name][1], slots[name])
    return mapped


def _part(tensors: Any, name: str, slot: Slot) -> Tensor:
    """What belongs into the slot, of a tensor of an open file."""
    if slot.is_whole:
        return tensors.get_tensor(name)
    return slot.part_of(tensors.get_slice(name))


def _lent(linear: Linear, slots: Mapping[str, Slot], tensors: dict[str, Tensor]) -> list[Tensor]:
    """Take the rows of a weight from `tensors`; none if they have to be converted, or are not all
    there."""
    names = [name for name, slot in slots.items() if linear.owns(slot.to)]
    if any(name not in tensors for name in names):
        return []
    kept = [(slots[name].to.dtype, slots[name].to.device) for name in names]
    if kept != [(tensors[name].dtype, tensors[name].device) for name in names]:
        return []
    return [tensors.pop(name) for name in names]


def fill_slots(slots: Mapping[str, Slot], places: Mapping[str, Place]) -> None:
    """Copy tensors to where they belong, after all names and shapes were compared.

    Raises:
        ConfigError: a tensor is missing, unknown, or of another shape.
    """
    check_slots(slots, places)
    for name, tensor in _mapped(slots, places).items():
        slots[name].to.copy_(tensor)


def tensor_places(
    files: Iterable[Path], slot_of: Callable[[str], str | None] = lambda name: name
) -> dict[str, Place]:
    """Where the tensor of each slot is; the frequencies of old checkpoints are left out.

    Args:
        slot_of: the slot of a tensor of that name; None: nobody wants it.

    Raises:
        ConfigError: a file cannot be read, or there are two tensors for one slot.
    """
    places: dict[str, Place] = {}
    twice: list[str] = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                names = [str(name) for name in tensors.keys()]  # noqa: SIM118  # not a mapping
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} is damaged or cut short: {error}") from error
        for name in names:
            slot = None if name.endswith("rotary_emb.inv_freq") else slot_of(name)
            if slot in places:
                twice.append(slot)
            elif slot is not None:
                places[slot] = file, name
    if twice:
        raise ConfigError(f"the checkpoint has tensors twice: {listed(sorted(twice))}")
    return places


def read_tensor(place: Place) -> Tensor:
    """One tensor of a safetensors file."""
    file, name = place
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name)


def read_part(place: Place, slot: Slot) -> Tensor | None:
    """What of one tensor belongs into the slot; None: the tensor has another shape."""
    file, name = place
    with safe_open(file, framework="pt") as tensors:
        if list(tensors.get_slice(name).get_shape()) != slot.shape:
            return None
        return _part(tensors, name, slot)


def check_slots(
    slots: Mapping[str, Slot],
    places: Mapping[str, Place],
    stored: Mapping[str, StoredWeight] | None = None,
) -> None:
    """Every slot must be filled, by a tensor of its shape, and nothing be left.

    Raises:
        ConfigError: something is missing, unknown, of another shape, or of an unreadable dtype.
    """
    stored = stored or {}
    if missing := [name for name in slots if name not in places and name not in stored]:
        raise ConfigError(f"the checkpoint lacks tensors: {listed(missing)}")
    if unknown := [name for name in (*places, *stored) if name not in slots]:
        raise ConfigError(
            f"the checkpoint has tensors that its config.json has no use for: {listed(unknown)}"
        )
    for name, one in stored.items():
        if list(one.shape) != slots[name].shape:
            raise ConfigError(
                f"weight {name!r} has shape {list(one.shape)}, but config.json asks for "
                f"{slots[name].shape}"
            )
    tensors = StoredTensors(places)
    for slot, (_, name) in places.items():
        found, expected, dtype = tensors.shape(slot), slots[slot].shape, tensors.dtype(slot)
        if found != expected:
            raise ConfigError(
                f"tensor {name!r} has shape {found}, but config.json asks for {expected}"
            )
        if dtype not in _READABLE:
            raise ConfigError(
                f"tensor {name!r} has dtype {dtype}, which is not supported; "
                f"supported: {', '.join(sorted(_READABLE))}"
            )


def listed(names: Sequence[str]) -> str:
    """The first ones, and how many more there are."""
    rest = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")
