"""From a checkpoint to a model that can run, of a family that has a network here."""

import logging
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from outdraft.core.weights import WeightFormat
from outdraft.distributed.group import ALONE, RankGroup
from outdraft.kernels.ops import Kernels
from outdraft.models.checkpoints.files import tensor_places, weight_files
from outdraft.models.checkpoints.gguf_file import is_gguf, open_gguf
from outdraft.models.checkpoints.gguf_weights import gguf_weights
from outdraft.models.checkpoints.quantization import check_unquantised
from outdraft.models.checkpoints.reader import Checkpoint, read_checkpoint
from outdraft.models.checkpoints.slots import (
    Slot,
    check_quantization,
    check_slots,
    describe,
    stored_product,
)
from outdraft.models.checkpoints.stored import StoredParameter, StoredWeight
from outdraft.models.decoder.causal_lm import EMBEDDING_NAME, HEAD_NAME, CausalLM
from outdraft.models.decoder.config import ModelConfig
from outdraft.models.modules import Linear, linears_of

_GPU = "a GPU multiplies numbers"
_logger = logging.getLogger(__name__)


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
    """Load a checkpoint of a family that has a network here; see load_language_model."""
    config = ModelConfig.from_directory(path).for_context(max_model_len)
    if has_random_weights:
        check_unquantised(path, config.quantization)
    model = CausalLM(config, kernels, dtype, device, group, drafts=drafts)
    if has_random_weights:
        _fill_randomly(model)
        model.pack(quantization)
    else:
        load_weights(model, open_checkpoint(path, config, model.checkpoint_slots()), quantization)
    return model.eval()


def _fill_randomly(model: CausalLM) -> None:
    """Fill with the same numbers every time, over any number of ranks; the checkpoint's own dtype
    can hold them."""
    own_dtype: torch.dtype = getattr(torch, model.config.torch_dtype or "float32")
    generator = torch.Generator().manual_seed(0)
    for slot in model.checkpoint_slots().values():
        values = torch.empty(slot.shape).uniform_(-1e-3, 1e-3, generator=generator)
        slot.to.copy_(values[slot.indices].to(own_dtype))


def open_checkpoint(path: Path, config: ModelConfig, wanted: Container[str]) -> Checkpoint:
    """The tensors of a checkpoint.

    Args:
        wanted: the names of a model's slots.

    Raises:
        ConfigError: a file is missing or damaged, or tensors of quantised weights do not fit each
            other.
    """
    if is_gguf(path):
        return Checkpoint(gguf_weights(path), release=open_gguf(path).release)
    places, prefix = tensor_places(weight_files(path)), config.mtp_prefix
    if prefix is not None:
        places = {name: place for name, place in places.items() if not name.startswith(prefix)}
    if config.tie_word_embeddings:  # some checkpoints store the tied head again
        places.pop(HEAD_NAME, None)
    return read_checkpoint(config.quantization, places, wanted)


def load_weights(
    model: CausalLM, checkpoint: Checkpoint, quantization: WeightFormat | None = None
) -> None:
    """Read a checkpoint and pack it part by part; q, k, v and gate, up are fused here.

    Weights of products are packed from the files as the system maps them, unless their numbers or
    their order change on the way.

    Raises:
        ConfigError: as load_language_model.
    """
    weights = checkpoint.weights
    if model.device.type != "cpu":
        check_quantization(quantization, (one for one in weights.values() if one.tile is not None))
        weights = {name: replace(one, tile=None, reason=_GPU) for name, one in weights.items()}
    check_slots(model.checkpoint_slots(), weights)
    kept: list[tuple[str, str]] = []
    dequantised: list[tuple[str, str]] = []
    table: Slot | None = None
    for part, slots in model.parts():
        sources: dict[Linear, StoredParameter | list[Tensor]] = {}
        for linear, names, product in stored_products(part, slots, weights):
            own = [slots.pop(name) for name in names]
            if product.tile is not None:
                sources[linear] = product
                kept += [(one.label, str(product.tile)) for one in product.weights]
                check_quantization(quantization, product.weights)
                continue
            quantised = [one for one in product.weights if not one.is_plain]
            dequantised += [(one.label, one.reason) for one in quantised]
            numbers = [slot.numbers(weights[name]) for name, slot in zip(names, own, strict=True)]
            if all(map(_is_alike, numbers, own)):
                sources[linear] = numbers
                continue
            for slot, own_ED in zip(own, numbers, strict=True):
                slot.to.copy_(own_ED)
        if EMBEDDING_NAME in slots and keeps_blocks(weights[EMBEDDING_NAME]):
            table = slots.pop(EMBEDDING_NAME)
        for name, slot in slots.items():
            slot.to.copy_(slot.numbers(weights[name]))
            if not weights[name].is_plain:
                dequantised.append((weights[name].label, "it is read row by row"))
        for linear in linears_of(part):
            source = sources.pop(linear, ())
            source = source.coded() if isinstance(source, StoredParameter) else source
            linear.pack(model.kernels, quantization, source)
        checkpoint.release()
    if table is not None:
        _keep_table(model, weights[EMBEDDING_NAME], table)
        checkpoint.release()
    for line in describe(kept, dequantised):
        _logger.info("%s", line)


def keeps_blocks(weight: StoredWeight) -> bool:
    """Is true if a weight stays in the blocks of a GGUF file, also as an embedding."""
    return weight.tile is not None and weight.tile.is_blocks


def _keep_table(model: CausalLM, weight: StoredWeight, slot: Slot) -> None:
    """Keep the codes of the embedding; a tied head has them already."""
    product = model.lm_head.product if model.config.tie_word_embeddings else None
    is_shared = product is not None
    if product is None:
        coded = StoredParameter([[weight.part(*slot.indices)]]).coded()
        product = model.kernels.pack_codes(coded, None, model.dtype)
    model.keep_codes(product, is_shared=is_shared)


def stored_products(
    part: nn.Module, slots: Mapping[str, Slot], weights: Mapping[str, StoredWeight]
) -> Iterator[tuple[Linear, list[str], StoredParameter]]:
    """The products of a part, with the names of the weights that belong to no other module, and all
    that they are made of."""
    owned = {
        linear: [name for name, slot in slots.items() if linear.owns(slot.to)]
        for linear in linears_of(part)
    }
    for linear, names in owned.items():
        read = names or [EMBEDDING_NAME]  # a tied head reads what the table is of
        yield (
            linear,
            names,
            stored_product([weights[name] for name in read], [slots[name] for name in read]),
        )


def _is_alike(numbers: Tensor, slot: Slot) -> bool:
    """Is true if numbers need not be converted for their place."""
    return (numbers.dtype, numbers.device) == (slot.to.dtype, slot.to.device)
