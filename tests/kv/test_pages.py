"""Which pages of the cache's memory are taken, as the system tells it."""

import mmap
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outdraft.kv.block_pool import BlockPool, LayerCacheShape
from outdraft.kv.cache import HUGE_PAGE_BYTES, KVCache
from outdraft.runner.state import DeviceState
from tests.resident import resident_bytes

CPU = torch.device("cpu")
SHAPES = [LayerCacheShape(2, 128, 128)] * 4
BLOCK = 16

needs_mincore = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="this system does not tell which pages are taken"
)


def tensors_of(cache: KVCache) -> list[torch.Tensor]:
    return [one for layer in cache.layers for one in (layer.k_PSGC, layer.v_PSGE)]


@needs_mincore
def test_a_new_cache_takes_no_page():
    cache = KVCache(SHAPES, 8192, BLOCK, torch.float32, CPU)
    assert sum(one.nbytes for one in tensors_of(cache)) == 1 << 30
    assert resident_bytes(tensors_of(cache)) == 0


@needs_mincore
def test_new_texts_on_the_device_take_no_page():
    texts_SL = DeviceState(64, 32768, CPU).token_ids_SL
    assert texts_SL.nbytes > 1 << 24
    assert resident_bytes([texts_SL]) == 0


@needs_mincore
def test_the_first_blocks_take_their_own_bytes_and_no_huge_page_for_each_layer():
    cache = KVCache(SHAPES, 4096, BLOCK, torch.float32, CPU)
    for one in tensors_of(cache):
        one[:3].fill_(1)
    taken = 3 * KVCache.bytes_per_block(SHAPES, BLOCK, torch.float32)
    pages = 2 * len(tensors_of(cache)) * mmap.PAGESIZE
    assert resident_bytes(tensors_of(cache)) <= taken + pages < HUGE_PAGE_BYTES


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.data())
def test_texts_that_nobody_can_find_again_stay_in_the_lowest_blocks(sizes, data):
    """No block is touched for the first time while one that was is free."""
    pool, held, touched = BlockPool(300), list[list[int]](), set[int]()
    for size in sizes:
        new = pool.allocate(size)
        assert new is not None
        before = len(touched)
        touched.update(new)
        assert len(touched) == max(before, sum(map(len, held)) + size)
        held.append(new)
        for _ in range(data.draw(st.integers(0, len(held)))):
            pool.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
    assert touched == set(range(len(touched)))
