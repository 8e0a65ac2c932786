"""Rows of steps: each library lays them out as the reference does."""

from dataclasses import astuple

import numpy as np
from hypothesis import strategies as st

from tests.kernels.comparisons import Case

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


def compare_place_rows(case: Case) -> None:
    step = case.data.draw(steps(), "step")
    got, want = (one.place_rows(*step, BLOCK_SIZE) for one in (case.kernels, case.reference))
    for ours, theirs in zip(astuple(got), astuple(want), strict=True):
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)


COMPARISONS = {"place_rows": compare_place_rows}
