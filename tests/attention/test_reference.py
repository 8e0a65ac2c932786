"""The reference attention against rows computed one by one in plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from outdraft.attention.base import AttentionForm, LayerCache
from outdraft.kernels.torch.attention import MAX_ELEMENTS, TorchAttention
from tests.attention.causal import causal_metadata
from tests.attention.ragged import Batch, Model, Shape, build_batch, build_metadata, layers, shapes
from tests.kernels.tables import native_attention
from tests.reference.dense_attention import DenseRequest, attend_row
from tests.reference.draft_trees import tree_depths

SMALL = shapes(max_context=9, max_causal=5, max_drafts=9)
SMALL_MODELS = st.builds(
    lambda heads, *sizes: Model(*heads, *sizes),
    st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
    st.just(3),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([2, 3, 5]),
)
WINDOWS = st.one_of(st.none(), st.integers(1, 12))


def dense_rows(batch: Batch, requests: list[Shape], form: AttentionForm) -> torch.Tensor:
    rows = []
    for b, shape in enumerate(requests):
        start = int(batch.metadata.query_start_B1[b])
        dense = DenseRequest(
            context_len=shape.context_len,
            num_causal=shape.num_causal,
            parents=list(shape.parents),
            drafts=list(shape.drafted_rows),
            keys=batch.k_by_request[b].tolist(),
            values=batch.v_by_request[b].tolist(),
            queries=batch.q_THC[start : start + shape.num_rows].tolist(),
        )
        rows += [attend_row(dense, row, form) for row in range(shape.num_rows)]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(SMALL, min_size=1, max_size=3),
    layer=layers(12, of=SMALL_MODELS),
    max_elements=st.sampled_from([1, 100, 1000, MAX_ELEMENTS]),
    seed=st.integers(0, 999),
    in_order=st.booleans(),
)
def test_reference_equals_rows_computed_one_by_one(requests, layer, max_elements, seed, in_order):
    model, form = layer
    batch = build_batch(requests, model, torch.float64, seed)
    attention = TorchAttention(max_elements, in_order=in_order)
    got = attention.attend(batch.q_THC, batch.cache, batch.metadata, form)
    want = dense_rows(batch, requests, form)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(context_len=st.integers(0, 30), size=st.integers(0, 63), window=WINDOWS)
def test_a_drafted_chain_reads_what_the_same_tokens_read_as_causal_rows(context_len, size, window):
    chain = Shape(context_len, 1, tuple(range(size)))
    causal = Shape(context_len, 1 + size, ())
    model, attention = Model(4, 2, 8, 4), TorchAttention()
    drafted, plain = (build_batch([s], model, torch.float64, seed=5) for s in (chain, causal))
    got = attention.attend(
        drafted.q_THC, drafted.cache, drafted.metadata, AttentionForm(0.5, window)
    )
    want = attention.attend(plain.q_THC, plain.cache, plain.metadata, AttentionForm(0.5, window))
    assert torch.equal(got, want)


@pytest.mark.parametrize("attention", [TorchAttention(), native_attention()])
@pytest.mark.parametrize("window", [None, 3, 11])
def test_a_tree_read_level_by_level_reads_what_it_reads_at_once(attention, window):
    parents = (0, 0, 1, 2, 2, 3, 5, 1)
    model, whole = Model(4, 2, 8, 4), Shape(9, 1, parents)
    batch = build_batch([whole], model, torch.float32, seed=5)
    want = attention.attend(batch.q_THC, batch.cache, batch.metadata, AttentionForm(0.5, window))
    depths = tree_depths(parents)
    for depth in range(1, max(depths) + 1):
        level = tuple(j for j in reversed(range(len(parents))) if depths[j] == depth)
        part = build_metadata([Shape(10, 0, parents, level)], model.block_size, seed=5)
        assert torch.equal(part.block_table_BP, batch.metadata.block_table_BP)
        rows_L = torch.tensor([1 + j for j in level])
        got = attention.attend(batch.q_THC[rows_L], batch.cache, part, AttentionForm(0.5, window))
        torch.testing.assert_close(got, want[rows_L], rtol=1e-6, atol=1e-6)


def test_rows_behind_the_last_request_are_zero():
    batch = build_batch([Shape(3, 2, (0, 0))], Model(2, 1, 4, 4), torch.float64, seed=1)
    padding = torch.ones(2, 2, 4, dtype=torch.float64)
    q_THC = torch.cat([batch.q_THC, padding])
    got = TorchAttention().attend(q_THC, batch.cache, batch.metadata, AttentionForm(1.0))
    want = TorchAttention().attend(batch.q_THC, batch.cache, batch.metadata, AttentionForm(1.0))
    assert torch.equal(got, torch.cat([want, torch.zeros_like(padding)]))


class _Sizes(TorchDispatchMode):
    """The largest tensor that is made, and the elements of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        if isinstance(made, torch.Tensor) and func.__name__.split(".")[0] != "expand":
            self.largest = max(self.largest, made.numel())
            self.total += made.numel()
        return made


