"""What the weights of a checkpoint will be kept as, and how large; they are not read for it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open

from outdraft.config.engine import EngineConfig
from outdraft.core.weight_format import WeightFormat
from outdraft.engine.loading import choose_device, choose_dtype
from outdraft.engine.transformers_report import DEQUANTISED, Kept, kept_weights
from outdraft.kernels.choose import choose_kernels
from outdraft.models.choose import checkpoint_dtype, uses_transformers
from outdraft.models.config import ModelConfig, read_config
from outdraft.models.layers.linear import dtype_name, linears_of
from outdraft.models.llama import EMBEDDING_NAME, CausalLM
from outdraft.models.loader import (
    Checkpoint,
    check_slots,
    keeps_blocks,
    open_checkpoint,
    placings_of,
    resolve_model_path,
)
from outdraft.models.quantized.config import read_quantization
from outdraft.models.quantized.placing import Placing, place
from outdraft.models.slots import Slot, rows_of

_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True, slots=True)
class _Report:
    """
    Attributes:
        dtype: of the model.
        has_tiles: whether the kernels keep codes as they are, and bfloat16 numbers in two bytes.
    """

    checkpoint: Checkpoint
    dtype: torch.dtype
    has_tiles: bool

    def kept(
        self, names: Sequence[str], slots: Mapping[str, Slot], placing: Placing
    ) -> Iterator[tuple[str, int]]:
        """What a product keeps each of its weights as, and its bytes."""
        tile = placing.tile if self.has_tiles else None
        for name in names:
            if tile is not None:
                stored, _ = placing.stored[name]
                own = stored.tile if tile.is_blocks else tile
                kept_as = f"{own}, codes and scales as stored ({stored.label})"
                yield kept_as, replace(stored, tile=own).coded_bytes
                continue
            kept, size = self._numbers(name, is_rounded=bool(placing.reason))
            why = f", {DEQUANTISED}: {placing.reason}" if placing.reason else ""
            if placing.tile is not None:
                why = f", {DEQUANTISED}: these kernels have no tiles of {placing.tile}"
            yield kept + why, slots[name].to.numel() * size

    def _numbers(self, name: str, *, is_rounded: bool) -> tuple[str, int]:
        """What plain numbers of a product are kept as, and bytes of one."""
        if self.has_tiles and (is_rounded or self._stored_dtype(name) == "BF16"):
            return "bfloat16", 2
        return dtype_name(self.dtype), self.dtype.itemsize

    def _stored_dtype(self, name: str) -> str:
        if name in self.checkpoint.stored:
            return self.checkpoint.stored[name].label.rpartition(" ")[2]
        file, stored = self.checkpoint.places[name]
        with safe_open(file, framework="pt") as tensors:
            return str(tensors.get_slice(stored).get_dtype())


def report(config: EngineConfig) -> dict[str, str]:
    """For each kind of weight what it is kept as, and how many bytes that takes; for people.

    Raises:
        ConfigError: as load_language_model; the weights themselves are not read.
    """
    path = resolve_model_path(config.model, config.revision)
    raw, device = read_config(path), choose_device(config.device)
    dtype = choose_dtype(config.dtype, checkpoint_dtype(path), device, config.kernels)
    kernels = choose_kernels(config.kernels, device, dtype)
    plain = kernels.pack_linear(torch.zeros(1, 1, dtype=dtype, device=device), None, None).format
    has_tiles = plain is not WeightFormat.PLAIN
    told = {"architecture": ", ".join(raw.get("architectures") or ["unknown"])}
    if uses_transformers(path, config.model_impl):
        told["computed by"] = "the transformers library, with this engine's attention and products"
        weights = kept_weights(path, dtype, has_tiles=has_tiles)
    else:
        shape = ModelConfig.from_directory(path)
        model = CausalLM(shape, kernels, dtype)  # its memory is not touched
        weights = _own_weights(path, model, has_tiles)
    rows: dict[tuple[str, str], list[int]] = {}  # bytes of each weight
    for product, kept_as, num_bytes in weights:
        rows.setdefault((product, kept_as), []).append(num_bytes)
    quantization = read_quantization(raw)
    told["quantisation"] = quantization.method if quantization else "none"
    for (product, kept_as), sizes in rows.items():
        place = "" if product not in told else f" ({len(told)})"
        told[product + place] = f"{len(sizes)} x {kept_as}: {_size(sum(sizes))}"
    lost = sum(len(sizes) for (_, kept_as), sizes in rows.items() if DEQUANTISED in kept_as)
    told["not kept as stored"] = f"{lost} weights" if lost else "nothing"
    told["all weights"] = f"{_size(sum(map(sum, rows.values())))}, to run in {dtype_name(dtype)}"
    return told


def _own_weights(path: Path, model: CausalLM, has_tiles: bool) -> Iterator[Kept]:
    """Those of a network that this engine computes."""
    checkpoint = open_checkpoint(path, model.config, model.checkpoint_slots())
    check_slots(model.checkpoint_slots(), checkpoint.places, checkpoint.stored)
    found = _Report(checkpoint, model.dtype, has_tiles)
    for part, slots in model.parts():
        placings = placings_of(model, part, slots, checkpoint.stored)
        products = {module: name for name, module in part.named_modules()}
        for linear in linears_of(part):
            names = [name for name, slot in slots.items() if linear.owns(slot.to)]
            names = names or [EMBEDDING_NAME]  # a tied head
            placing = placings.get(linear, Placing({}, None))
            for kept in found.kept(names, slots, placing):
                yield products[linear] or "lm_head", *kept
    yield from _table(checkpoint, model, found)


def _table(checkpoint: Checkpoint, model: CausalLM, found: _Report) -> Iterator[Kept]:
    """The embedding, where it is not the head's."""
    stored = checkpoint.stored.get(EMBEDDING_NAME)
    slots = {EMBEDDING_NAME: rows_of(model.vocabulary, model.embed_tokens.weight)}
    if stored is not None and keeps_blocks(stored) and found.has_tiles:
        if not model.config.tie_word_embeddings:
            placing = place((EMBEDDING_NAME,), checkpoint.stored, slots)
            for kept in found.kept((EMBEDDING_NAME,), slots, placing):
                yield "embedding", *kept
        return
    why = f", {DEQUANTISED}: it is read row by row" if stored and not stored.is_plain else ""
    yield "embedding", f"{dtype_name(model.dtype)}{why}", slots[EMBEDDING_NAME].to.nbytes


def _size(num_bytes: int) -> str:
    if num_bytes >= _GIB:
        return f"{num_bytes / _GIB:.2f} GiB"
    return f"{num_bytes / _MIB:.2f} MiB"
