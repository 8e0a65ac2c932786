"""Rows of steps: each library lays them out as the reference does."""

from dataclasses import fields

import numpy as np
import torch
from hypothesis import strategies as st

from outdraft.attention.rows import RowBatch, Span
from tests.kernels.comparisons import Case

BLOCK_SIZE, MOST_BLOCKS, NUM_TEXTS, ROW_LEN = 4, 24, 6, 90


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Span], list[list[int]], int, int]:
    """What `place_rows` is given."""
    sizes = st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(0, 20))
    shapes = draw(st.lists(sizes, min_size=1, max_size=4))
    texts = draw(st.permutations(range(NUM_TEXTS)))
    blocks = draw(st.permutations(range(len(shapes) * MOST_BLOCKS)))
    spans = []
    for place, ((context_len, num_causal, number), text) in enumerate(
        zip(shapes, texts, strict=False)
    ):
        parents = tuple(draw(st.integers(0, row)) for row in range(number))
        num_blocks = -(-(context_len + num_causal + number) // BLOCK_SIZE)
        own = blocks[place * MOST_BLOCKS :][:num_blocks]
        samples = number > 0 or draw(st.booleans())
        spans.append(Span(context_len, num_causal, parents, own, text * ROW_LEN, samples))
    extra = draw(st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=3))
    return spans, extra, BLOCK_SIZE, max(num for _, _, num in shapes) + draw(st.integers(0, 2))


def assert_same(got: RowBatch, want: RowBatch) -> None:
    for field in fields(RowBatch):
        ours, theirs = getattr(got, field.name), getattr(want, field.name)
        if isinstance(theirs, int):
            assert ours == theirs, field.name
            continue
        pairs = [(ours, theirs)] if field.name != "extra" else list(zip(ours, theirs, strict=True))
        for one, other in pairs:
            assert one.dtype == other.dtype, field.name
            assert torch.equal(one, other), field.name


def compare_place_rows(case: Case) -> None:
    step = case.data.draw(steps(), "step")
    assert_same(case.kernels.place_rows(*step), case.reference.place_rows(*step))


def compare_copy_rows(case: Case) -> None:
    rng, num_rows = case.rng(), case.data.draw(st.integers(1, 9), "rows")
    places = np.where(rng.random(num_rows) < 0.3, -1, rng.permutation(20)[:num_rows])
    places_R, rows_R = torch.from_numpy(places), torch.from_numpy(rng.integers(0, 7, num_rows))
    from_TD, to_ND = (torch.randn(size, 5).to(case.dtype) for size in (num_rows + 7, 21))
    rows = case.data.draw(st.sampled_from([(), (rows_R,)]), "rows of the source")
    from_TD = from_TD if rows else from_TD[:num_rows]
    got, want = to_ND.clone(), to_ND.clone()
    case.kernels.copy_rows(got, places_R, from_TD, *rows)
    case.reference.copy_rows(want, places_R, from_TD, *rows)
    assert torch.equal(got[:-1], want[:-1])  # the last place is anybody's
    gathered = [torch.zeros(num_rows, 5, dtype=case.dtype) for _ in range(2)]
    for one, to_RD in zip((case.kernels, case.reference), gathered, strict=True):
        one.copy_rows(to_RD, None, want, places_R)
    is_row_R = places_R >= 0
    assert torch.equal(gathered[0][is_row_R], gathered[1][is_row_R])


COMPARISONS = {
    "place_rows": compare_place_rows,
    "copy_rows": compare_copy_rows,
}
