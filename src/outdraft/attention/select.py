"""Which attention runs on which device."""

from importlib.util import find_spec

import torch

from outdraft.attention.base import AttentionBackend
from outdraft.attention.cpu import CpuAttention
from outdraft.attention.reference import ReferenceAttention
from outdraft.core.errors import ConfigError, did_you_mean

_TRITON = "triton"  # an extra: imported for a GPU only
_NAMES = (CpuAttention.name, ReferenceAttention.name, _TRITON)


def attention_backend(name: str | None, device: torch.device) -> AttentionBackend:
    """A new backend for models on `device`; None for the fastest one there.

    Raises:
        ConfigError: an unknown name, or a backend that cannot run on the device.
    """
    name = _fastest(device) if name is None else name
    if name not in _NAMES:
        raise ConfigError(f"unknown attention backend {name!r}: {did_you_mean(name, _NAMES)}")
    if name == ReferenceAttention.name:
        return ReferenceAttention(in_order=device.type == "cpu")
    if name == _TRITON:
        return _triton(device)
    if device.type != "cpu":
        raise ConfigError(f"the cpu attention backend cannot run on {device}: use 'reference'")
    return CpuAttention(num_threads=torch.get_num_threads())


def _fastest(device: torch.device) -> str:
    if device.type == "cpu":
        return CpuAttention.name
    return _TRITON if device.type == "cuda" and _has_triton() else ReferenceAttention.name


def _has_triton() -> bool:
    return find_spec(_TRITON) is not None


def _triton(device: torch.device) -> AttentionBackend:
    if device.type != "cuda":
        raise ConfigError(f"the triton attention backend runs on a GPU, not on {device}")
    if not _has_triton():
        raise ConfigError(
            "the triton attention backend needs the package triton: pip install 'outdraft[triton]'"
        )
    from outdraft.attention.triton import TritonAttention

    return TritonAttention()
