"""Tables of kernels for tests."""

import functools

import pytest
import torch
from torch import Tensor

from outdraft.kernels.choose import choose_kernels
from outdraft.kernels.data.noise import NoiseKeys
from outdraft.kernels.native.attention import NativeAttention
from outdraft.kernels.native.library import (
    Library,
    open_library,
    shared_team,
    usable_instruction_sets,
)
from outdraft.kernels.native.table import native_kernels
from outdraft.kernels.ops import Kernels

# A test with this mark has a parameter `name` and runs with each library of this machine.
each_library = pytest.mark.parametrize("name", usable_instruction_sets())


def library(name: str | None = None) -> Library:
    """The library of an instruction set; None: the fastest one."""
    found = open_library(name)
    assert found is not None, "run `make lib` first"
    return found


def cpu_kernels(num_threads: int = 1, name: str | None = None) -> Kernels:
    """The table, or the operation, of a library."""
    return native_kernels(library(name), num_threads)


@functools.cache
def native_attention(num_threads: int = 1, name: str | None = None) -> NativeAttention:
    """The table, or the operation, of a library."""
    return NativeAttention(shared_team(library(name), num_threads))


@functools.cache
def kernels_for(dtype: torch.dtype) -> Kernels:
    """What a model of this dtype gets on the CPU; of float64 these are the reference."""
    return choose_kernels("auto", torch.device("cpu"), dtype)


def draw_tokens(
    kernels: Kernels, logits_RV: Tensor, keys: NoiseKeys, is_greedy_R: Tensor
) -> tuple[Tensor, Tensor]:
    """int64 [R]: samples, or the argmax of greedy rows; float32 [R, V]: their probabilities."""
    noisy_RV = logits_RV + kernels.gumbel(keys, logits_RV.shape[1])
    ids_R = torch.where(is_greedy_R, logits_RV.argmax(1), noisy_RV.argmax(1))
    return ids_R, torch.softmax(logits_RV, 1, dtype=torch.float32)
