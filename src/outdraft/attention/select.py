"""Which attention runs on which device."""

import torch

from outdraft.attention.base import AttentionBackend
from outdraft.attention.cpu import CpuAttention
from outdraft.attention.reference import ReferenceAttention
from outdraft.core.errors import ConfigError, did_you_mean

_NAMES = (CpuAttention.name, ReferenceAttention.name)


def attention_backend(name: str | None, device: torch.device) -> AttentionBackend:
    """A new backend for models on `device`; None for the fastest one there.

    Raises:
        ConfigError: an unknown name, or a backend that cannot run on the device.
    """
    if name is None:
        name = CpuAttention.name if device.type == "cpu" else ReferenceAttention.name
    if name not in _NAMES:
        raise ConfigError(f"unknown attention backend {name!r}: {did_you_mean(name, _NAMES)}")
    if name == ReferenceAttention.name:
        return ReferenceAttention()
    if device.type != "cpu":
        raise ConfigError(f"the cpu attention backend cannot run on {device}: use 'reference'")
    return CpuAttention(num_threads=torch.get_num_threads())
