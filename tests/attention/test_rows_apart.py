"""A row's bits do not depend on the rows beside it, nor on the shape of the tree it is in."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outdraft.attention.base import AttentionBackend, AttentionForm, LayerCache
from outdraft.kernels.torch.attention import TorchAttention
from tests.attention.causal import causal_metadata
from tests.attention.ragged import Batch, Model, Shape, build_batch, layers, shapes
from tests.kernels.tables import native_attention
from tests.reference.draft_trees import ancestor_masks

EXACT = TorchAttention(in_order=True)
BACKENDS = [
    pytest.param(native_attention(), torch.float32, id="cpu-float32"),
    pytest.param(native_attention(), torch.bfloat16, id="cpu-bfloat16"),
    pytest.param(EXACT, torch.float32, id="reference-float32"),
    pytest.param(EXACT, torch.float64, id="reference-float64"),
]
BLOCK_SIZE = 4


def as_text(
    attention: AttentionBackend, batch: Batch, shape: Shape, row: int, form: AttentionForm
) -> Tensor:
    """[H, C]: what the row answers where the tokens that it sees are all there is."""
    keys = list(range(shape.context_len + min(row + 1, shape.num_causal)))
    if row >= shape.num_causal:
        bits = ancestor_masks(shape.parents)[row - shape.num_causal]
        keys += [shape.first_draft + j for j in range(len(shape.parents)) if bits >> j & 1]
    num_blocks = -(-len(keys) // BLOCK_SIZE)
    cache = LayerCache(
        *(
            torch.zeros(num_blocks, BLOCK_SIZE, *all_KGC.shape[1:], dtype=all_KGC.dtype)
            for all_KGC in (batch.k_by_request[0], batch.v_by_request[0])
        )
    )
    all_K = torch.arange(len(keys))
    attention.write(batch.k_by_request[0][keys], batch.v_by_request[0][keys], cache, all_K)
    table_P = torch.arange(num_blocks, dtype=torch.int32)
    metadata = causal_metadata(len(keys) - 1, 1, all_K[-1:], table_P)
    return attention.attend(batch.q_THC[row : row + 1], cache, metadata, form)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "dtype"), BACKENDS)
@settings(max_examples=25, deadline=None)
@given(
    shape=shapes(max_context=200, max_causal=5).filter(lambda shape: shape.drafts is None),
    layer=layers(80),
    seed=st.integers(0, 99),
)
def test_a_row_of_a_tree_is_the_same_as_the_end_of_its_text(attention, dtype, shape, layer, seed):
    model, form = layer
    model = replace(model, block_size=BLOCK_SIZE)
    batch = build_batch([shape], model, dtype, seed)

    got_THC = attention.attend(batch.q_THC, batch.cache, batch.metadata, form)

    for row in range(shape.num_rows):
        assert torch.equal(got_THC[row], as_text(attention, batch, shape, row, form))


@pytest.mark.parametrize(("attention", "dtype"), BACKENDS)
def test_a_request_is_the_same_beside_longer_ones(attention, dtype):
    model, small = Model(4, 2, 16, BLOCK_SIZE), Shape(21, 3, (0, 0, 1, 2, 2))
    alone = build_batch([small], model, dtype, seed=3)
    want_THC = attention.attend(alone.q_THC, alone.cache, alone.metadata, AttentionForm(0.4))

    others = [Shape(150, 40, ()), Shape(90, 1, (0, 1, 2))]
    beside = build_batch([small, *others], model, dtype, seed=4)
    first = slice(0, small.num_rows)
    beside.q_THC[first] = alone.q_THC
    for both_PSGC, own_KGC in (
        (beside.cache.k_PSGC, alone.k_by_request[0]),
        (beside.cache.v_PSGE, alone.v_by_request[0]),
    ):
        keys_K = torch.arange(small.seq_len)
        blocks_K = beside.metadata.block_table_BP[0][keys_K // BLOCK_SIZE].long()
        both_PSGC[blocks_K, keys_K % BLOCK_SIZE] = own_KGC
    got_THC = attention.attend(beside.q_THC, beside.cache, beside.metadata, AttentionForm(0.4))

    assert torch.equal(got_THC[first], want_THC)


@pytest.mark.parametrize(("attention", "dtype"), BACKENDS)
@pytest.mark.parametrize("head_size", [32, 64, 80])
@pytest.mark.parametrize("form", [AttentionForm(0.2), AttentionForm(0.2, window=70, soft_cap=5.0)])
def test_few_rows_are_the_same_as_among_many(attention, dtype, head_size, form):
    """Few may meet keys where they lie, which many find laid out."""
    model, whole = Model(8, 4, head_size, 16), Shape(150, 40, ())
    batch = build_batch([whole], model, dtype, seed=5)
    want_THC = attention.attend(batch.q_THC, batch.cache, batch.metadata, form)

    for first, count in ((0, 1), (7, 3), (32, 8)):
        rows = slice(first, first + count)
        metadata = causal_metadata(
            whole.context_len + first,
            count,
            batch.metadata.slots_T[rows],
            batch.metadata.block_table_BP[0],
        )
        got_THC = attention.attend(batch.q_THC[rows], batch.cache, metadata, form)
        assert torch.equal(got_THC, want_THC[rows])