def sizes(requests: list[Shape], model: Model, max_elements: int = MAX_ELEMENTS) -> _Sizes:
    batch = build_batch(requests, model, torch.float32, seed=0)
    with _Sizes() as made:
        TorchAttention(max_elements).attend(
            batch.q_THC, batch.cache, batch.metadata, AttentionForm(1.0)
        )
    return made


def test_a_long_prompt_chunk_does_not_make_every_request_as_long():
    model = Model(4, 2, 8, 16)
    prompt, others = Shape(0, 256, ()), [Shape(300, 1, (0, 1))] * 32
    alone, beside = sizes([prompt], model), sizes([*others[:9], prompt, *others[9:]], model)
    every_row_padded = 33 * 256 * 4 * 303
    assert beside.largest < 1.3 * 256 * 4 * 303 < every_row_padded / 20
    assert beside.total < alone.total * 303 / 256 + 3 * sizes(others, model).total


def test_no_temporary_is_larger_than_allowed_but_for_one_row_or_one_request():
    model = Model(4, 2, 8, 16)
    requests = [Shape(300, 1, (0, 1))] * 20 + [Shape(0, 250, ())] + [Shape(9, 40, ())] * 3
    keys, scores = 304 * 2 * 8, 303 * 4
    assert sizes(requests, model).largest > 20_000
    for max_elements in (20_000, 1):
        largest = sizes(requests, model, max_elements).largest
        assert largest <= max(max_elements, keys, scores, 433 * 4 * 8)  # or all queries


def test_write_stores_at_slots_and_drops_rows_without_one():
    shape = (3, 2, 1, 4)
    cache = LayerCache(torch.zeros(shape), torch.zeros(shape))
    k_TGC, v_TGC = torch.randn(4, 1, 4), torch.randn(4, 1, 4)
    TorchAttention().write(k_TGC, v_TGC, cache, torch.tensor([-1, 5, 0, -1]))
    for new_TGC, cached_PSGC in ((k_TGC, cache.k_PSGC), (v_TGC, cache.v_PSGE)):
        want = torch.zeros(6, 1, 4)
        want[5], want[0] = new_TGC[1], new_TGC[2]
        assert torch.equal(cached_PSGC.flatten(0, 1), want)


def test_writing_only_rows_without_a_slot_leaves_the_cache_untouched():
    k_PSGC, v_PSGE = torch.randn(3, 2, 1, 4), torch.randn(3, 2, 1, 4)
    cache = LayerCache(k_PSGC.clone(), v_PSGE.clone())
    new_TGC = torch.randn(2, 1, 4)
    TorchAttention().write(new_TGC, new_TGC, cache, torch.tensor([-1, -1]))
    assert torch.equal(cache.k_PSGC, k_PSGC)
    assert torch.equal(cache.v_PSGE, v_PSGE)


def test_causal_metadata_is_ordinary_causal_attention():
    k_TGC, q_TGC = torch.randn(10, 2, 4).double(), torch.randn(10, 2, 4).double()
    blocks_P = torch.tensor([2, 0, 1], dtype=torch.int32)
    cache = LayerCache(*(torch.zeros(3, 4, 2, 4, dtype=torch.float64) for _ in range(2)))
    slots_T = blocks_P.long()[torch.arange(10) // 4] * 4 + torch.arange(10) % 4
    attention = TorchAttention()
    attention.write(k_TGC, -k_TGC, cache, slots_T)
    metadata = causal_metadata(4, 6, slots_T[4:], blocks_P)
    got = attention.attend(q_TGC[4:], cache, metadata, AttentionForm(0.5))
    q, k = q_TGC.transpose(0, 1), k_TGC.transpose(0, 1)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, -k, is_causal=True, scale=0.5)
    torch.testing.assert_close(got, want.transpose(0, 1)[4:], rtol=1e-12, atol=1e-12)
