"""Engines that live at once take together what one may take alone."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from outdraft.config.engine import EngineConfig
from outdraft.core.errors import ConfigError
from outdraft.kernels.choose import with_triton
from outdraft.kernels.data.graph_sizes import GRAPH_BYTES, GRAPHED_FUNCTIONS
from outdraft.loading.memory import (
    GRAPHS,
    STATES,
    TEXTS,
    DeviceMemory,
    plan_memory,
    plan_together,
)
from outdraft.loading.models import load_models
from tests.cli.pair import pair
from tests.ranks import spread_models

SHARE, MEMORY = 0.9, 23 << 20


def part(source=None, **options):
    speculation = None
    if source is not None:
        path = pair().drafter if source == "draft_model" else pair().heads[source]
        speculation = {"method": source, "model": str(path)}
    values = {
        "device": "cpu",
        "max_num_seqs": 256,
        "max_num_batched_tokens": 256,
        "speculative_config": speculation,
    }
    config = EngineConfig.from_options(model=str(pair().target), **values | options)
    return config, load_models(config)


def taken(plans, parts):
    """Bytes of engines that step in turn, each weight once."""
    networks = {id(m.target): m.target for _, m in parts}
    networks |= {id(m.drafter): m.drafter.network for _, m in parts if m.drafter}
    weights = sum(network.memory_bytes for network in networks.values())
    steps = [plan.step for plan in plans]
    kept = [step[TEXTS] + step[STATES] for step in steps]
    between = max(sum(step.values()) - own for step, own in zip(steps, kept, strict=True))
    caches = sum(plan.block_bytes * plan.num_blocks for plan in plans)
    return weights + between + caches + sum(kept)


@pytest.mark.parametrize("sources", [(None,), (None, "draft_model"), (None, "eagle3", "medusa")])
@pytest.mark.parametrize("options", [{}, {"gpu_memory_utilization": SHARE}])
def test_engines_share_what_there_is_and_leave_little_of_it(sources, options):
    target = part(**options)[1].target
    parts = []
    for source in sources:
        config, models = part(source, **options)
        parts.append((config, replace(models, target=target)))
    memory = DeviceMemory(MEMORY, MEMORY, SHARE)
    plans = plan_together(parts, memory)
    assert taken(plans, parts) <= SHARE * memory.total
    if options:
        blocks = sum(plan.block_bytes for plan in plans)
        assert taken(plans, parts) > SHARE * memory.total - blocks - len(parts)
    assert max(p.num_blocks * p.block_bytes for p in plans) < SHARE * memory.total / len(parts)


def test_alone_an_engine_would_leave_none_for_a_second_one():
    options = {"gpu_memory_utilization": SHARE}
    one = part(**options)
    memory = DeviceMemory(MEMORY, MEMORY, SHARE)
    alone = plan_together([one], memory)
    left = memory.free - taken(alone, [one])
    with pytest.raises(ConfigError, match="are free"):
        plan_together([one], DeviceMemory(memory.total, left, SHARE))
    first, second = plan_together([one, one], memory)
    assert first == second
    assert 0 < alone[0].num_blocks - 2 * first.num_blocks < 100


def test_a_number_of_blocks_that_is_asked_for_is_each_engines():
    one = part(num_blocks=50)
    plans = plan_together([one] * 3, DeviceMemory(1 << 30, 1 << 30, SHARE))
    assert [plan.num_blocks for plan in plans] == [50] * 3
    with pytest.raises(ConfigError, match="are free"):
        plan_together([one] * 3, DeviceMemory(1 << 30, taken(plans[:2], [one] * 2), SHARE))


def test_the_default_of_a_cpu_is_shared_by_what_lives_at_once():
    one, limit = part(), 1 << 20
    alone = plan_together([one], DeviceMemory(1 << 30, 1 << 30, SHARE, limit))
    both = plan_together([one, one], DeviceMemory(1 << 30, 1 << 30, SHARE, limit))
    for plans in (alone, both):
        held = sum(plan.num_blocks * plan.block_bytes for plan in plans)
        assert limit - len(plans) * plans[0].block_bytes < held <= limit
        assert "unless kv_cache_memory_bytes says" in str(plans[0])
    asked = part(gpu_memory_utilization=SHARE)
    [plan] = plan_together([asked], DeviceMemory(1 << 30, 1 << 30, SHARE, limit))
    assert plan.num_blocks * plan.block_bytes > limit
    assert "unless" not in str(plan)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_of_a_machine_have_no_more_memory_together_than_one_has(size, monkeypatch):
    memory = DeviceMemory(MEMORY, MEMORY, SHARE)
    monkeypatch.setattr("outdraft.loading.memory.device_memory", lambda device: memory)
    config, alone = part(max_num_seqs=16, max_num_batched_tokens=16)
    spread = spread_models(config, size, 1)
    plans = [plan_memory(config, models) for models in spread]
    agreed = plans[0].agreed(plans[1:])
    assert agreed.num_blocks == min(plan.num_blocks for plan in plans)
    assert sum(rank.total for rank in agreed.ranks) <= SHARE * memory.total
    weights = sum(models.target.memory_bytes for models in spread)
    assert alone.target.memory_bytes <= weights < 1.5 * alone.target.memory_bytes


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_graphs_take_memory_where_they_are_made():
    config, models = part("draft_model")
    memory = DeviceMemory(4 << 30, 4 << 30, SHARE)
    with_graphs, without = (
        plan_together([(config, replace(models, kernels=kernels))], memory)[0]
        for kernels in (
            with_triton(models.kernels, has_graphs=has_graphs) for has_graphs in (True, False)
        )
    )
    assert without.step[GRAPHS] == 0
    assert with_graphs.step[GRAPHS] > GRAPHED_FUNCTIONS * GRAPH_BYTES
    assert dict(with_graphs.step) == {**without.step, GRAPHS: with_graphs.step[GRAPHS]}
