"""A quantised checkpoint as the transformers library reads it: as if it were plain, and no tensor
before the library asks for it.
"""

import logging
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outdraft.core.errors import ConfigError
from outdraft.models.loader import Place, read_tensor, tell_purpose, tensor_places, weight_files
from outdraft.models.quantized.config import Quantization
from outdraft.models.quantized.reader import read_stacks, read_stored
from outdraft.models.quantized.stored import StoredStack, StoredWeight
from outdraft.models.quantized.tensors import StoredTensors

# What has no meaning without scales.
_CODES = {"F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "I32", "I8", "U8"}
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QuantisedCheckpoint:
    """Tensors by their names in the files, those of quantised weights as one.

    Attributes:
        places: of plain tensors.
        weights: the others.
    """

    places: dict[str, Place]
    weights: dict[str, StoredWeight | StoredStack]

    def presented(self, dtype: torch.dtype) -> dict[str, "PresentedTensor"]:
        """For the library's loader. `dtype`: of the network."""
        plain = {
            name: PresentedTensor(partial(read_tensor, place))
            for name, place in self.places.items()
        }
        return plain | {
            name: PresentedTensor(partial(_numbers, weight, dtype))
            for name, weight in self.weights.items()
        }

    def summary(self) -> list[str]:
        """What becomes of the quantised weights, for people."""
        weights = [
            weight
            for one in self.weights.values()
            for weight in (one.weights if isinstance(one, StoredStack) else [one])
        ]
        counts = Counter((weight.label, weight.reason or _LIBRARYS) for weight in weights)
        return [
            f"{count} weights ({label}) are dequantised: {reason}"
            for (label, reason), count in counts.items()
        ]


_LIBRARYS = "the transformers library computes this family"


class PresentedTensor:
    """In place of a slice of a safetensors file, of which the library takes all."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def __getitem__(self, place: Any) -> Tensor:
        assert place is Ellipsis, "the library asks for a part"
        return self._read()


def open_quantised(
    path: Path, quantization: Quantization, wanted: Container[str]
) -> QuantisedCheckpoint:
    """The tensors of a checkpoint directory; none of a weight is read.

    Args:
        wanted: the names that the network has.

    Raises:
        ConfigError: a file is missing or damaged, or tensors of quantised weights do not fit each
            other.
    """
    tell_purpose(quantization)
    stacks, places = read_stacks(quantization, tensor_places(weight_files(path)))
    stored, rest = read_stored(quantization, places, wanted)
    tensors = StoredTensors(rest)
    if lost := sorted(name for name in rest if tensors.dtype(name) in _CODES):
        raise ConfigError(
            f"tensor {lost[0]!r} has dtype {tensors.dtype(lost[0])}, and its quantization_config "
            "does not say what it stands for"
        )
    return QuantisedCheckpoint(rest, {**stored, **stacks})


def _numbers(weight: StoredWeight | StoredStack, dtype: torch.dtype) -> Tensor:
    """Rounded to bfloat16 where the network has float32, as CausalLM does."""
    kept = torch.bfloat16 if dtype is torch.float32 else dtype
    if isinstance(weight, StoredStack):
        return weight.numbers(kept)
    return weight.numbers().to(kept)
