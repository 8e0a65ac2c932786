"""The block pool against a model that keeps everything in plain dictionaries."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outdraft.kv.block_pool import BlockPool


def name(number: int) -> bytes:
    """A prefix hash."""
    return bytes([number])


class PoolAgainstModel(RuleBasedStateMachine):
    """Texts come, share blocks and go; the model knows who holds what and what may be evicted."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.holds: dict[int, int] = {}  # block -> how often it is held
        self.names: dict[int, bytes] = {}  # block -> hash
        self.filled: set[int] = set()
        self.empty = set(range(num_blocks))  # free, nothing to be found in them
        self.evictable: list[int] = []  # free and findable, the next to go first
        self.texts: list[list[int]] = []

    def _is_free(self, block: int) -> bool:
        return block not in self.holds

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        expected_free = len(self.empty) + len(self.evictable)
        blocks = self.pool.allocate(count)
        if count > expected_free:
            assert blocks is None
            return
        assert blocks is not None
        assert len(set(blocks)) == count
        assert all(map(self._is_free, blocks))
        for block in blocks:
            if block in self.evictable:
                assert block == self.evictable.pop(0), "not the least recently released"
                del self.names[block]
            self.empty.discard(block)
            self.filled.discard(block)
            self.holds[block] = 1
        self.texts.append(blocks)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def release(self, data) -> None:
        blocks = self.texts.pop(data.draw(st.integers(0, len(self.texts) - 1)))
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.holds[block] -= 1
            if self.holds[block] == 0:
                del self.holds[block]
                if block in self.names:
                    self.evictable.append(block)
                else:
                    self.empty.add(block)

    @rule(number=st.integers(0, 5))
    def find_and_share(self, number: int) -> None:
        found = self.pool.find(name(number))
        assert found == {key: block for block, key in self.names.items()}.get(name(number))
        if found is None:
            return
        self.pool.share(found)
        self.holds[found] = self.holds.get(found, 0) + 1
        if found in self.evictable:
            self.evictable.remove(found)
        self.texts.append([found])

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), number=st.integers(0, 5))
    def remember(self, data, number: int) -> None:
        block = data.draw(st.sampled_from(sorted(self.holds)))
        self.pool.remember(block, name(number))
        if block not in self.names and name(number) not in self.names.values():
            self.names[block] = name(number)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def fill_drafter_layers(self, data) -> None:
        block = data.draw(st.sampled_from(sorted(self.holds)))
        self.pool.mark_drafter_filled(block)
        self.filled.add(block)

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        assert self.pool.num_free == self.pool.num_blocks - len(self.holds)
        assert self.pool.usage == pytest.approx(len(self.holds) / self.pool.num_blocks)
        for block in self.holds:
            assert self.pool.is_drafter_filled(block) == (block in self.filled)


PoolAgainstModel.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None
)
TestPoolAgainstModel = PoolAgainstModel.TestCase


def cached_text(pool: BlockPool, first_name: int, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    for i, block in enumerate(blocks):
        pool.remember(block, name(first_name + i))
    return blocks


def test_blocks_that_nobody_can_find_are_reused_before_cached_ones():
    pool = BlockPool(3)
    cached = cached_text(pool, 0, 1)
    plain = pool.allocate(2)
    assert plain is not None
    pool.release(cached)
    pool.release(plain)
    assert sorted(pool.allocate(2) or []) == sorted(plain)
    assert pool.find(name(0)) == cached[0]


def test_a_text_loses_its_last_cached_blocks_first():
    pool = BlockPool(3)
    blocks = cached_text(pool, 0, 3)
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[2]]
    assert pool.allocate(1) == [blocks[1]]
    assert pool.find(name(0)) == blocks[0]


def test_the_text_that_ended_first_is_evicted_first():
    pool = BlockPool(4)
    old, new = cached_text(pool, 0, 2), cached_text(pool, 2, 2)
    pool.release(new)
    pool.release(old)
    pool.allocate(2)
    assert [pool.find(name(i)) for i in range(4)] == [old[0], old[1], None, None]


def test_being_shared_makes_a_block_recently_used():
    pool = BlockPool(2)
    first, second = cached_text(pool, 0, 1), cached_text(pool, 1, 1)
    pool.release(first)
    pool.release(second)
    pool.share(first[0])
    pool.release(first)
    assert pool.allocate(1) == second


def test_a_shared_free_block_cannot_be_allocated():
    pool = BlockPool(1)
    [block] = cached_text(pool, 0, 1)
    pool.release([block])
    pool.share(block)
    assert pool.allocate(1) is None


def test_a_reused_block_forgets_that_the_drafter_filled_it():
    pool = BlockPool(1)
    [block] = cached_text(pool, 0, 1)
    pool.mark_drafter_filled(block)
    pool.release([block])
    assert pool.is_drafter_filled(block)  # a later prefix hit may rely on it
    pool.allocate(1)
    assert not pool.is_drafter_filled(block)


def test_the_first_block_of_a_prefix_stays_the_one_that_is_found():
    pool = BlockPool(2)
    first, second = cached_text(pool, 0, 1), cached_text(pool, 0, 1)
    assert pool.find(name(0)) == first[0]
    pool.release(second)
    assert pool.find(name(0)) == first[0]


def test_releasing_what_nobody_holds_is_refused():
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="block 1"):
        pool.release([1])


def test_a_pool_needs_a_block():
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)


@pytest.mark.parametrize("is_held", [True, False])
def test_of_two_blocks_of_a_text_the_one_that_a_drafter_has_read_is_found(is_held):
    pool = BlockPool(4)
    first, second = pool.allocate(2) or ()
    pool.remember(first, name(0))
    if not is_held:
        pool.release([first])
    pool.mark_drafter_filled(second)
    pool.prefer(second, name(0))
    assert pool.find(name(0)) == second
    pool.prefer(second, name(0))
    pool.check_invariants()
    third = (pool.allocate(1) or [])[0]
    assert is_held or third == first  # it is of use to nobody
    pool.mark_drafter_filled(third)
    pool.prefer(third, name(0))
    assert pool.find(name(0)) == second
    pool.prefer(third, name(1))
    assert pool.find(name(1)) is None
    pool.check_invariants()
