"""Whole passes of decoders: against the layers in float64, and bit for bit against themselves."""

import gc

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from outdraft.attention.rows import Span
from outdraft.kernels.native.decoder import NativeDecoder
from outdraft.kernels.torch.decoder import TorchDecoder
from outdraft.kernels.torch.table import reference_kernels
from tests.kernels.comparisons import Case
from tests.kernels.decoders import (
    NUM_POSITIONS,
    NUM_TOKENS,
    Sizes,
    batch_of,
    batch_with_logits,
    blocks_of,
    filled_cache,
    make_cache,
    make_spec,
    read_chunks,
    rows_for,
)
from tests.kernels.tables import cpu_kernels, each_library
from tests.rounding import MODEL_ROUNDING

EXACT = torch.float64
# A number of bfloat16 is off by 2 ** -9 of its size; some dozen of these add up on the way.
BOUNDS = {torch.float32: MODEL_ROUNDING, torch.bfloat16: 32 * 2.0**-9}
KINDS = {
    "plain": Sizes(),
    "windows": Sizes(windows=(None, 70), heads=(6, 2)),
    "norms-and-biases": Sizes(has_biases=True, has_head_norms=True, hidden=40, head_size=20),
    "pair": Sizes(entry="pair", windows=(None,), has_final_norm=False, has_draft_ids=True),
    "normed-pair": Sizes(entry="normed pair", has_draft_ids=True),
    "fused": Sizes(entry="fused", has_final_norm=False, has_biases=True),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_dtype = pytest.mark.parametrize("dtype", BOUNDS, ids=["float32", "bfloat16"])


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape
    size = max(1.0, float(want.abs().max())) if want.numel() else 1.0
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=BOUNDS[dtype] * size)


@st.composite
def drawn_sizes(draw: st.DrawFn) -> Sizes:
    window = st.none() | st.integers(1, 40)
    return Sizes(
        hidden=draw(st.sampled_from([16, 40, 130])),
        intermediate=draw(st.sampled_from([24, 96])),
        heads=draw(st.sampled_from([(1, 1), (4, 2), (6, 2)])),
        head_size=draw(st.sampled_from([4, 16, 36])),
        windows=tuple(draw(st.lists(window, min_size=1, max_size=3))),
        has_biases=draw(st.booleans()),
        has_head_norms=draw(st.booleans()),
        entry=draw(st.sampled_from([None, "pair", "normed pair", "fused"])),
        has_final_norm=draw(st.booleans()),
        has_draft_ids=draw(st.booleans()),
    )


def compare_compile_decoder(case: Case) -> None:
    """Prompts of two requests, then a tree of one beside a chunk of the other."""
    sizes, seed = case.data.draw(drawn_sizes(), "sizes"), case.data.draw(st.integers(0, 99), "seed")
    first, second = (case.data.draw(st.integers(1, 40), "rows") for _ in range(2))
    up = case.data.draw(st.sampled_from([(), (0, 1, 2), (0, 0, 1, 3)]), "parents")
    leaves_out = case.data.draw(st.booleans(), "rows without logits are left out")
    has_taps = case.data.draw(st.booleans(), "taps") or not leaves_out
    taps = (len(sizes.windows), 0) if has_taps else ()
    passes = [
        [Span(0, first, (), blocks_of(0)), Span(0, second, (), blocks_of(1))],
        [Span(first, 1, up, blocks_of(0)), Span(second, 3, (), blocks_of(1))],
    ]
    found: list[list[Tensor]] = []
    # Triton's interpreter multiplies bfloat16 numbers as if they were integers.
    dtype_here = torch.float32 if case.kernels.name == "triton" else case.dtype
    for kernels, dtype in ((case.kernels, dtype_here), (reference_kernels(), EXACT)):
        decoder = kernels.compile_decoder(make_spec(sizes, kernels, dtype, seed))
        cache, results = make_cache(sizes, dtype), list[Tensor]()
        for number, spans in enumerate(passes):
            metadata, logit_rows_R = batch_with_logits(spans)
            ids_T, states_TD = rows_for(len(metadata.slots_T), sizes.hidden, dtype, seed + number)
            states_TD = states_TD if sizes.entry else None
            wanted_R = logit_rows_R if leaves_out else None
            results += decoder(ids_T, cache.layers, metadata, taps, states_TD, wanted_R)
            results.append(decoder.logits(results[-2]))
        found.append(
            [*results, *(x for layer in cache.layers for x in (layer.k_PSGC, layer.v_PSGE))]
        )
    for got, want in zip(*found, strict=True):
        assert_near(got, want, dtype_here)


