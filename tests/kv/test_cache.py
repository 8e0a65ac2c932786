"""The cache's tensors: layout, and moving accepted rows together."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.kernels.torch.attention import TorchAttention
from outdraft.kv.block_pool import LayerCacheShape
from outdraft.kv.cache import KVCache
from tests.attention.ragged import trees

CPU = torch.device("cpu")
# With equal and different sizes, as a target with several kinds of layers has them.
SHAPES = [LayerCacheShape(2, 5, 5), LayerCacheShape(1, 6, 4), LayerCacheShape(2, 5, 3)]


def random_cache(seed: int, num_blocks: int = 20, block_size: int = 4) -> KVCache:
    cache = KVCache(SHAPES, num_blocks, block_size, torch.float32, CPU)
    rng = torch.Generator().manual_seed(seed)
    for layer in cache.layers:
        layer.k_PSGC.copy_(torch.randn(layer.k_PSGC.shape, generator=rng))
        layer.v_PSGE.copy_(torch.randn(layer.v_PSGE.shape, generator=rng))
    return cache


def slots_of(cache: KVCache) -> list[torch.Tensor]:
    """[P * S, G, C] of every layer, keys then values."""
    tensors = [t for layer in cache.layers for t in (layer.k_PSGC, layer.v_PSGE)]
    return [t.flatten(0, 1).clone() for t in tensors]


@settings(max_examples=60, deadline=None)
@given(parents=trees(max_drafts=30), context_len=st.integers(0, 20), data=st.data())
def test_compaction_equals_writing_the_accepted_tokens_straight(parents, context_len, data):
    accepted = []  # rows of one path from the root downwards
    row = 0
    while True:
        children = [i + 1 for i, parent in enumerate(parents) if parent == row]
        if not children or not data.draw(st.booleans() if accepted else st.just(True)):
            break
        row = data.draw(st.sampled_from(children))
        accepted.append(row)

    cache, straight = random_cache(seed=1), random_cache(seed=1)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(context_len))
    slots = order[context_len : context_len + 1 + len(parents)]
    rng = torch.Generator().manual_seed(2)
    attention = TorchAttention()
    for layer, twin in zip(cache.layers, straight.layers, strict=True):
        shapes = (layer.k_PSGC.shape[2:], layer.v_PSGE.shape[2:])
        k, v = (torch.randn(len(slots), *shape, generator=rng) for shape in shapes)
        attention.write(k, v, layer, slots)
        attention.write(k, v, twin, slots)
        path = torch.tensor(accepted, dtype=torch.long)
        attention.write(k[path], v[path], twin, slots[1 : 1 + len(path)])

    cache.compact(slots[accepted], slots[1 : 1 + len(accepted)])
    for got, want in zip(slots_of(cache), slots_of(straight), strict=True):
        assert torch.equal(got, want)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_rows=st.integers(0, 20))
def test_compaction_reads_before_it_writes_and_skips_rows_without_a_slot(data, num_rows):
    sources = data.draw(st.lists(st.integers(-1, 79), min_size=num_rows, max_size=num_rows))
    targets = data.draw(st.permutations(range(80)))[:num_rows]
    targets = [slot if data.draw(st.booleans()) else -1 for slot in targets]
    cache = random_cache(seed=3)
    before = slots_of(cache)
    cache.compact(torch.tensor(sources, dtype=torch.int32), torch.tensor(targets))
    for got, old in zip(slots_of(cache), before, strict=True):
        want = old.clone()
        for source, target in zip(sources, targets, strict=True):
            if source >= 0 and target >= 0:
                want[target] = old[source]
        assert torch.equal(got, want)


def test_compacting_nothing_leaves_slot_0_alone():
    cache = random_cache(seed=4)
    before = slots_of(cache)
    cache.compact(torch.tensor([-1, 5]), torch.tensor([3, -1]))
    assert all(torch.equal(a, b) for a, b in zip(slots_of(cache), before, strict=True))


def test_bytes_per_block_is_what_the_tensors_take():
    cache = KVCache(SHAPES, 7, 4, torch.bfloat16, CPU)
    tensors = [t for layer in cache.layers for t in (layer.k_PSGC, layer.v_PSGE)]
    taken = sum(t.numel() * t.element_size() for t in tensors)
    for layer, shape in zip(cache.layers, SHAPES, strict=True):
        assert layer.k_PSGC.shape == (7, 4, shape.num_kv_heads, shape.key_size)
        assert layer.v_PSGE.shape == (7, 4, shape.num_kv_heads, shape.value_size)
    assert taken == 7 * KVCache.bytes_per_block(SHAPES, 4, torch.bfloat16)


def test_layers_share_no_memory():
    cache = random_cache(seed=5)
    for i, layer in enumerate(cache.layers):
        layer.k_PSGC.fill_(10 + i)
        layer.v_PSGE.fill_(20 + i)
    assert [int(t.unique().item()) for t in slots_of(cache)] == [10, 20, 11, 21, 12, 22]
