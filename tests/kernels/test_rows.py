"""Rows of steps: each library lays them out as the reference does."""

from dataclasses import astuple
from typing import Any

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st

from outdraft.kernels.ops import Kernels, PlacedRows, RowIndex
from tests.kernels.comparisons import Case

BLOCK_SIZE, MOST_BLOCKS, ROW_LEN = 4, 24, 90


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """What `place_rows` is given."""
    sizes = st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(0, 20))
    requests = draw(st.lists(sizes, min_size=1, max_size=4))
    parents = [draw(st.integers(0, row)) for _, _, num in requests for row in range(num)]
    return (
        np.array(requests, dtype=np.int32).T.copy(),
        np.array(parents, dtype=np.int64),
        draw(block_tables(len(requests))),
        BLOCK_SIZE,
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


def indexed(case: Case, kernels: Kernels) -> tuple[PlacedRows, RowIndex, tuple[Any, ...]]:
    """A drawn step: its placed rows, their index, and what that was made from."""
    sizes_3B, *others = case.data.draw(steps(), "step")
    num_works = sizes_3B.shape[1]
    booleans = st.lists(st.booleans(), min_size=num_works, max_size=num_works)
    samples_W = np.array(case.data.draw(booleans, "samples")) | (sizes_3B[2] > 0)
    placed = kernels.place_rows(sizes_3B, *others)
    width = int(sizes_3B[2].max()) + case.data.draw(st.integers(0, 2), "places more")
    state_rows_W = np.array(case.data.draw(st.permutations(range(6)), "texts"))[:num_works].copy()
    asked = (placed, sizes_3B[1].copy(), samples_W, state_rows_W, ROW_LEN, width)
    return placed, kernels.index_rows(*asked), asked


def compare_index_rows(case: Case) -> None:
    _, want, asked = indexed(case, case.reference)
    assert_same_arrays(case.kernels.index_rows(*asked), want)


def compare_shape_rows(case: Case) -> None:
    placed, index, asked = indexed(case, case.reference)
    width = max(asked[-1], 1)
    num_sampling = len(index.root_rows_B)
    assume(num_sampling > 0)
    rng = case.rng()
    parents_BN = torch.from_numpy(rng.integers(0, np.arange(1, width + 1), (num_sampling, width)))
    rows = [torch.from_numpy(one) for one in (index.draft_index_T, placed.positions_T)]
    given_T = torch.zeros_like(rows[1])
    got = case.kernels.shape_rows(parents_BN, *rows, given_T)
    want = case.reference.shape_rows(parents_BN, *rows, given_T)
    assert all(map(torch.equal, got, want))


def compare_read_token_ids(case: Case) -> None:
    _, index, asked = indexed(case, case.reference)
    rng = case.rng()
    texts_SL = torch.from_numpy(rng.integers(0, 99, (6, ROW_LEN)))
    drafts_BN = torch.from_numpy(rng.integers(-1, 99, (len(index.root_rows_B), asked[-1])))
    indices = torch.from_numpy(index.state_index_T), torch.from_numpy(index.draft_index_T)
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
    "index_rows": compare_index_rows,
    "shape_rows": compare_shape_rows,
    "read_token_ids": compare_read_token_ids,
    "append_token_ids": compare_append_token_ids,
}
