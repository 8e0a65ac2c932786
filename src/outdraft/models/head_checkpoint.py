"""The files of draft heads: small networks that read the target's last hidden state.

Heads belong to one target: their vocabulary and the width of its states must agree.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from outdraft.core.errors import ConfigError
from outdraft.models.layers.linear import Linear
from outdraft.models.llama import CausalLM


def read_tensor(file: Path, name: str) -> Tensor:
    """One tensor of a safetensors file."""
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name)


def head_count(raw: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """The positive number under the first of these keys that config.json has.

    Raises:
        ConfigError: there is none, and no default, or it is something else.
    """
    key = next((key for key in keys if raw.get(key) is not None), None)
    if key is None:
        if default is None:
            raise ConfigError(f"config.json: {keys[0]} is missing")
        return default
    value = raw[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {key} must be a positive whole number, got {value!r}")
    return value


def check_target(
    raw: Mapping[str, Any], target: CausalLM, *, hidden_key: str, vocab_key: str = "vocab_size"
) -> None:
    """Raise ConfigError if config.json names another hidden or vocabulary size than the target's.

    A key that is missing is no contradiction: the shapes of the tensors will tell.
    """
    sizes = {hidden_key: target.config.hidden_size, vocab_key: target.config.vocab_size}
    for key, expected in sizes.items():
        if raw.get(key) is not None and raw[key] != expected:
            raise ConfigError(
                f"the draft heads are for another model: config.json has {key}={raw[key]!r}, "
                f"the target {expected}"
            )


def linear_bytes(linear: Linear) -> int:
    """What one product reads: its weight as it lies in memory, and its bias."""
    weight = linear.packed_bytes if linear.weight is None else linear.weight.nbytes
    return weight + (0 if linear.bias is None else linear.bias.nbytes)
