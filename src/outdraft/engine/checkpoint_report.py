"""What the weights of a checkpoint will be kept as, and how large; they are not read for it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open

from outdraft.config.engine import EngineConfig
from outdraft.core.weight_format import WeightFormat
from outdraft.engine.loading import choose_device, choose_dtype
from outdraft.engine.transformers_report import rows_of
from outdraft.kernels.choose import choose_kernels
from outdraft.models.choose import checkpoint_dtype, uses_transformers
from outdraft.models.config import ModelConfig, read_config
from outdraft.models.layers.linear import linears_of
from outdraft.models.llama import EMBEDDING_NAME, CausalLM
from outdraft.models.loader import (
    Checkpoint,
    check_slots,
    open_checkpoint,
    placings_of,
    resolve_model_path,
)
from outdraft.models.quantized.config import read_quantization
from outdraft.models.quantized.placing import Placing
from outdraft.models.slots import Slot

_GIB, _MIB = 2**30, 2**20


@dataclass(slots=True)
class _Row:
    """Weights of one name that are kept in one way."""

    count: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Report:
    """
    Attributes:
        dtype: of the model.
        has_tiles: whether the kernels keep codes as they are, and bfloat16 numbers in two bytes.
        rows: by the name of the product and how it is kept.
    """

    checkpoint: Checkpoint
    dtype: torch.dtype
    has_tiles: bool
    rows: dict[tuple[str, str], _Row] = field(default_factory=lambda: defaultdict(_Row))

    def add(
        self, product: str, names: Sequence[str], slots: Mapping[str, Slot], placing: Placing
    ) -> None:
        """Count a product of the weights of those names."""
        kept_as, num_bytes = "", 0
        for name in names:
            num_numbers = slots[name].to.numel()
            if placing.tile is not None and self.has_tiles:
                stored, _ = placing.stored[name]
                num_inputs = slots[name].to.shape[1]
                num_scales = num_numbers // num_inputs
                num_scales *= -(-num_inputs // (placing.tile.group_inputs or num_inputs))
                of_scales = stored.scale_bytes * (2 if placing.tile.has_zero else 1)
                bits = 8 if placing.tile.is_int8 else 4
                num_bytes += num_numbers * bits // 8 + num_scales * of_scales
                kept_as = f"{placing.tile}, codes and scales as stored ({stored.label})"
                continue
            kept, size = self._numbers(name, is_rounded=bool(placing.reason))
            num_bytes += num_numbers * size
            why = f", dequantised: {placing.reason}" if placing.reason else ""
            if placing.tile is not None:
                why = f", dequantised: these kernels have no tiles of {placing.tile}"
            kept_as = kept + why
        row = self.rows[product, kept_as]
        row.count += 1
        row.num_bytes += num_bytes

    def _numbers(self, name: str, *, is_rounded: bool) -> tuple[str, int]:
        """What plain numbers of a product are kept as, and bytes of one."""
        if self.has_tiles and (is_rounded or self._stored_dtype(name) == "BF16"):
            return "bfloat16", 2
        return str(self.dtype).removeprefix("torch."), self.dtype.itemsize

    def _stored_dtype(self, name: str) -> str:
        if name in self.checkpoint.stored:
            return self.checkpoint.stored[name].label.rpartition(" ")[2]
        file, stored = self.checkpoint.places[name]
        with safe_open(file, framework="pt") as tensors:
            return str(tensors.get_slice(stored).get_dtype())


def report(config: EngineConfig) -> dict[str, str]:
    """For each kind of weight what it is kept as, and how many bytes that takes; for people.

    Raises:
        ConfigError: as load_model; the weights themselves are not read.
    """
    path = resolve_model_path(config.model, config.revision)
    if uses_transformers(path, config.model_impl):
        return _report_of_library(config, path)
    shape, device = ModelConfig.from_directory(path), choose_device(config.device)
    dtype = choose_dtype(config.dtype, shape.torch_dtype or "float32", device, config.kernels)
    kernels = choose_kernels(config.kernels, device, dtype)
    plain = kernels.pack_linear(torch.zeros(1, 1, dtype=dtype, device=device), None).format
    model = CausalLM(shape, kernels, dtype)  # its memory is not touched
    checkpoint = open_checkpoint(path, shape, model.checkpoint_slots())
    check_slots(model.checkpoint_slots(), checkpoint.places, checkpoint.stored)
    found = _Report(checkpoint, dtype, has_tiles=plain is not WeightFormat.PLAIN)
    for part, slots in model.parts():
        placings = placings_of(model, part, slots, checkpoint.stored)
        products = {module: name for name, module in part.named_modules()}
        for linear in linears_of(part):
            names = [name for name, slot in slots.items() if linear.owns(slot.to)]
            names = names or [EMBEDDING_NAME]  # a tied head
            found.add(
                products[linear] or "lm_head", names, slots, placings.get(linear, Placing({}, None))
            )
    method = shape.quantization.method if shape.quantization else "none"
    rows = {"architecture": shape.architecture, "quantisation": method}
    for (product, kept_as), row in found.rows.items():
        number = "" if product not in rows else f" ({len(rows)})"
        rows[product + number] = f"{row.count} x {kept_as}: {_size(row.num_bytes)}"
    table = model.embed_tokens.weight
    rows["embedding"] = f"{str(dtype).removeprefix('torch.')}: {_size(table.nbytes)}"
    total = sum(row.num_bytes for row in found.rows.values()) + table.nbytes
    rows["all weights"] = f"{_size(total)}, to run in {str(dtype).removeprefix('torch.')}"
    return rows


def _report_of_library(config: EngineConfig, path: Path) -> dict[str, str]:
    """The same where the transformers library computes the network."""
    raw, device = read_config(path), choose_device(config.device)
    dtype = choose_dtype(config.dtype, checkpoint_dtype(path), device, config.kernels)
    kernels = choose_kernels(config.kernels, device, dtype)
    plain = kernels.pack_linear(torch.zeros(1, 1, dtype=dtype, device=device), None).format
    found = rows_of(path, dtype, has_tiles=plain is not WeightFormat.PLAIN)
    quantization = read_quantization(raw)
    rows = {
        "architecture": ", ".join(raw.get("architectures") or ["unknown"]),
        "computed by": "the transformers library, with this engine's attention and products",
        "quantisation": quantization.method if quantization else "none",
    }
    for label, (count, num_bytes) in found.items():
        product, _, kept_as = label.partition(": ")
        number = "" if product not in rows else f" ({len(rows)})"
        rows[product + number] = f"{count} x {kept_as}: {_size(num_bytes)}"
    total = sum(num_bytes for _, num_bytes in found.values())
    rows["all weights"] = f"{_size(total)}, to run in {str(dtype).removeprefix('torch.')}"
    return rows


def _size(num_bytes: int) -> str:
    if num_bytes >= _GIB:
        return f"{num_bytes / _GIB:.2f} GiB"
    return f"{num_bytes / _MIB:.2f} MiB"
