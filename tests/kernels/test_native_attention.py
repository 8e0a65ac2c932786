"""Attention of the compiled library against the reference, and bit for bit against itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.attention.base import AttentionForm, LayerCache
from outdraft.kernels.native.attention import NativeAttention
from outdraft.kernels.torch.attention import TorchAttention
from tests.attention.ragged import Model, Shape, build_batch, converted, layers, shapes
from tests.kernels.tables import each_library, native_attention

REFERENCE = TorchAttention()
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of the result's dtype


def native(name: str, num_threads: int = 1) -> NativeAttention:
    return native_attention(num_threads, name)


@pytest.mark.slow
@each_library
@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(shapes(), min_size=1, max_size=4),
    layer=layers(200),
    query_dtype=DTYPES,
    cache_dtype=DTYPES,
    seed=st.integers(0, 999),
)
def test_it_equals_the_reference(name, requests, layer, query_dtype, cache_dtype, seed):
    model, form = layer
    batch = build_batch(requests, model, cache_dtype, seed)
    q_THC = batch.q_THC.to(query_dtype)
    got = native(name).attend(q_THC, batch.cache, batch.metadata, form)
    exact = converted(batch.cache, torch.float64)
    want = REFERENCE.attend(q_THC.double(), exact, batch.metadata, form)
    assert got.dtype == query_dtype
    tolerance = TOLERANCE[query_dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@each_library
@settings(max_examples=25, deadline=None)
@given(context_len=st.integers(0, 200), size=st.integers(0, 63), seed=st.integers(0, 99))
def test_a_drafted_chain_reads_what_the_same_tokens_read_as_causal_rows(
    name, context_len, size, seed
):
    model = Model(8, 4, 16, 16)
    chain, causal = Shape(context_len, 1, tuple(range(size))), Shape(context_len, 1 + size, ())
    drafted, plain = (build_batch([s], model, torch.float32, seed) for s in (chain, causal))
    got = native(name).attend(drafted.q_THC, drafted.cache, drafted.metadata, AttentionForm(0.25))
    want = native(name).attend(plain.q_THC, plain.cache, plain.metadata, AttentionForm(0.25))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@each_library
def test_a_request_reads_the_same_alone_and_in_a_batch(name):
    model, requests = Model(8, 4, 16, 16), [Shape(100, 3, (0, 0, 1)), Shape(0, 50, ())]
    both = build_batch(requests, model, torch.float32, seed=3)
    alone = build_batch(requests[:1], model, torch.float32, seed=3)
    num_rows = requests[0].num_rows
    alone_q = both.q_THC[:num_rows]
    got = native(name).attend(both.q_THC, both.cache, both.metadata, AttentionForm(0.25))[:num_rows]
    assert torch.equal(
        native(name).attend(alone_q, alone.cache, alone.metadata, AttentionForm(0.25)), got
    )


@each_library
def test_threads_change_no_bit(name):
    requests = [Shape(700, 300, ()), Shape(30, 200, tuple(range(40)))]
    batch = build_batch(requests, Model(8, 4, 32, 16), torch.float32, seed=2)
    arguments = (batch.q_THC, batch.cache, batch.metadata, AttentionForm(0.2))
    assert torch.equal(native(name, 3).attend(*arguments), native(name).attend(*arguments))


@each_library
def test_very_high_scores_do_not_overflow(name):
    batch = build_batch([Shape(200, 2, (0, 0))], Model(2, 1, 8, 4), torch.float32, seed=4)
    got = native(name).attend(batch.q_THC, batch.cache, batch.metadata, AttentionForm(1e4, 50))
    want = REFERENCE.attend(
        batch.q_THC.double(),
        converted(batch.cache, torch.float64),
        batch.metadata,
        AttentionForm(1e4, 50),
    )
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)


@each_library
@pytest.mark.parametrize("bad", ["k_PSGC", "v_PSGE"])
def test_a_nan_in_one_request_stays_there(name, bad):
    requests = [Shape(60, 2, ()), Shape(20, 2, ())]
    batch = build_batch(requests, Model(2, 1, 8, 4), torch.float32, seed=4)
    blocks = batch.metadata.block_table_BP[0, :16]
    getattr(batch.cache, bad)[blocks] = torch.nan
    for attention in (native(name), REFERENCE):
        got = attention.attend(batch.q_THC, batch.cache, batch.metadata, AttentionForm(0.5))
        assert got[:2].isnan().all()
        assert not got[2:].isnan().any()


@each_library
def test_rows_behind_the_last_request_are_zero(name):
    batch = build_batch([Shape(3, 2, (0, 0))], Model(2, 1, 4, 4), torch.float32, seed=1)
    q_THC = torch.cat([batch.q_THC, torch.ones(2, 2, 4)])
    assert not native(name).attend(q_THC, batch.cache, batch.metadata, AttentionForm(1.0))[4:].any()


@each_library
def test_a_slice_of_a_fused_projection_is_read_in_place_and_right(name):
    batch = build_batch([Shape(40, 5, (0, 1, 0))], Model(4, 2, 8, 4), torch.float32, seed=1)
    fused = torch.randn(len(batch.q_THC), 4 * 8 + 2 * 2 * 8)
    q_THC = fused[:, : 4 * 8].unflatten(1, (4, 8))
    got = native(name).attend(q_THC, batch.cache, batch.metadata, AttentionForm(1.0))
    assert torch.equal(
        got, native(name).attend(q_THC.clone(), batch.cache, batch.metadata, AttentionForm(1.0))
    )
    every_second = torch.randn(len(batch.q_THC), 4, 16)[:, :, ::2]
    got = native(name).attend(every_second, batch.cache, batch.metadata, AttentionForm(1.0))
    want = native(name).attend(
        every_second.clone(), batch.cache, batch.metadata, AttentionForm(1.0)
    )
    assert torch.equal(got, want)


@each_library
@settings(max_examples=60, deadline=None)
@given(new_dtype=DTYPES, cache_dtype=DTYPES, data=st.data())
def test_write_equals_reference_and_drops_rows_without_a_slot(name, new_dtype, cache_dtype, data):
    free = data.draw(st.permutations(range(12)))
    slots_T = torch.tensor([s if data.draw(st.booleans()) else -1 for s in free[:7]])
    fused = torch.randn(7, 3 * 2 * 5).to(new_dtype)
    k_TGC, v_TGC = fused[:, 10:20].unflatten(1, (2, 5)), fused[:, 20:].unflatten(1, (2, 5))
    before = LayerCache(*(torch.randn(3, 4, 2, 5).to(cache_dtype) for _ in range(2)))
    got, want = converted(before, torch.float64), converted(before, torch.float64)
    got, want = converted(got, cache_dtype), converted(want, cache_dtype)
    native(name).write(k_TGC, v_TGC, got, slots_T)
    REFERENCE.write(k_TGC, v_TGC, want, slots_T)
    assert torch.equal(got.k_PSGC, want.k_PSGC)
    assert torch.equal(got.v_PSGE, want.v_PSGE)
    kept = torch.ones(12, dtype=torch.bool)
    kept[slots_T[slots_T >= 0]] = False
    assert torch.equal(got.k_PSGC.flatten(0, 1)[kept], before.k_PSGC.flatten(0, 1)[kept])


@each_library
def test_rounding_to_bfloat16_is_that_of_pytorch(name):
    bits = torch.randint(-(2**31), 2**31 - 1, (1, 1, 4096), dtype=torch.int32)
    bits[0, 0, :4] = torch.tensor([0x3F808000, 0x3F818000, 0x7F800000, 0x7FFFFFFF])
    new_TGC = bits.view(torch.float32)
    cache = LayerCache(*(torch.zeros(1, 1, 1, 4096, dtype=torch.bfloat16) for _ in range(2)))
    native(name).write(new_TGC, new_TGC, cache, torch.tensor([0]))
    want = new_TGC.bfloat16().flatten()
    torch.testing.assert_close(cache.k_PSGC.flatten(), want, rtol=0, atol=0, equal_nan=True)


@each_library
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_are_refused_by_name(name, dtype):
    batch = build_batch([Shape(3, 1, ())], Model(2, 1, 4, 4), dtype, seed=1)
    with pytest.raises(AssertionError, match=str(dtype)):
        native(name).attend(batch.q_THC, batch.cache, batch.metadata, AttentionForm(1.0))


@each_library
def test_a_row_may_have_fewer_ancestors_than_its_position_says(name):
    batch = build_batch([Shape(20, 1, (0, 0, 1, 2))], Model(4, 2, 16, 4), torch.float32, seed=1)
    batch.metadata.positions_T[4] += 3
    got = native(name).attend(batch.q_THC, batch.cache, batch.metadata, AttentionForm(0.25))
    want = REFERENCE.attend(batch.q_THC, batch.cache, batch.metadata, AttentionForm(0.25))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
