"""Experts of a transformers model over several ranks: each rank has a part of every expert.

A part of an expert's intermediate numbers needs the rows of gate and up that make them, and the
columns of down that read them. What the parts give is summed. Ranks then have equal work whatever
experts the rows go to, and routers are whole on each.

Dimension key: X experts, D hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn

from outdraft.distributed.group import RankGroup
from outdraft.models.checkpoints.deferred import DeferredTensor
from outdraft.models.library.experts import is_interleaved, is_known, is_transposed

_DOWN = "down_proj"
_DIVIDED = "gate_up_proj", "gate_up_proj_bias", _DOWN


def divide_experts(model: nn.Module, group: RankGroup) -> dict[nn.Module, RankGroup]:
    """Keep this rank's part of the experts that the kernels know; whose results are to be summed.

    Experts stay whole on every rank where the ranks do not divide their intermediate numbers, or
    where codes would not stay codes: a part of their numbers takes more memory than all codes.
    """
    if group.size == 1:
        return {}
    return {part: group for part in model.modules() if is_known(part) and _divide(part, group)}


def _divide(module: Any, group: RankGroup) -> bool:
    """Whether it could be done; all ranks find the same."""
    size, names = group.size, [name for name in _DIVIDED if getattr(module, name, None) is not None]
    if module.down_proj.shape[1 if is_transposed(module) else 2] % size:
        return False
    if any(_loses_codes(module, name, rank, size) for name in names for rank in range(size)):
        return False
    for name in names:
        setattr(module, name, _parameter(_part(module, name, group.rank, size)))
    bias_XD = getattr(module, "down_proj_bias", None)
    if bias_XD is not None and group.rank > 0:  # the sum is to have it once
        module.down_proj_bias = _parameter(torch.zeros_like(bias_XD))
    return True


def _part(module: Any, name: str, rank: int, size: int) -> Tensor:
    """A rank's part of a parameter, without the rest in memory."""
    numbers = getattr(module, name).detach()
    has_both = name != _DOWN
    dim = 2 if numbers.dim() == 3 and has_both == is_transposed(module) else 1
    length = numbers.shape[dim]
    # Rows of gate and up lie in turns, or in two halves.
    step = length // 2 if has_both and not is_interleaved(module) else length
    count = step // size
    parts = [
        numbers.narrow(dim, first + rank * count, count).clone() for first in range(0, length, step)
    ]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _loses_codes(module: Any, name: str, rank: int, size: int) -> bool:
    """Whether codes that stay unread would become numbers where they are cut for a rank."""
    whole = getattr(module, name)
    if not isinstance(whole, DeferredTensor) or not whole.stored.has_tiles:
        return False
    part = _part(module, name, rank, size)
    return not isinstance(part, DeferredTensor) or not part.stored.has_tiles


def _parameter(numbers: Tensor) -> nn.Parameter:
    return nn.Parameter(numbers, requires_grad=False)
