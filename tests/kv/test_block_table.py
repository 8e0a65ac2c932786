"""Block tables: how many blocks, which slots, and whose they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outdraft.kv.block_pool import BlockPool, BlockTable

sizes = st.integers(1, 16)
lengths = st.integers(0, 60)


@given(sizes, st.lists(st.tuples(st.booleans(), lengths), max_size=12))
def test_a_table_never_holds_more_than_asked_for_nor_less_than_reserved(size, changes):
    pool = BlockPool(20)
    table = BlockTable(pool, size)
    for grows, num_tokens in changes:
        before = list(table.ids)
        blocks = -(-num_tokens // size)
        if grows:
            missing = max(0, blocks - len(before))
            fits = missing <= pool.num_free
            assert table.reserve(num_tokens) == fits
            assert len(table.ids) == (max(blocks, len(before)) if fits else len(before))
            assert table.ids[: len(before)] == before
        else:
            table.truncate(num_tokens)
            assert table.ids == before[:blocks]
        assert pool.num_free == pool.num_blocks - len(table.ids)
        pool.check_invariants()


def test_adopted_blocks_are_held_until_the_last_table_lets_go():
    pool = BlockPool(4)
    first, second = BlockTable(pool, 4), BlockTable(pool, 4)
    first.reserve(8)
    second.adopt(list(first.ids))
    assert second.reserve(12)
    first.truncate(0)
    assert pool.num_free == 1
    second.truncate(0)
    assert pool.num_free == 4


def test_only_an_empty_table_adopts():
    pool = BlockPool(2)
    table = BlockTable(pool, 4)
    table.reserve(1)
    with pytest.raises(ValueError, match="empty"):
        table.adopt([1])
    pool.check_invariants()
