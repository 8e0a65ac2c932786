"""Contexts that have parts in the compiled attention: long ones, and short ones in float32."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outdraft.attention.base import AttentionBackend, AttentionForm
from outdraft.kernels.native.attention import NativeAttention
from outdraft.kernels.torch.attention import TorchAttention
from tests.attention.ragged import Batch, Model, Shape, build_batch, converted, models, sinks, trees
from tests.kernels.tables import each_library, native_attention

PART = 2048  # as in csrc/attention_tiles.h; in float32 four of 64, then two for each power of two
REFERENCE = TorchAttention()
PLAIN = AttentionForm(0.3)
BUSH = (0, 0, 1, 1, 2, 3, 4)


each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def native(name: str, num_threads: int = 1) -> NativeAttention:
    return native_attention(num_threads, name)


def attend(attention: AttentionBackend, batch: Batch, form: AttentionForm = PLAIN) -> Tensor:
    return attention.attend(batch.q_THC, batch.cache, batch.metadata, form)


def exact(batch: Batch, form: AttentionForm = PLAIN) -> Tensor:
    cache = converted(batch.cache, torch.float64)
    return REFERENCE.attend(batch.q_THC.double(), cache, batch.metadata, form)


def near(*numbers: int) -> st.SearchStrategy[int]:
    return st.one_of([st.integers(max(0, number - 70), number + 70) for number in numbers])


@st.composite
def long_shapes(draw: st.DrawFn) -> Shape:
    context_len = draw(near(0, 64, 256, 384, PART, PART, 2 * PART))
    parents = draw(trees())
    num_causal = draw(st.sampled_from([1, 1, 2, 40, 130]))
    if not parents or draw(st.booleans()):
        return Shape(context_len, num_causal, parents)
    drafts = st.lists(st.integers(0, len(parents) - 1), min_size=1, unique=True)
    num_causal = 0 if context_len > 0 and draw(st.booleans()) else num_causal
    return Shape(context_len, num_causal, parents, tuple(draw(drafts)))


@pytest.mark.slow
@each_library
@settings(max_examples=25, deadline=None)
@given(
    requests=st.lists(long_shapes(), min_size=1, max_size=3),
    model=models(),
    windows=st.tuples(*[st.one_of(st.none(), near(71, PART))] * 2),
    soft_cap=st.none() | st.just(3.0),
    has_sinks=st.booleans(),
    cache_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_parts_equal_the_reference_and_threads_change_no_bit(
    name, requests, model, windows, soft_cap, has_sinks, cache_dtype, seed
):
    form = AttentionForm(0.3, *windows, soft_cap, sinks(model, seed) if has_sinks else None)
    batch = build_batch(requests, model, cache_dtype, seed)
    batch = dataclasses.replace(batch, q_THC=batch.q_THC.float())
    got = attend(native(name), batch, form)
    # Scores reach 50, so that their rounding in float32 changes weights by some 1e-5.
    torch.testing.assert_close(got.double(), exact(batch, form), rtol=1e-5, atol=3e-5)
    assert torch.equal(attend(native(name, 2), batch, form), got)
    assert torch.equal(attend(native(name, 3), batch, form), got)


@each_library
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(
    ("shape", "window"),
    [
        (Shape(PART + 20, 40, ()), 40),  # the first part is empty for the last rows
        (Shape(PART - 20, 40, ()), None),  # the last part is empty for the first rows
        (Shape(2 * PART - 9, 1, tuple(range(20))), PART),  # both
        (Shape(PART - 3, 1, BUSH), 3),
        (Shape(3 * PART, 1, BUSH), 5),  # only the last part is seen
        (Shape(4 * PART - 9, 40, ()), None),  # parts grow no more
    ],
)
def test_parts_that_some_rows_do_not_see_change_nothing(name, num_threads, shape, window):
    attention = native(name, num_threads)
    batch = build_batch([shape], Model(4, 2, 16, 16), torch.float32, seed=5)
    form = AttentionForm(0.3, window)
    got = attend(attention, batch, form)
    torch.testing.assert_close(got.double(), exact(batch, form), rtol=1e-5, atol=1e-5)


FORMS = {
    "plain": PLAIN,
    "a short window": AttentionForm(0.3, window=100),
    "a long window": AttentionForm(0.3, window=2500),
    "chunks": AttentionForm(0.3, chunk=700),
    "a cap": AttentionForm(0.3, soft_cap=2.0),
    "sinks and a window": AttentionForm(0.3, 90, sinks_H=torch.tensor([-3.0, 0.0, 2.0, 9.0])),
}


@each_library
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    ("context_len", "model"),
    [
        (0, Model(4, 2, 16, 16, 24)),
        (20, Model(4, 4, 192, 16, 128)),  # so large that threads share it
        (250, Model(4, 2, 64, 16)),
        (PART - 5, Model(4, 2, 16, 16, 24)),
    ],
)
@each_dtype
def test_a_row_reads_the_same_bits_alone_and_in_a_chunk_across_parts(
    name, num_threads, form, context_len, model, dtype
):
    attention = native(name, num_threads)
    batch = build_batch([Shape(context_len, 70, ())], model, dtype, seed=6)
    batch = dataclasses.replace(batch, q_THC=batch.q_THC.to(dtype))
    together = attend(attention, batch, form)
    for row in range(70):
        metadata = dataclasses.replace(
            batch.metadata,
            query_start_B1=torch.tensor([0, 1], dtype=torch.int32),
            context_lens_B=batch.metadata.context_lens_B + row,
            num_causal_B=torch.ones(1, dtype=torch.int32),
            ancestors_T=batch.metadata.ancestors_T[row : row + 1],
            positions_T=batch.metadata.positions_T[row : row + 1],
            slots_T=batch.metadata.slots_T[row : row + 1],
            max_rows=1,
        )
        q_THC = batch.q_THC[row : row + 1]
        part = dataclasses.replace(batch, q_THC=q_THC, metadata=metadata)
        alone = attend(attention, part, form)
        assert torch.equal(alone, together[row : row + 1])


@each_library
@each_dtype
def test_a_long_request_reads_the_same_bits_alone_and_in_a_batch(name, dtype):
    model, requests = Model(2, 1, 8, 16), [Shape(2 * PART + 9, 1, BUSH), Shape(PART, 300, ())]
    both = build_batch(requests, model, dtype, seed=3)
    both = dataclasses.replace(both, q_THC=both.q_THC.to(dtype))
    alone = build_batch(requests[:1], model, dtype, seed=3)
    alone = dataclasses.replace(alone, q_THC=both.q_THC[:8])
    assert torch.equal(attend(native(name), alone), attend(native(name, 3), both)[:8])


@each_library
@pytest.mark.parametrize("num_threads", [1, 3])
def test_scores_of_other_parts_may_be_far_higher(name, num_threads):
    attention = native(name, num_threads)
    batch = build_batch([Shape(3 * PART, 2, (0, 0))], Model(2, 1, 8, 4), torch.float32, seed=4)
    batch = dataclasses.replace(batch, q_THC=3e4 * batch.q_THC)
    got = attend(attention, batch)
    torch.testing.assert_close(got.double(), exact(batch), rtol=1e-2, atol=1e-2)


@each_library
@pytest.mark.parametrize("bad", ["k_PSGC", "v_PSGE"])
@pytest.mark.parametrize("key", [0, PART, 2 * PART + 5])
def test_a_nan_in_any_part_is_not_lost_and_stays_in_its_request(name, bad, key):
    requests = [Shape(2 * PART + 9, 1, ()), Shape(PART + 9, 1, ())]
    batch = build_batch(requests, Model(2, 1, 8, 4), torch.float32, seed=4)
    block = batch.metadata.block_table_BP[0, key // 4]
    getattr(batch.cache, bad)[block, key % 4] = torch.nan
    for attention in (native(name), native(name, 3)):
        got = attend(attention, batch)
        assert got[0].isnan().all()
        assert not got[1].isnan().any()
