"""Which blocks of a text are read: the first, the newest, and those with the most attention."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outdraft.core.errors import ConfigError
from outdraft.drafting.device.self_drafter import BlockBudget, attention_layers


@given(st.integers(4, 20), st.integers(1, 8), st.integers(1, 600), st.integers(0, 2**32 - 1))
def test_a_budget_is_never_exceeded_and_holds_what_got_most(
    num_blocks: int, block_size: int, num_tokens: int, seed: int
):
    budget = BlockBudget(num_blocks, block_size)
    num_full = -(-num_tokens // block_size)
    mass_P = np.random.default_rng(seed).random(num_full)
    places = budget.places(num_tokens, mass_P)
    recent = range(budget.first_recent(num_tokens), num_full)
    assert len(places) + len(recent) == min(num_blocks, num_full)
    assert [*places, *recent] == sorted({*places, *recent})
    assert recent[-1] == (num_tokens - 1) // block_size  # the block of the newest token
    if len(places) < recent[0]:
        assert places[0] == 0
        left_out = set(range(recent[0])) - {*places}
        least = min((mass_P[place] for place in places[1:]), default=1.0)
        assert all(mass_P[place] <= least for place in left_out)


def test_the_newer_one_of_equal_blocks_is_read():
    assert BlockBudget(4, 2).places(20, np.zeros(10)) == [0, 7]


def test_a_budget_of_too_few_blocks_is_refused():
    with pytest.raises(ConfigError, match="at least 4 blocks of 16 tokens, so 64, got 63"):
        BlockBudget.of_tokens(63, 16)


@pytest.mark.parametrize(
    ("num_layers", "layers"),
    [(1, (0,)), (4, (2,)), (15, (7,)), (16, (4, 12)), (24, (4, 12, 20)), (61, (7, 22, 38, 53))],
)
def test_one_layer_of_eight_is_looked_at_and_at_most_four(num_layers: int, layers: tuple[int, ...]):
    assert attention_layers(num_layers) == layers
