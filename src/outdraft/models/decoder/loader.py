"""From a checkpoint to a model that can run, of a family that has a network here."""

import logging
from collections.abc import Container, Mapping
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
from outdraft.models.checkpoints.quantization import check_unquantised, log_purpose
from outdraft.models.checkpoints.reader import Checkpoint, read_stored
from outdraft.models.checkpoints.slots import (
    Slot,
    check_quantization,
    check_slots,
    describe,
    mapped_tensors,
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
        checkpoint = open_checkpoint(path, config, model.checkpoint_slots())
        load_weights(model, checkpoint, quantization)
    return model.eval()


def _fill_randomly(model: CausalLM) -> None:
    """Fill with the same numbers every time, over any number of ranks; the checkpoint's own dtype
    can hold them."""
    own_dtype: torch.dtype = getattr(torch, model.config.torch_dtype or "float32")
    generator = torch.Generator().manual_seed(0)
    for slot in model.checkpoint_slots().values():
        values = torch.empty(slot.shape).uniform_(-1e-3, 1e-3, generator=generator)
        slot.to.copy_(slot.part_of(values).to(own_dtype))


def open_checkpoint(path: Path, config: ModelConfig, wanted: Container[str]) -> Checkpoint:
    """The tensors of a checkpoint.

    Args:
        wanted: the names of a model's slots.

    Raises:
        ConfigError: a file is missing or damaged, or tensors of quantised weights do not fit each
            other.
    """
    if is_gguf(path):
        return Checkpoint({}, gguf_weights(path), release=open_gguf(path).release)
    places, quantization = tensor_places(weight_files(path)), config.quantization
    if config.mtp_prefix is not None:
        places = {name: p for name, p in places.items() if not name.startswith(config.mtp_prefix)}
    if config.tie_word_embeddings:  # some checkpoints store the tied head again
        places.pop(HEAD_NAME, None)
    if quantization is None:
        return Checkpoint(places, {})
    log_purpose(quantization)
    stored, rest = read_stored(quantization, places, wanted)
    return Checkpoint(rest, stored)


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
        check_quantization(quantization, (one for one in stored.values() if one.tile is not None))
        stored = {name: replace(one, tile=None, reason=_GPU) for name, one in stored.items()}
    check_slots(model.checkpoint_slots(), places, stored)
    kept: list[tuple[str, str]] = []
    dequantised: list[tuple[str, str]] = []
    table: Slot | None = None
    for part, slots in model.parts():
        products = stored_products(model, part, slots, stored)
        coded: dict[Linear, StoredParameter] = {}
        for linear, product in products.items():
            if product.tile is None:
                weights = [one for one in product.weights if not one.is_plain]
                dequantised += [(one.label, one.reason) for one in weights]
            else:
                coded[linear] = product
                kept += [(one.label, str(product.tile)) for one in product.weights]
                check_quantization(quantization, product.weights)
        tensors = mapped_tensors(slots, places)
        borrowed: dict[Linear, list[Tensor]] = {}
        if model.decoder.rotary.order_C is None:
            borrowed = {linear: _borrowed(linear, slots, tensors) for linear in linears_of(part)}
        if EMBEDDING_NAME in slots and keeps_blocks(stored.get(EMBEDDING_NAME)):
            table = slots.pop(EMBEDDING_NAME)
        for name, slot in slots.items():
            if name in tensors:
                slot.to.copy_(tensors.pop(name))
            elif name in stored and not any(linear.owns(slot.to) for linear in coded):
                slot.to.copy_(slot.part_of(stored[name].rounded(slot.to.dtype)))
                if not (stored[name].is_plain or any(one.owns(slot.to) for one in products)):
                    dequantised.append((stored[name].label, "it is read row by row"))
        del slots  # so that a plain weight is gone when it is packed
        model.decoder.arrange(part)
        for linear in linears_of(part):
            if linear in coded:
                linear.pack_codes(model.kernels, coded[linear].coded(), model.dtype)
            else:
                linear.pack(model.kernels, quantization, borrowed.pop(linear, ()))
        checkpoint.release()
    if table is not None:
        _keep_table(model, stored[EMBEDDING_NAME], table)
        checkpoint.release()
    for line in describe(kept, dequantised):
        _logger.info("%s", line)


def keeps_blocks(weight: StoredWeight | None) -> bool:
    """Is true if a weight stays in the blocks of a GGUF file, also as an embedding."""
    return weight is not None and weight.tile is not None and weight.tile.is_blocks


def _keep_table(model: CausalLM, weight: StoredWeight, slot: Slot) -> None:
    """Keep the codes of the embedding; a tied head has them already."""
    head = model.lm_head.product
    if model.config.tie_word_embeddings and head is not None:
        model.embed_tokens.take(head, is_shared=True)
        return
    coded = StoredParameter([[weight.part(*slot.indices)]]).coded()
    product = model.kernels.pack_codes(coded, None, model.dtype)
    model.embed_tokens.take(product, is_shared=False)


def stored_products(
    model: CausalLM,
    part: nn.Module,
    slots: Mapping[str, Slot],
    stored: Mapping[str, StoredWeight],
) -> dict[Linear, StoredParameter]:
    """The weights of each product of a part of which the checkpoint quantised some."""
    found: dict[Linear, StoredParameter] = {}
    for linear in linears_of(part):
        names = [name for name, slot in slots.items() if linear.owns(slot.to)]
        if not names and linear is model.lm_head:  # a tied one, which reads what the table is of
            names = [EMBEDDING_NAME]
        is_permuted = model.decoder.permutes(part, linear)
        product = stored_product(names, stored, slots, is_permuted=is_permuted)
        if product is not None:
            found[linear] = product
    return found


def _borrowed(
    linear: Linear, slots: Mapping[str, Slot], tensors: dict[str, Tensor]
) -> list[Tensor]:
    """Take the rows of a weight from `tensors`; none if they have to be converted, or are not all
    there."""
    names = [name for name, slot in slots.items() if linear.owns(slot.to)]
    if any(name not in tensors for name in names):
        return []
    kept = [(slots[name].to.dtype, slots[name].to.device) for name in names]
    if kept != [(tensors[name].dtype, tensors[name].device) for name in names]:
        return []
    return [tensors.pop(name) for name in names]
