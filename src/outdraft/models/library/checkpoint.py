"""A checkpoint as the transformers library reads it: as if it were plain and whole, and no tensor
before the library asks for it.
"""

import logging
import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outdraft.core.errors import ConfigError
from outdraft.models.checkpoints.deferred import DeferredTensor
from outdraft.models.checkpoints.files import (
    StoredTensors,
    plain_weights,
    tensor_places,
    weight_files,
)
from outdraft.models.checkpoints.quantization import Quantization, log_purpose
from outdraft.models.checkpoints.reader import Checkpoint, read_stacks, read_stored
from outdraft.models.checkpoints.slots import describe
from outdraft.models.checkpoints.stored import StoredParameter, StoredWeight

# What has no meaning without scales.
_CODES = {"F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "I32", "I8", "U8"}
_NO_PRODUCT = "no product of this network can read its codes"
_NO_CPU = "tiles are for CPUs"
_logger = logging.getLogger(__name__)


def presented(
    checkpoint: Checkpoint, dtype: torch.dtype, *, keeps_codes: bool, is_cut: bool
) -> dict[str, "PresentedTensor"]:
    """Present a checkpoint to the library's loader.

    Args:
        dtype: of the network.
        keeps_codes: weights whose codes fit tiles are deferred tensors.
        is_cut: so is every weight that could be cut, until it is. Others are dequantised.
    """
    found = _small(checkpoint)
    for name, parameter in _parameters(checkpoint, dtype).items():
        defers = (keeps_codes and parameter.has_tiles) or (is_cut and not parameter.is_stack)
        first = parameter.weights[0]
        # The library converts plain numbers by itself, some of them to another dtype.
        read = first.numbers if first.is_plain else parameter.numbers
        found[name] = PresentedTensor(partial(DeferredTensor, parameter) if defers else read)
    return found


def unread(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, "PresentedTensor"]:
    """Present tensors that stay unread, except small ones and stacks of plain numbers: those have
    no numbers."""
    found = _small(checkpoint)
    for name, weight in checkpoint.weights.items():
        if len(weight.shape) > 2:
            nothing = torch.zeros((), dtype=dtype)
            found[name] = PresentedTensor(partial(nothing.expand, weight.shape))
    for name, parameter in _parameters(checkpoint, dtype).items():
        found[name] = PresentedTensor(partial(DeferredTensor, parameter))
    return found


def log_summary(
    checkpoint: Checkpoint,
    kept: Iterable[StoredWeight],
    dequantised: Iterable[StoredWeight],
    *,
    has_tiles: bool,
) -> None:
    """Log the fate of the quantised weights.

    Args:
        kept: those that are codes, or of which parts are.
        dequantised: others that were deferred, or parts of such.
        has_tiles: the device keeps codes.
    """
    otherwise = _NO_PRODUCT if has_tiles else _NO_CPU
    of_kept = {id(weight.whole or weight): weight for weight in kept}
    reasons = {id(weight.whole or weight): weight.reason for weight in dequantised}
    weights = [
        weight
        for parameter in _parameters(checkpoint, torch.float32).values()
        for weight in parameter.weights
        if id(weight) not in of_kept and not weight.is_plain
    ]
    tiles = [(weight.label, str(weight.tile)) for weight in of_kept.values()]
    lost = [(one.label, reasons.get(id(one)) or one.reason or otherwise) for one in weights]
    for line in describe(tiles, lost):
        _logger.info("%s", line)


class PresentedTensor:
    """Stands for a slice of a safetensors file, of which the library takes all."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def __getitem__(self, place: Any) -> Tensor:
        assert place is Ellipsis, "the library asks for a part"
        return self._read()


def open_quantised(
    path: Path,
    quantization: Quantization,
    wanted: Container[str],
    left_out: Sequence[str] = (),
) -> Checkpoint:
    """The tensors of a checkpoint directory; none of a weight is read.

    Args:
        wanted: the names that the network has.
        left_out: patterns that the names of unwanted tensors match.

    Raises:
        ConfigError: a file is missing or damaged, or tensors of quantised weights do not fit each
            other.
    """
    log_purpose(quantization)
    found = tensor_places(
        weight_files(path), lambda name: None if matches(name, left_out) else name
    )
    stacks, places = read_stacks(quantization, found)
    stored, rest = read_stored(quantization, places, wanted)
    tensors = StoredTensors(rest)
    if lost := sorted(name for name in rest if tensors.dtype(name) in _CODES):
        raise ConfigError(
            f"tensor {lost[0]!r} has dtype {tensors.dtype(lost[0])}, and its quantization_config "
            "does not say what it stands for"
        )
    return Checkpoint(stored | plain_weights(rest), stacks)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Is true if one of the regular expressions is found in the name of a tensor."""
    return any(re.search(pattern, name) for pattern in patterns)


def _parameters(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, StoredParameter]:
    """The weights that are products."""
    found = {
        name: StoredParameter([[weight]], dtype=dtype)
        for name, weight in checkpoint.weights.items()
        if len(weight.shape) == 2
    }
    return found | {name: replace(one, dtype=dtype) for name, one in checkpoint.stacks.items()}


def _small(checkpoint: Checkpoint) -> dict[str, PresentedTensor]:
    """The weights that are no products, such as norms."""
    return {
        name: PresentedTensor(weight.numbers)
        for name, weight in checkpoint.weights.items()
        if len(weight.shape) != 2
    }
