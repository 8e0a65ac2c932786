"""The batch that a forward pass reads, against one row at a time."""

from dataclasses import fields

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from outdraft.attention.rows import Span, pack, unpack
from tests.reference.draft_trees import ancestor_masks, tree_depths
from tests.row_batches import row_batch


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 20), st.integers(0, 8)), min_size=1, max_size=4
    ),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 1 << 30),
)
def test_rows_stand_where_a_loop_over_them_says(shapes, block_size, seed):
    rng = np.random.default_rng(seed)
    spans = []
    for context_len, num_causal, num_drafts in shapes:
        parents = [int(rng.integers(0, row + 1)) for row in range(num_drafts)]
        num_blocks = -(-(context_len + num_causal + num_drafts) // block_size)
        blocks = rng.permutation(100)[:num_blocks].tolist()
        spans.append(Span(context_len, num_causal, parents, blocks))
    batch = row_batch(spans, block_size)
    row = 0
    for b, span in enumerate(spans):
        assert batch.query_start_B1[b] == row
        slots = [block * block_size + i for block in span.block_ids for i in range(block_size)]
        depths, masks = tree_depths(span.parents), ancestor_masks(span.parents)
        for k in range(span.num_rows):
            draft = k - span.num_causal
            root = span.context_len + span.num_causal - 1
            assert batch.slots_T[row] == slots[span.context_len + k]
            assert batch.positions_T[row] == (
                span.context_len + k if draft < 0 else root + depths[draft]
            )
            assert batch.ancestors_T[row] == (0 if draft < 0 else masks[draft])
            row += 1
    assert batch.query_start_B1[-1] == row == len(batch.slots_T)
    assert batch.max_rows == max(span.num_rows for span in spans)
    assert batch.max_seq_len == max(span.context_len + span.num_rows for span in spans)


def test_rows_for_another_device_are_those_of_the_host():
    spans = [Span(3, 2, (0, 1), [1, 0]), Span(0, 5, (), [2, 3], 7, samples=False)]
    extra = ([4, 5], [], [6])
    host, sent = (row_batch(spans, 4, torch.device(kind), 3, extra) for kind in ("cpu", "meta"))
    assert (host.max_rows, host.max_seq_len) == (sent.max_rows, sent.max_seq_len) == (5, 7)
    for field in fields(host):
        if field.name in ("max_rows", "max_seq_len"):
            continue
        pairs = [(getattr(host, field.name), getattr(sent, field.name))]
        if field.name == "extra":
            pairs = list(zip(*pairs[0], strict=True))
        for own, other in pairs:
            assert other.is_meta
            assert (other.shape, other.dtype) == (own.shape, own.dtype), field.name


def test_arrays_that_travel_together_arrive_as_they_were():
    arrays = [
        np.array([[1, -2, 3]], dtype=np.int32),
        np.array([True, False, True]),
        np.empty((0, 4), dtype=np.int64),
        np.array([1 << 40, -1], dtype=np.int64),
        np.arange(6, dtype=np.float64).reshape(2, 3).T,  # not contiguous
        np.array([0.5], dtype=np.float32),
    ]
    packed = pack(arrays)
    arrived = unpack(packed, arrays)
    for array, tensor in zip(arrays, arrived, strict=True):
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert (tensor.data_ptr() - packed.data_ptr()) % 16 == 0
