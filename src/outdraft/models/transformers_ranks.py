"""A transformers model over several ranks, by the plan that the library has for its family.

The plan names products whose outputs are spread over the ranks ("colwise"), and products that read
such outputs and whose results are summed ("rowwise"). What it does not name, or spreads in other
ways, is whole on every rank, but for experts: expert_parts.py divides those.

Dimension key: D inputs, E outputs.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from outdraft.core.errors import ConfigError
from outdraft.core.shards import can_spread
from outdraft.distributed.group import RankGroup
from outdraft.distributed.vocabulary import VocabularyShard
from outdraft.kernels.products import RowParallel, ShardWrap, VocabParallel

_OUTPUTS, _INPUTS = "colwise", "rowwise"


def check_division(config: PretrainedConfig, size: int, flag: str) -> None:
    """Raise ConfigError if a model cannot be spread over so many ranks.

    Args:
        flag: what the size was asked for by.
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
    """By patterns of whole names."""
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
    """This rank's rows of the weight, or columns; a bias goes with the rows."""
    count = part.weight.shape[dim] // group.size
    own_ED = part.weight.detach().narrow(dim, group.rank * count, count).clone()
    part.weight = nn.Parameter(own_ED, requires_grad=False)
    part.out_features, part.in_features = own_ED.shape
    if dim == 0 and part.bias is not None:
        own_E = part.bias.data.chunk(group.size)[group.rank].clone()
        part.bias = nn.Parameter(own_E, requires_grad=False)
