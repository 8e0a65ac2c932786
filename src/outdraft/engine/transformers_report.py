"""What the weights of a checkpoint will be kept as that the transformers library computes."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from outdraft.models.checkpoints.deferred import DeferredTensor
from outdraft.models.checkpoints.stored import StoredParameter
from outdraft.models.choose import transformers_loader
from outdraft.models.modules import dtype_name

_OUTSIDE = "read by the library's code"

DEQUANTISED = "dequantised"
Kept = tuple[str, str, int]  # a weight's product, what it is kept as, and its bytes


def kept_weights(path: Path, dtype: torch.dtype, *, has_tiles: bool) -> Iterator[Kept]:
    """Those of a checkpoint.

    Args:
        dtype: of the network.
        has_tiles: whether the kernels keep codes as they are, and bfloat16 numbers in two bytes.

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
    if stays and stored.has_tiles:
        return f"{first.tile}, codes and scales as stored ({first.label})", stored.coded_bytes
    num_numbers = torch.Size(stored.shape).numel()
    is_short = has_tiles and (not first.is_plain or first.label == "BF16")
    kept, size = ("bfloat16", 2) if is_short else (dtype_name(dtype), dtype.itemsize)
    if first.is_plain:
        return kept, num_numbers * size
    why = first.reason or "no product of this network can read its codes"
    return f"{kept}, {DEQUANTISED} ({first.label}): {why}", num_numbers * size
