"""A transformers model over several ranks, by the plan that the library has for its family.

The plan names products whose outputs are spread over the ranks ("colwise"), and products that read
such outputs and whose results are summed ("rowwise"). What it does not name, or spreads in other
ways, is whole on every rank, except experts: each rank has a part of every expert. A part of an
expert's intermediate numbers needs the rows of gate and up that make them, and the columns of down
that read them. What the parts give is summed. Ranks then have equal work whatever experts the rows
go to, and routers are whole on each.

Dimension key: X experts, D inputs or hidden, E outputs.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from outdraft.core.errors import ConfigError
from outdraft.core.weights import can_spread
from outdraft.distributed.group import RankGroup
from outdraft.distributed.vocabulary import VocabularyShard
from outdraft.kernels.products import RowParallel, ShardWrap, VocabParallel
from outdraft.models.library.checkpoint import DeferredTensor
from outdraft.models.library.experts import has_inputs_first, is_interleaved, is_known

_OUTPUTS, _INPUTS = "colwise", "rowwise"
_DOWN = "down_proj"
_DIVIDED = "gate_up_proj", "gate_up_proj_bias", _DOWN


def check_division(config: PretrainedConfig, size: int, flag: str) -> None:
    """Raise ConfigError if a model cannot be spread over `size` ranks.

    Args:
        flag: the option that asked for the size.
    """
    text: Any = config.get_text_config()
    if size == 1:
        return
    if not text.base_model_tp_plan:
        raise ConfigError(
            f"{flag} must be 1: the transformers library has no plan to divide {text.model_type}"
        )
    counts = text.num_attention_heads, text.num_key_value_heads, text.intermediate_size
    if any(count % size for count in counts) or not can_spread(text.vocab_size, size):
        raise ConfigError(
            f"{flag} {size} does not divide this model, which has {counts[0]} attention heads, "
            f"{counts[1]} key-value heads, an intermediate size of {counts[2]} and "
            f"{text.vocab_size} tokens"
        )


def divide(model: PreTrainedModel, group: RankGroup) -> dict[nn.Module, ShardWrap]:
    """Keep this rank's part of each weight that is spread; for those whose results the ranks put
    together, how. A part of a deferred tensor is a deferred tensor."""
    if group.size == 1:
        return {}
    spreads: dict[nn.Module, ShardWrap] = {}
    plan = _plan_of(model)
    for name, part in model.named_modules():
        if type(part) is not nn.Linear:
            continue
        how = next((how for pattern, how in plan.items() if pattern.fullmatch(name)), None)
        if how == _OUTPUTS:
            _keep(part, 0, group)
        elif how == _INPUTS:
            _keep(part, 1, group)
            spreads[part] = partial(RowParallel, group)
    head: Any = model.get_output_embeddings()
    shard = VocabularyShard(group, head.out_features)
    own_ND = head.weight.detach()[shard.first : shard.first + shard.num_own]
    head.weight, head.out_features = nn.Parameter(own_ND.clone(), requires_grad=False), len(own_ND)
    if head.bias is not None:
        raise ConfigError(f"the head of {type(model).__name__} has a bias: it needs one rank")
    spreads[head] = partial(VocabParallel, shard)
    return spreads


def _plan_of(model: PreTrainedModel) -> Mapping[re.Pattern[str], str]:
    """The plan of a model, by patterns of whole names."""
    config: Any = model.config.get_text_config()
    base = next(
        name
        for name, part in model.named_modules()
        if name and isinstance(part, PreTrainedModel) and type(part.config) is type(config)
    )
    return {
        re.compile(re.escape(f"{base}.{name}").replace(r"\*", r"\d+")): how
        for name, how in config.base_model_tp_plan.items()
    }


def _keep(part: Any, dim: int, group: RankGroup) -> None:
    """Keep this rank's rows of the weight, or columns; a bias goes with the rows."""
    count = part.weight.shape[dim] // group.size
    own_ED = part.weight.detach().narrow(dim, group.rank * count, count).clone()
    part.weight = nn.Parameter(own_ED, requires_grad=False)
    part.out_features, part.in_features = own_ED.shape
    if dim == 0 and part.bias is not None:
        own_E = part.bias.data.chunk(group.size)[group.rank].clone()
        part.bias = nn.Parameter(own_E, requires_grad=False)


def divide_experts(model: nn.Module, group: RankGroup) -> dict[nn.Module, RankGroup]:
    """Keep this rank's part of the experts that the kernels know; whose results are to be summed.

    Experts stay whole on every rank where the ranks do not divide their intermediate numbers, or
    where codes would not stay codes: a part of their numbers takes more memory than all codes.
    """
    if group.size == 1:
        return {}
    return {part: group for part in model.modules() if is_known(part) and _divide(part, group)}


def _divide(module: Any, group: RankGroup) -> bool:
    """Divide the experts of a module if that is possible; return True if so, on all ranks alike."""
    size, names = group.size, [name for name in _DIVIDED if getattr(module, name, None) is not None]
    if module.down_proj.shape[1 if has_inputs_first(module) else 2] % size:
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
    dim = 2 if numbers.dim() == 3 and has_both == has_inputs_first(module) else 1
    length = numbers.shape[dim]
    # Rows of gate and up lie in turns, or in two halves.
    step = length // 2 if has_both and not is_interleaved(module) else length
    count = step // size
    parts = [
        numbers.narrow(dim, first + rank * count, count).clone() for first in range(0, length, step)
    ]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _loses_codes(module: Any, name: str, rank: int, size: int) -> bool:
    """Is true if codes that stay unread would become numbers where they are cut for a rank."""
    whole = getattr(module, name)
    if not isinstance(whole, DeferredTensor) or whole.stored.tile is None:
        return False
    part = _part(module, name, rank, size)
    return not isinstance(part, DeferredTensor) or part.stored.tile is None


def _parameter(numbers: Tensor) -> nn.Parameter:
    return nn.Parameter(numbers, requires_grad=False)
