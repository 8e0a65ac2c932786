"""Rows of steps: each library lays them out as the reference does."""

from dataclasses import astuple

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st

from tests.kernels.comparisons import Case

BLOCK_SIZE, MOST_BLOCKS, NUM_TEXTS, ROW_LEN = 4, 24, 6, 90


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, int]:
    """What `place_rows` is given."""
    sizes = st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(0, 20))
    shapes = draw(st.lists(sizes, min_size=1, max_size=4))
    texts = draw(st.permutations(range(NUM_TEXTS)))
    requests = [
        (*shape, text * ROW_LEN, shape[2] > 0 or draw(st.booleans()))
        for shape, text in zip(shapes, texts, strict=False)
    ]
    parents = [draw(st.integers(0, row)) for _, _, num in shapes for row in range(num)]
    return (
        np.array(requests, dtype=np.int64).T.copy(),
        np.array(parents, dtype=np.int64),
        draw(block_tables(len(requests))),
        BLOCK_SIZE,
        max(num for _, _, num in shapes) + draw(st.integers(0, 2)),
    )


@st.composite
def block_tables(draw: st.DrawFn, num_requests: int) -> np.ndarray:
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    blocks = rng.permutation(num_requests * MOST_BLOCKS).astype(np.int32)
    return blocks.reshape(num_requests, MOST_BLOCKS)


def assert_same_arrays(got: object, want: object) -> None:
    for ours, theirs in zip(astuple(got), astuple(want), strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert np.array_equal(ours, theirs)


def compare_place_rows(case: Case) -> None:
    step = case.data.draw(steps(), "step")
    assert_same_arrays(case.kernels.place_rows(*step), case.reference.place_rows(*step))


def compare_shape_rows(case: Case) -> None:
    step = case.data.draw(steps(), "step")
    placed, width = case.reference.place_rows(*step), max(step[-1], 1)
    num_sampling = len(placed.root_rows_B)
    assume(num_sampling > 0)
    rng = case.rng()
    parents_BN = torch.from_numpy(rng.integers(0, np.arange(1, width + 1), (num_sampling, width)))
    rows = [torch.from_numpy(one) for one in (placed.draft_index_T, placed.positions_T)]
    given_T = torch.zeros_like(rows[1])
    got = case.kernels.shape_rows(parents_BN, *rows, given_T)
    want = case.reference.shape_rows(parents_BN, *rows, given_T)
    assert all(map(torch.equal, got, want))


def compare_keep_rows(case: Case) -> None:
    step = case.data.draw(steps(), "step")
    placed, num_drafts_W, samples_W = case.reference.place_rows(*step), step[0][2], step[0][4]
    rng = case.rng()
    kept_rows_BN = np.full_like(placed.draft_slots_BN, -1)
    for rows_N, num_drafts in zip(kept_rows_BN, num_drafts_W[samples_W > 0], strict=True):
        rows = np.flatnonzero(rng.random(num_drafts) < 0.5)  # a path goes down
        rows_N[: len(rows)] = rows
    arrays = (placed.slots_T, placed.draft_index_T, placed.root_rows_B, placed.draft_slots_BN)
    tensors = [torch.from_numpy(one) for one in (*arrays, kept_rows_BN)]
    got, want = case.kernels.keep_rows(*tensors), case.reference.keep_rows(*tensors)
    assert all(map(torch.equal, got, want))


def compare_read_token_ids(case: Case) -> None:
    step = case.data.draw(steps(), "step")
    placed = case.reference.place_rows(*step)
    rng = case.rng()
    texts_SL = torch.from_numpy(rng.integers(0, 99, (NUM_TEXTS, ROW_LEN)))
    drafts_BN = torch.from_numpy(rng.integers(-1, 99, placed.draft_slots_BN.shape))
    indices = torch.from_numpy(placed.state_index_T), torch.from_numpy(placed.draft_index_T)
    got = case.kernels.read_token_ids(texts_SL, drafts_BN, *indices)
    assert torch.equal(got, case.reference.read_token_ids(texts_SL, drafts_BN, *indices))


def compare_append_token_ids(case: Case) -> None:
    num_requests, width = case.data.draw(st.tuples(st.integers(1, 6), st.integers(1, 5)), "sizes")
    rng = case.rng()
    texts_SL = torch.from_numpy(rng.integers(0, 99, (6, ROW_LEN)))
    state_rows_B = torch.from_numpy(rng.permutation(6)[:num_requests])
    starts_B = torch.from_numpy(rng.integers(0, ROW_LEN - width, num_requests))
    token_ids_BN = torch.from_numpy(rng.integers(-1, 99, (num_requests, width)))
    got, want = texts_SL.clone(), texts_SL.clone()
    case.kernels.append_token_ids(got, state_rows_B, starts_B, token_ids_BN)
    case.reference.append_token_ids(want, state_rows_B, starts_B, token_ids_BN)
    assert torch.equal(got[:, :-1], want[:, :-1])  # the last column is anybody's


COMPARISONS = {
    "place_rows": compare_place_rows,
    "shape_rows": compare_shape_rows,
    "keep_rows": compare_keep_rows,
    "read_token_ids": compare_read_token_ids,
    "append_token_ids": compare_append_token_ids,
}
