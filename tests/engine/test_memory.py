"""How many blocks the cache gets, and what is said when it cannot have them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outdraft.config.engine import CacheConfig
from outdraft.core.errors import ConfigError
from outdraft.loading.machine import limited_groups
from outdraft.loading.memory import (
    CPU_SHARE,
    DRAFT_PROBS,
    DeviceMemory,
    MemoryPlan,
    device_memory,
    num_blocks,
)


def blocks(
    config: CacheConfig,
    block_bytes=100,
    useful_tokens=10**9,
    buffers=0,
    free=10_000,
    total=None,
    weights=0,
    default_cache=None,
):
    return num_blocks(
        config,
        block_bytes=block_bytes,
        useful_tokens=useful_tokens,
        weights=weights,
        buffers=buffers,
        memory=DeviceMemory(total or free, free, default_share=0.5, default_cache=default_cache),
    )


def test_a_number_of_blocks_is_taken_as_it_is():
    assert blocks(CacheConfig(num_blocks=7)) == 7
    assert blocks(CacheConfig(num_blocks=7, kv_cache_memory_bytes=100)) == 7


def test_bytes_buy_whole_blocks():
    assert blocks(CacheConfig(kv_cache_memory_bytes=799)) == 7


def test_a_share_of_the_whole_device_is_for_weights_buffers_and_cache_together():
    config = CacheConfig(gpu_memory_utilization=0.5)
    assert blocks(config, total=20_000, weights=3000, buffers=2000) == 50
    assert blocks(CacheConfig(gpu_memory_utilization=1.0), total=20_000, weights=10_000) == 100


def test_a_share_that_others_have_taken_already_is_refused_when_it_was_asked_for():
    with pytest.raises(ConfigError, match="lower gpu_memory_utilization"):
        blocks(CacheConfig(gpu_memory_utilization=0.9), total=20_000, free=10_000)


def test_a_share_that_the_weights_fill_leaves_no_block():
    with pytest.raises(ConfigError, match="raise kv_cache_memory_bytes or gpu_memory_utilization"):
        blocks(CacheConfig(gpu_memory_utilization=0.5), total=20_000, weights=10_000)


def test_the_default_share_is_also_one_of_what_others_leave_free():
    assert blocks(CacheConfig(), total=20_000, weights=1000, buffers=2000, free=10_000) == 40
    assert blocks(CacheConfig(), total=20_000, weights=5000, buffers=2000, free=10_000) == 30


def test_no_more_is_taken_unasked_than_all_requests_at_their_longest_need():
    assert blocks(CacheConfig(block_size=16), useful_tokens=33) == 3


def test_a_cpu_gives_the_cache_no_more_than_its_default_unasked():
    limit = {"total": 100_000, "free": 100_000, "default_cache": 4_050}
    assert blocks(CacheConfig(), **limit) == 40
    assert blocks(CacheConfig(), useful_tokens=160, **limit) == 10
    for asked in ({"gpu_memory_utilization": 0.5}, {"kv_cache_memory_bytes": 50_000}):
        assert blocks(CacheConfig(**asked), **limit) == 500
    assert device_memory(torch.device("cpu")).default_cache == 4 << 30
    assert device_memory(torch.device("cpu")).part(4).default_cache == 1 << 30


def test_the_plan_says_that_the_default_was_the_limit():
    def told(count, limit):
        return str(MemoryPlan("float32", 0, 0, {}, 2**20, count, 16, cache_limit=limit))

    assert "at most 40.0 MiB unless kv_cache_memory_bytes says" in told(40, 40 * 2**20)
    assert "unless" not in told(39, 40 * 2**20) + told(40, None)


@pytest.mark.parametrize("asked", [{"num_blocks": 100}, {"kv_cache_memory_bytes": 10_000}])
def test_more_than_there_is_beside_the_buffers_is_refused(asked):
    assert blocks(CacheConfig(**asked)) == 100
    with pytest.raises(ConfigError, match="are free: lower"):
        blocks(CacheConfig(**asked), buffers=1)


def test_buffers_that_do_not_fit_are_refused_and_no_negative_cache_is_named():
    with pytest.raises(ConfigError, match=r"asks for 0\.0 MiB"):
        blocks(CacheConfig(), buffers=2**30)


@pytest.mark.parametrize("config", [CacheConfig(), CacheConfig(kv_cache_memory_bytes=99)])
def test_too_little_for_one_block_is_refused(config):
    with pytest.raises(ConfigError, match="one block takes 100"):
        blocks(config, free=150)


sizes = st.integers(1, 10_000)


@given(sizes, sizes, sizes, st.integers(0, 10**7), st.floats(0.01, 1))
def test_what_is_taken_fits(block_bytes, useful_tokens, buffers, free, fraction):
    config = CacheConfig(gpu_memory_utilization=fraction)
    try:
        count = blocks(config, block_bytes, useful_tokens, buffers, free)
    except ConfigError:
        assert free * fraction - buffers < block_bytes + 1
    else:
        assert count >= 1
        assert count * block_bytes + buffers <= free * fraction
        assert (count - 1) * config.block_size < useful_tokens


def test_the_table_adds_up():
    mebi = 2**20
    plan = MemoryPlan(
        numbers="float32 over bfloat16 weights",
        target_weights=3 * mebi,
        drafter_weights=mebi,
        step={
            "texts on the device": mebi // 8,
            "activations of a full step": mebi // 8,
            "logits and sampling": mebi // 4,
            DRAFT_PROBS: 0,
        },
        block_bytes=mebi // 4,
        num_blocks=10,
        block_size=16,
    )
    rows = dict(plan.table())
    assert rows["KV cache: 10 blocks, 160 tokens"] == "2.5 MiB"
    assert rows["target weights: float32 over bfloat16 weights"] == "3.0 MiB"
    assert rows["total"] == "7.0 MiB"
    assert rows["activations of a full step"] == "0.1 MiB"
    assert rows["logits and sampling"] == "0.2 MiB"
    assert DRAFT_PROBS not in rows


def test_there_is_memory_on_this_machine():
    found = device_memory(torch.device("cpu"))
    assert 2**20 < found.free <= found.total


def version_2(root: Path, folder: str, limit: str, used: int, cached: int) -> None:
    (root / folder).mkdir(parents=True, exist_ok=True)
    (root / folder / "memory.max").write_text(f"{limit}\n")
    (root / folder / "memory.current").write_text(f"{used}\n")
    (root / folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")


def test_every_group_above_this_process_that_has_a_limit_counts(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/a/b\n")
    version_2(tmp_path / "fs", "a/b", "1000", 700, 300)
    version_2(tmp_path / "fs", "a", "max", 700, 300)
    version_2(tmp_path / "fs", "", "5000", 4000, 0)
    version_2(tmp_path / "fs", "other", "1", 1, 0)
    found = list(limited_groups(tmp_path / "fs", membership))
    assert found == [(1000, 400), (5000, 4000)]


def test_in_a_container_the_root_is_the_group(tmp_path):
    """The path is the machine's, and leads nowhere here."""
    membership = tmp_path / "cgroup"
    membership.write_text("0::/docker/0123\n")
    version_2(tmp_path / "fs", "", "4096", 100, 0)
    assert list(limited_groups(tmp_path / "fs", membership)) == [(4096, 100)]