@each_library
@each_kind
@each_dtype
def test_a_row_has_the_same_bits_in_chunks_of_any_size(name, kind, dtype):
    sizes, kernels = KINDS[kind], cpu_kernels(1, name)
    decoder = kernels.compile_decoder(make_spec(sizes, kernels, dtype))
    whole, whole_taps, whole_cache = read_chunks(decoder, sizes, dtype, [100], (1, 0))
    for chunk in (1, 3, 8, 33, 65):
        chunks = [chunk] * (100 // chunk) + [100 % chunk] * (100 % chunk > 0)
        parts, taps, cache = read_chunks(decoder, sizes, dtype, chunks, (1, 0))
        assert torch.equal(parts, whole)
        assert torch.equal(taps, whole_taps)
        for mine, other in zip(cache.layers, whole_cache.layers, strict=True):
            assert torch.equal(mine.k_PSGC, other.k_PSGC)
            assert torch.equal(mine.v_PSGE, other.v_PSGE)


@each_library
@each_kind
@each_dtype
def test_rows_that_are_left_out_change_no_bit_of_the_others(name, kind, dtype):
    sizes, kernels = KINDS[kind], cpu_kernels(1, name)
    decoder = kernels.compile_decoder(make_spec(sizes, kernels, dtype))
    tree = Span(100, 3, (0, 0, 1, 3), blocks_of(1))
    unread, chain = Span(30, 20, (), blocks_of(2), samples=False), Span(90, 2, (0, 1), blocks_of(0))
    batches = [batch_with_logits(spans) for spans in ([tree, unread, chain], [unread, tree])]
    chosen = [*batches, (batches[0][0], torch.tensor([6])), (batches[0][0], torch.empty(0).long())]
    for metadata, wanted_R in chosen:
        ids_T, states_TD = rows_for(len(metadata.slots_T), sizes.hidden, dtype, 3)
        entry = states_TD if sizes.entry else None
        found = []
        last = len(sizes.windows)
        taps = (last - 1, 0)
        for rows_R, tapped in ((None, taps), (wanted_R, ()), (wanted_R, taps), (wanted_R, (last,))):
            cache = filled_cache(sizes, dtype)
            states_RD, taps_TKD = decoder(ids_T, cache.layers, metadata, tapped, entry, rows_R)
            keys = [x for layer in cache.layers for x in (layer.k_PSGC, layer.v_PSGE)]
            found.append((states_RD, keys, taps_TKD))
        all_TD, all_keys, all_taps_TKD = found[0]
        for wanted_RD, keys, _ in found[1:]:
            assert torch.equal(wanted_RD, all_TD[wanted_R])
            assert all(map(torch.equal, keys, all_keys))
        assert torch.equal(found[2][2], all_taps_TKD)
        assert found[3][2].shape[0] == len(all_TD)


@each_library
@each_dtype
def test_threads_change_no_bit(name, dtype):
    """Nor do chunks, of one row or of many."""
    sizes, results = Sizes(hidden=256, intermediate=384, windows=(None, 70)), []
    for num_threads in (1, 2, 3):
        kernels = cpu_kernels(num_threads, name)
        decoder = kernels.compile_decoder(make_spec(sizes, kernels, dtype))
        for chunks in ([150], [1] * 3 + [147]):
            states_TD = read_chunks(decoder, sizes, dtype, chunks)[0]
            results.append((states_TD, decoder.logits(states_TD)))
    for states_TD, logits_TN in results[1:]:
        assert torch.equal(states_TD, results[0][0])
        assert torch.equal(logits_TN, results[0][1])


@each_library
def test_rows_beyond_a_block_are_computed_as_those_before(name):
    sizes, kernels = Sizes(windows=(None,)), cpu_kernels(1, name)
    decoder = kernels.compile_decoder(make_spec(sizes, kernels, torch.float32))
    cache = make_cache(sizes, torch.float32)
    spans = [Span(0, 140, (), blocks_of(request)) for request in range(3)]
    ids_T, _ = rows_for(140, sizes.hidden, torch.float32, 1)
    together_TD, _ = decoder(ids_T.repeat(3), cache.layers, batch_of(spans))
    alone_TD, _ = decoder(ids_T, cache.layers, batch_of(spans[:1]))
    assert torch.equal(together_TD, alone_TD.repeat(3, 1))


@each_library
@pytest.mark.parametrize("kind", ["plain", "pair"])
@each_dtype
def test_the_best_tokens_are_the_argmax_of_the_logits(name, kind, dtype):
    sizes, kernels = KINDS[kind], cpu_kernels(1, name)
    spec = make_spec(sizes, kernels, dtype)
    decoder = kernels.compile_decoder(spec)
    _, states_RD = rows_for(150, sizes.hidden, dtype, 4)
    best_R = decoder.logits(states_RD).argmax(1)
    want_R = best_R if spec.draft_ids_N is None else spec.draft_ids_N[best_R]
    for rows in (slice(0, 150), slice(3, 4), slice(0, 150, 2)):
        ids_R, is_finite_R = decoder.best_tokens(states_RD[rows])
        assert torch.equal(ids_R, want_R[rows])
        assert is_finite_R.all()


@each_library
def test_logits_without_a_best_one_are_told(name):
    sizes, kernels = Sizes(), cpu_kernels(1, name)
    decoder = kernels.compile_decoder(make_spec(sizes, kernels, torch.float32))
    _, states_RD = rows_for(4, sizes.hidden, torch.float32, 4)
    states_RD[1] = torch.nan
    states_RD[3, 0] = torch.inf
    ids_R, is_finite_R = decoder.best_tokens(states_RD)
    assert is_finite_R.tolist() == [True, False, True, False]
    assert torch.equal(ids_R, decoder.logits(states_RD).argmax(1))


@pytest.mark.parametrize(("token", "position"), [(NUM_TOKENS, 0), (-1, 0), (0, NUM_POSITIONS)])
def test_what_is_out_of_a_table_is_refused_before_anything_is_read(token, position):
    sizes, kernels = Sizes(), cpu_kernels()
    decoder = kernels.compile_decoder(make_spec(sizes, kernels, torch.float32))
    cache, batch = make_cache(sizes, torch.float32), batch_of([Span(0, 1, (), blocks_of(0))])
    batch.positions_T[0] = position
    with pytest.raises(AssertionError, match="out of its table"):
        decoder(torch.tensor([token]), cache.layers, batch)
    assert not any(layer.k_PSGC.any() for layer in cache.layers)


@pytest.mark.slow
def test_a_decoder_forgets_caches_that_are_gone():
    sizes, kernels = Sizes(), cpu_kernels(2)
    decoder = kernels.compile_decoder(make_spec(sizes, kernels, torch.float32))
    assert isinstance(decoder, NativeDecoder)
    cache = make_cache(sizes, torch.float32)
    decoder(torch.tensor([1]), cache.layers, batch_of([Span(0, 1, (), blocks_of(0))]))
    assert len(decoder._bound) == 1
    del cache
    gc.collect()
    assert len(decoder._bound) == 0


def test_a_bfloat16_decoder_is_as_close_to_float64_as_the_layers_in_bfloat16():
    sizes, errors = Sizes(hidden=256, intermediate=384, windows=(None,) * 4), list[float]()
    exact = TorchDecoder(make_spec(sizes, reference_kernels(), EXACT))
    want_TD = read_chunks(exact, sizes, EXACT, [60])[0]
    for kernels in (cpu_kernels(), reference_kernels()):
        decoder = kernels.compile_decoder(make_spec(sizes, kernels, torch.bfloat16))
        got_TD = read_chunks(decoder, sizes, torch.bfloat16, [60])[0]
        errors.append(float((got_TD.double() - want_TD).square().mean()))
    native, layers = errors
    assert native <= layers


COMPARISONS = {"compile_decoder": compare_compile_decoder}
