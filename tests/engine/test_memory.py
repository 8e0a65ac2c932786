"""How many blocks the cache gets, and what is said when it cannot have them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outdraft.config.engine import CacheConfig
from outdraft.core.errors import ConfigError
from outdraft.engine.memory import MemoryPlan, free_bytes, num_blocks
from outdraft.engine.step_memory import StepMemory


def blocks(config: CacheConfig, block_bytes=100, useful_tokens=10**9, buffers=0, free=10_000):
    return num_blocks(
        config, block_bytes=block_bytes, useful_tokens=useful_tokens, buffers=buffers, free=free
    )


def test_a_number_of_blocks_is_taken_as_it_is():
    assert blocks(CacheConfig(num_blocks=7)) == 7
    assert blocks(CacheConfig(num_blocks=7, kv_cache_memory_bytes=100)) == 7


def test_bytes_buy_whole_blocks():
    assert blocks(CacheConfig(kv_cache_memory_bytes=799)) == 7


def test_otherwise_a_share_of_what_the_buffers_leave():
    assert blocks(CacheConfig(memory_fraction=0.5), buffers=2000) == 40


def test_no_more_is_taken_unasked_than_all_requests_at_their_longest_need():
    assert blocks(CacheConfig(block_size=16), useful_tokens=33) == 3


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
    config = CacheConfig(memory_fraction=fraction)
    try:
        count = blocks(config, block_bytes, useful_tokens, buffers, free)
    except ConfigError:
        assert (free - buffers) * fraction < block_bytes + 1
    else:
        assert count >= 1
        assert count * block_bytes <= (free - buffers) * fraction
        assert (count - 1) * config.block_size < useful_tokens


def test_the_table_adds_up():
    mebi = 2**20
    plan = MemoryPlan(
        target_weights=3 * mebi,
        drafter_weights=mebi,
        step=StepMemory(mebi // 8, mebi // 8, 0, mebi // 4, 0),
        block_bytes=mebi // 4,
        num_blocks=10,
        block_size=16,
    )
    rows = dict(plan.table())
    assert rows["KV cache: 10 blocks, 160 tokens"] == "2.5 MiB"
    assert rows["total"] == "7.0 MiB"
    assert rows["activations of a full step"] == "0.1 MiB"
    assert rows["logits and sampling"] == "0.2 MiB"
    assert "draft probabilities" not in rows


def test_there_is_memory_on_this_machine():
    assert free_bytes(torch.device("cpu")) > 2**20