def test_the_first_version_of_groups_is_read_too(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("5:cpu,cpuacct:/x\n4:memory:/x\n")
    folder = tmp_path / "fs" / "memory" / "x"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("2048\n")
    (folder / "memory.usage_in_bytes").write_text("1024\n")
    (folder / "memory.stat").write_text("total_inactive_file 24\n")
    assert list(limited_groups(tmp_path / "fs", membership)) == [(2048, 1000)]


def test_without_groups_there_are_no_limits(tmp_path):
    assert list(limited_groups(tmp_path, tmp_path / "none")) == []


def test_a_groups_limit_is_what_the_share_is_of(monkeypatch):
    group = (2**22, 2**21)
    monkeypatch.setattr("outdraft.loading.memory.limited_groups", lambda: [group])
    found = device_memory(torch.device("cpu"))
    assert (found.total, found.free) == (2**22, 2**21)
    assert found.default_share == CPU_SHARE


def rank_plan(weights: int, block_bytes: int, count: int) -> MemoryPlan:
    return MemoryPlan("float32", weights, 0, {}, block_bytes, count, 16)


def test_ranks_agree_on_the_fewest_blocks_and_tell_what_each_leaves_idle():
    own = rank_plan(1000, 10, 70)
    plan = own.agreed([rank_plan(1200, 10, 50), rank_plan(900, 8, 60)])
    assert (plan.num_blocks, plan.target_weights, plan.block_bytes) == (50, 1000, 10)
    totals = [(rank.total, replace(rank, num_blocks=50).total) for rank in plan.ranks]
    assert totals == [(1700, 1500), (1700, 1700), (1380, 1300)]
    told = dict(plan.table())
    assert {f"rank {rank} leaves idle" for rank in range(3)} <= set(told)
    assert not own.ranks
