"""The quantised weights among the tensors of a checkpoint.

Any network can read them: a weight has the name of the module followed by ".weight".
"""

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

from outdraft.core.errors import ConfigError
from outdraft.models.checkpoints.files import Place, StoredTensors, plain_weights
from outdraft.models.checkpoints.floats import FLOAT8, float_stacks, float_weight, mxfp4_stacks
from outdraft.models.checkpoints.integers import integer_weight
from outdraft.models.checkpoints.quantization import (
    Quantization,
    Storage,
    WeightScheme,
    log_purpose,
)
from outdraft.models.checkpoints.stored import StoredParameter, StoredWeight

_OF_WEIGHT = (
    *("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point"),
    *("weight_shape", "weight_g_idx", "qweight", "qzeros", "scales", "g_idx"),
)
# What belongs to activations and caches, which are not quantised here.
_OF_OTHERS = re.compile(
    r"\.(input_scale|input_zero_point|input_global_scale|output_scale|output_zero_point"
    r"|activation_scale|input_scale_ub|(kv|[qkv])_scale|[qkv]_zero_point)$"
)
_MARKS = {
    Storage.PACKED: "weight_packed",
    Storage.INTEGERS: "weight_scale",
    Storage.FLOATS: "weight_scale",
    Storage.GPTQ: "qweight",
    Storage.AWQ: "qweight",
    Storage.FP8: "weight",
}
_FLOATS = (Storage.FP8, Storage.FLOATS)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a checkpoint, by the names of a network's parameters.

    Attributes:
        stacks: quantised parameters of several experts.
        release: gives memory back that was mapped to read them.
    """

    weights: Mapping[str, StoredWeight]
    stacks: Mapping[str, StoredParameter] = field(default_factory=dict[str, StoredParameter])
    release: Callable[[], None] = lambda: None

    @property
    def has_codes(self) -> bool:
        """Is true if something is quantised."""
        return bool(self.stacks) or not all(one.is_plain for one in self.weights.values())


def read_checkpoint(
    quantization: Quantization | None, places: Mapping[str, Place], wanted: Container[str]
) -> Checkpoint:
    """The tensors at these places; none is read but scales, and those of a few numbers.

    Args:
        quantization: None: all weights are plain.
        places: of each tensor a file, and the name in it.
        wanted: the names that the network has use for.

    Raises:
        ConfigError: tensors are missing, do not fit each other, or have no scheme.
    """
    if quantization is None:
        return Checkpoint(plain_weights(places))
    log_purpose(quantization)
    rest = {name: place for name, place in places.items() if not _OF_OTHERS.search(name)}
    stacks = _read_stacks(quantization, rest)
    tensors, stored = StoredTensors(rest), dict[str, StoredWeight]()
    left = dict(rest)
    for module, scheme in _quantised_modules(quantization, tensors).items():
        read = float_weight if scheme.storage in _FLOATS else integer_weight
        stored[f"{module}.weight"] = read(tensors, module, scheme)
        for part in _OF_WEIGHT:
            left.pop(f"{module}.{part}", None)
        bias = f"{module}.bias"
        is_unread = scheme.storage is Storage.GPTQ and bias not in wanted and bias in tensors
        if is_unread and not tensors.read(bias).any():
            left.pop(bias)  # AutoGPTQ writes one for every weight
    return Checkpoint(stored | plain_weights(left), stacks)


def _read_stacks(
    quantization: Quantization, places: dict[str, Place]
) -> dict[str, StoredParameter]:
    """Quantised parameters of several experts by their names, whose tensors are taken out."""
    tensors, found = StoredTensors(dict(places)), dict[str, StoredParameter]()
    for storage, scheme in {scheme.storage: scheme for _, scheme in quantization.schemes}.items():
        stacks = ()
        if storage is Storage.MXFP4:
            stacks = mxfp4_stacks(tensors)
        elif storage in _FLOATS:
            stacks = float_stacks(tensors, scheme)
        for name, parts, stack in stacks:
            found[name] = stack
            for part in parts:
                del places[part]
    return found


def _quantised_modules(
    quantization: Quantization, tensors: StoredTensors
) -> dict[str, WeightScheme]:
    """The modules that have a scheme and the tensors that it needs."""
    found: dict[str, WeightScheme] = {}
    for name in tensors:
        module, _, part = name.rpartition(".")
        if part not in _MARKS.values():
            continue
        scheme = quantization.scheme_of(module)
        if scheme is None:
            if part != "weight":
                raise ConfigError(
                    f"the checkpoint has {name!r}, but its quantization_config ignores {module}"
                )
        elif part == _MARKS.get(scheme.storage) and (
            scheme.storage is not Storage.FP8 or tensors.dtype(name) == FLOAT8
        ):
            found[module] = scheme
    return found
