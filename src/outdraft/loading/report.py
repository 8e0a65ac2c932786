"""Reports formats and sizes in which a checkpoint's weights will be kept, without reading them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from outdraft.config.engine import EngineConfig
from outdraft.core.weights import WeightFormat
from outdraft.kernels.choose import choose_kernels
from outdraft.loading.models import choose_device, choose_dtype
from outdraft.models.checkpoints.config_json import read_config
from outdraft.models.checkpoints.files import resolve_model_path
from outdraft.models.checkpoints.quantization import read_quantization
from outdraft.models.checkpoints.reader import Checkpoint
from outdraft.models.checkpoints.slots import check_slots, rows_of, stored_product
from outdraft.models.checkpoints.stored import StoredParameter
from outdraft.models.choose import checkpoint_dtype, transformers_loader, uses_transformers
from outdraft.models.decoder.causal_lm import EMBEDDING_NAME, CausalLM
from outdraft.models.decoder.config import ModelConfig
from outdraft.models.decoder.loader import keeps_blocks, open_checkpoint, stored_products
from outdraft.models.library.checkpoint import DeferredTensor
from outdraft.models.modules import dtype_name

_OUTSIDE = "read by the library's code"

DEQUANTISED = "dequantised"
Kept = tuple[str, str, int]  # a weight's product, the format it is kept in, and its bytes


def kept_weights(path: Path, dtype: torch.dtype, *, has_tiles: bool) -> Iterator[Kept]:
    """List the weights of a checkpoint that the transformers library computes.

    Args:
        dtype: of the network.
        has_tiles: the kernels keep codes as they are, and bfloat16 numbers in two bytes.

    Raises:
        ConfigError: the checkpoint cannot be read, or lacks tensors; weights are not read.
    """
    loader = transformers_loader(path)
    for name, part in loader.unread_model(path, dtype).named_modules():
        for key, weight in part.named_parameters(recurse=False):
            if weight.dim() < 2:
                continue
            product = key if key != "weight" else name.rpartition(".")[2]
            kept, num_bytes = f"{dtype_name(dtype)}, {_OUTSIDE}", weight.nbytes
            stays = False
            if isinstance(weight, DeferredTensor):
                stays = has_tiles and loader.keeps_codes(part, key, weight.stored)
                if isinstance(part, nn.Linear) or weight.stored.is_stack or stays:
                    kept, num_bytes = _kept(weight.stored, dtype, has_tiles, stays)
            if isinstance(part, nn.Embedding) and not stays:
                kept = dtype_name(dtype)
            yield product, kept, num_bytes


def _kept(
    stored: StoredParameter, dtype: torch.dtype, has_tiles: bool, stays: bool
) -> tuple[str, int]:
    first = stored.rows_X[0][0]
    if stays and stored.tile is not None:
        return f"{first.tile}, codes and scales as stored ({first.label})", stored.coded_bytes
    is_short = has_tiles and (not first.is_plain or first.label == "BF16")
    kept, size = ("bfloat16", 2) if is_short else (dtype_name(dtype), dtype.itemsize)
    if not first.is_plain:
        why = first.reason or "no product of this network can read its codes"
        kept += f", {DEQUANTISED} ({first.label}): {why}"
    return kept, torch.Size(stored.shape).numel() * size


def _kept_formats(
    product: StoredParameter, dtype: torch.dtype, has_tiles: bool
) -> Iterator[tuple[str, int]]:
    """Yield the format and bytes of each of a product's weights; the arguments are those of
    `kept_weights`."""
    tile = product.tile
    for one in product.weights:
        if tile is not None and has_tiles:
            own = one.tile if tile.is_blocks else tile
            kept_as = f"{own}, codes and scales as stored ({one.label})"
            yield kept_as, replace(one, tile=own).coded_bytes
            continue
        kept, size = dtype_name(dtype), dtype.itemsize
        if has_tiles and (one.reason or one.dtype == "BF16"):
            kept, size = "bfloat16", 2
        why = f", {DEQUANTISED}: {one.reason}" if one.reason else ""
        if tile is not None:
            why = f", {DEQUANTISED}: these kernels have no tiles of {tile}"
        yield kept + why, torch.Size(one.shape).numel() * size


def report(config: EngineConfig) -> dict[str, str]:
    """Describe each kind of weight: its format and its bytes; for people.

    Raises:
        ConfigError: the checkpoint cannot be read, or lacks tensors.
    """
    path = resolve_model_path(config.model, config.revision)
    raw, device = read_config(path), choose_device(config.device)
    dtype = choose_dtype(config.dtype, checkpoint_dtype(path), device, config.kernels)
    kernels = choose_kernels(config.kernels, device, dtype)
    plain = kernels.pack_linear(torch.zeros(1, 1, dtype=dtype, device=device), None, None).format
    has_tiles = plain is not WeightFormat.PLAIN
    lines = {"architecture": ", ".join(raw.get("architectures") or ["unknown"])}
    if uses_transformers(path, config.model_impl):
        lines["computed by"] = "the transformers library, with this engine's attention and products"
        weights = kept_weights(path, dtype, has_tiles=has_tiles)
    else:
        shape = ModelConfig.from_directory(path)
        model = CausalLM(shape, kernels, dtype)  # its memory is not touched
        weights = _own_weights(path, model, has_tiles)
    rows: dict[tuple[str, str], list[int]] = {}  # bytes of each weight
    for product, kept_as, num_bytes in weights:
        rows.setdefault((product, kept_as), []).append(num_bytes)
    quantization = read_quantization(raw)
    lines["quantisation"] = quantization.method if quantization else "none"
    for (product, kept_as), sizes in rows.items():
        place = "" if product not in lines else f" ({len(lines)})"
        lines[product + place] = f"{len(sizes)} x {kept_as}: {_size(sum(sizes))}"
    lost = sum(len(sizes) for (_, kept_as), sizes in rows.items() if DEQUANTISED in kept_as)
    lines["not kept as stored"] = f"{lost} weights" if lost else "nothing"
    lines["all weights"] = f"{_size(sum(map(sum, rows.values())))}, to run in {dtype_name(dtype)}"
    return lines


def _own_weights(path: Path, model: CausalLM, has_tiles: bool) -> Iterator[Kept]:
    """List the weights of a network that this engine computes."""
    checkpoint = open_checkpoint(path, model.config, model.checkpoint_slots())
    check_slots(model.checkpoint_slots(), checkpoint.weights)
    for part, slots in model.parts():
        products = {module: name for name, module in part.named_modules()}
        for linear, _, product in stored_products(part, slots, checkpoint.weights):
            for kept in _kept_formats(product, model.dtype, has_tiles):
                yield products[linear] or "lm_head", *kept
    yield from _table(checkpoint, model, has_tiles)


def _table(checkpoint: Checkpoint, model: CausalLM, has_tiles: bool) -> Iterator[Kept]:
    """List the embedding, unless the head uses its weights."""
    stored = checkpoint.weights[EMBEDDING_NAME]
    slot = rows_of(model.vocabulary, model.embed_weight)
    if keeps_blocks(stored) and has_tiles:
        if not model.config.tie_word_embeddings:
            product = stored_product([stored], [slot])
            for kept in _kept_formats(product, model.dtype, has_tiles):
                yield "embedding", *kept
        return
    why = f", {DEQUANTISED}: it is read row by row" if not stored.is_plain else ""
    yield "embedding", f"{dtype_name(model.dtype)}{why}", slot.to.nbytes


def _size(num_bytes: int) -> str:
    unit, size = ("GiB", 2**30) if num_bytes >= 2**30 else ("MiB", 2**20)
    return f"{num_bytes / size:.2f} {unit}"
