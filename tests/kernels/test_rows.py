"""Rows of steps: each library lays them out as the reference does."""

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outdraft.kernels.native.library import open_library, usable_instruction_sets
from outdraft.kernels.native.rows import NativeRows
from outdraft.kernels.reference import rows as reference

BLOCK_SIZE, MOST_BLOCKS = 4, 24


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, ...]:
    """What `place_rows` is given, but the size of a block."""
    sizes = st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(0, 20))
    requests = draw(st.lists(sizes, min_size=1, max_size=4))
    parents = [draw(st.integers(0, row)) for _, _, num in requests for row in range(num)]
    blocks = np.arange(len(requests) * MOST_BLOCKS, dtype=np.int32)
    table_BP = draw(st.permutations(blocks.tolist()))
    return (
        *np.array(requests, dtype=np.int32).T.copy(),
        np.array(parents, dtype=np.int64),
        np.array(table_BP, dtype=np.int32).reshape(len(requests), MOST_BLOCKS),
    )


@pytest.mark.parametrize("name", usable_instruction_sets())
@given(step=steps())
def test_rows_stand_where_the_reference_places_them(name, step):
    library = open_library(name)
    assert library is not None
    got = NativeRows(library).place_rows(*step, BLOCK_SIZE)
    want = reference.place_rows(*step, BLOCK_SIZE)
    for one, other in zip(astuple(got), astuple(want), strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
