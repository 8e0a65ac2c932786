"""The Triton kernels against the reference: for real on a GPU, else in Triton's interpreter."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outdraft.attention.base import AttentionForm, AttentionMetadata, AttentionSizes, LayerCache
from outdraft.core.errors import ConfigError
from outdraft.kernels.choose import choose_kernels
from outdraft.kernels.torch.attention import TorchAttention
from outdraft.kv.block_pool import LayerCacheShape
from tests.attention.ragged import Model, Shape, build_batch, build_metadata, converted, on
from tests.pairwise import some

triton_attention = pytest.importorskip("outdraft.kernels.triton.attention", reason="needs triton")
TritonAttention = triton_attention.TritonAttention

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {FP32: 1e-5, BF16: 2e-2, FP16: 2e-3}  # weights are rounded to the values' dtype
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

CHAIN_7, CHAIN_63 = tuple(range(7)), tuple(range(63))
BUSH_7 = (0, 0, 1, 1, 2, 4, 6)
BUSH_63 = tuple(row // 2 for row in range(63))

# requests, model, window, dtype of queries, dtype of the cache
CASES = {
    "one row, one key": ([Shape(0, 1, ())], Model(2, 1, 32, 16), None, FP32, FP32),
    "a context that ends with a block": ([Shape(63, 1, ())], Model(4, 2, 64, 16), None, BF16, BF16),
    "and one that begins another": ([Shape(64, 1, ())], Model(4, 2, 64, 16), None, BF16, BF16),
    "up to the border of a split": ([Shape(255, 1, ())], Model(4, 1, 32, 16), None, FP32, FP32),
    "past it": ([Shape(256, 1, ())], Model(4, 1, 32, 16), None, FP32, FP32),
    "three splits and a window": ([Shape(1200, 1, (0,))], Model(4, 1, 32, 16), 600, FP32, FP32),
    "more splits than merge at once": ([Shape(8300, 1, ())], Model(1, 1, 16, 64), None, BF16, BF16),
    "a chain of 8 rows": ([Shape(70, 1, CHAIN_7)], Model(4, 2, 80, 16), None, BF16, BF16),
    "a tree of 8 rows": ([Shape(70, 1, BUSH_7)], Model(4, 2, 80, 16), None, FP16, FP16),
    "a tree of 64 rows": ([Shape(100, 1, BUSH_63)], Model(4, 1, 128, 16), None, BF16, BF16),
    "a chain of 64 rows": ([Shape(100, 1, CHAIN_63)], Model(2, 1, 64, 1), None, FP32, FP32),
    "a window in the text": ([Shape(90, 3, BUSH_7)], Model(4, 2, 32, 4), 40, FP32, FP32),
    "a window in the draft": ([Shape(90, 3, BUSH_63)], Model(2, 1, 32, 4), 3, FP32, FP32),
    "a level of a tree": ([Shape(90, 0, BUSH_7, (4, 3, 2))], Model(4, 2, 32, 4), None, FP32, FP32),
    "a level, in a window": ([Shape(90, 0, BUSH_63, (62, 40))], Model(2, 1, 32, 4), 4, FP32, FP32),
    "a level over two splits": (
        [Shape(511, 0, BUSH_7, (3, 6)), Shape(505, 0, CHAIN_7, (6,))],
        Model(4, 2, 32, 16),
        None,
        FP32,
        FP32,
    ),
    "a level behind nothing": ([Shape(0, 0, BUSH_7, (0, 1))], Model(2, 1, 32, 4), None, FP32, FP32),
    "a prompt chunk": ([Shape(37, 270, ())], Model(3, 1, 16, 16), None, FP32, FP32),
    "a prompt chunk and a window": ([Shape(37, 260, ())], Model(1, 1, 16, 16), 50, FP32, FP32),
    "a chunk with a tree": ([Shape(37, 20, BUSH_7)], Model(6, 2, 16, 16), None, FP32, FP32),
    "a ragged batch": (
        [Shape(5, 1, ()), Shape(520, 1, BUSH_7), Shape(0, 258, ()), Shape(40, 0, CHAIN_7, (2,))],
        Model(1, 1, 16, 16),
        None,
        FP32,
        FP32,
    ),
    "a cache of another dtype": ([Shape(70, 1, BUSH_7)], Model(4, 2, 32, 16), None, FP32, BF16),
    "queries of another dtype": ([Shape(70, 1, BUSH_7)], Model(4, 2, 32, 16), None, BF16, FP32),
    "more query heads than lanes": ([Shape(9, 1, (0,))], Model(40, 1, 20, 4), None, FP32, FP32),
}


def attend(attention, q_THC, cache, metadata, form, device="cpu") -> torch.Tensor:
    """`form`: or a window, or None."""
    cache = LayerCache(cache.k_PSGC.to(device), cache.v_PSGE.to(device))
    if not isinstance(form, AttentionForm):
        form = AttentionForm(q_THC.shape[2] ** -0.5, form)
    if form.sinks_H is not None:
        form = replace(form, sinks_H=form.sinks_H.to(device))
    return attention.attend(q_THC.to(device), cache, on(metadata, device), form).cpu()


@pytest.mark.few(10)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_triton_equals_reference(case, device):
    requests, model, window, query_dtype, cache_dtype = CASES[case]
    if device == "cpu" and query_dtype is cache_dtype is BF16:
        query_dtype = FP32  # the interpreter multiplies bfloat16 numbers as if they were integers
    batch = build_batch(requests, model, cache_dtype, seed=7)
    q_THC, metadata = batch.q_THC.to(query_dtype), batch.metadata
    got = attend(TritonAttention(), q_THC, batch.cache, metadata, window, device)
    exact = converted(batch.cache, torch.float64)
    want = attend(TorchAttention(), q_THC.double(), exact, metadata, window)
    assert got.dtype == query_dtype
    tolerance = max(TOLERANCE[query_dtype], TOLERANCE[cache_dtype] if cache_dtype is FP16 else 0)
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


SINKS_4 = torch.tensor([-4.0, 0.0, 3.0, 8.0])
FORMS = {
    "chunks": AttentionForm(0.2, chunk=30),
    "chunks that begin in the draft": AttentionForm(0.2, chunk=3),
    "chunks and a window": AttentionForm(0.2, 20, 50),
    "long chunks over splits": AttentionForm(0.2, chunk=400),
    "a cap": AttentionForm(0.4, soft_cap=1.5),
    "a cap that is hardly felt, and a window": AttentionForm(0.2, 40, soft_cap=50.0),
    "sinks": AttentionForm(0.2, sinks_H=SINKS_4),
    "all": AttentionForm(0.3, 300, 350, 2.0, SINKS_4.bfloat16()),
}
SIZED_FORMS = list(zip(FORMS, [None, 20, 48, 20] * 2, strict=True))
CHOSEN_FORMS = [SIZED_FORMS[1], SIZED_FORMS[3], SIZED_FORMS[7]]
RAGGED = [
    Shape(5, 1, ()),
    Shape(700, 1, BUSH_7),
    Shape(0, 258, ()),
    Shape(40, 0, CHAIN_7, (2, 6)),
    Shape(37, 20, BUSH_63),
]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "value_size"), some(SIZED_FORMS, CHOSEN_FORMS))
def test_each_form_equals_the_reference(name, value_size, device):
    """Rows of all launches, over several splits."""
    batch = build_batch(RAGGED, Model(4, 2, 32, 16, value_size), FP32, seed=7)
    arguments = batch.metadata, FORMS[name]
    got = attend(TritonAttention(), batch.q_THC, batch.cache, *arguments, device)
    exact = converted(batch.cache, torch.float64)
    want = attend(TorchAttention(), batch.q_THC.double(), exact, *arguments)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_request_reads_the_same_bits_alone_and_in_a_batch(device):
    model, requests = (
        Model(1, 1, 16, 16),
        [Shape(520, 1, (0,)), Shape(3, 258, ()), Shape(30, 17, ())],
    )
    both = build_batch(requests, model, FP32, seed=3)
    got = attend(TritonAttention(), both.q_THC, both.cache, both.metadata, None, device)
    first = 0
    for b, request in enumerate(requests):
        rows = slice(first, first + request.num_rows)
        metadata = build_metadata([request], model.block_size, seed=3)
        metadata = AttentionMetadata(
            metadata.query_start_B1,
            metadata.context_lens_B,
            metadata.num_causal_B,
            metadata.ancestors_T,
            metadata.positions_T,
            metadata.slots_T,
            both.metadata.block_table_BP[b : b + 1],
            metadata.max_rows,
            metadata.max_seq_len,
        )
        alone = attend(TritonAttention(), both.q_THC[rows], both.cache, metadata, None, device)
        assert torch.equal(alone, got[rows])
        first += request.num_rows


@pytest.mark.parametrize("device", DEVICES)
def test_merging_a_few_tiles_at_a_time_changes_no_bit(device):
    requests = [Shape(520, 1, ()), Shape(1030, 1, ()), Shape(20, 1, (0,))]
    batch = build_batch(requests, Model(2, 1, 16, 16), FP32, seed=2)
    arguments = (batch.q_THC, batch.cache, batch.metadata, None, device)
    assert torch.equal(
        attend(TritonAttention(1), *arguments), attend(TritonAttention(), *arguments)
    )


@pytest.mark.parametrize("device", DEVICES)
def test_rows_behind_the_last_request_are_zero(device):
    batch = build_batch([Shape(3, 2, (0, 0))], Model(2, 1, 16, 4), FP32, seed=1)
    q_THC = torch.cat([batch.q_THC, torch.ones(20, 2, 16)])
    got = attend(TritonAttention(), q_THC, batch.cache, batch.metadata, None, device)
    want = attend(TritonAttention(), batch.q_THC, batch.cache, batch.metadata, None, device)
    assert torch.equal(got[:4], want)
    assert not got[4:].any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_nan_in_one_request_stays_there(device):
    batch = build_batch([Shape(60, 2, ()), Shape(20, 2, ())], Model(2, 1, 16, 4), FP32, seed=4)
    batch.cache.v_PSGE[batch.metadata.block_table_BP[0, :16]] = torch.nan
    got = attend(TritonAttention(), batch.q_THC, batch.cache, batch.metadata, None, device)
    assert got[:2].isnan().all()
    assert not got[2:].isnan().any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_slice_of_a_fused_projection_is_read_in_place_and_right(device):
    batch = build_batch([Shape(40, 5, (0, 1, 0))], Model(4, 2, 16, 4), FP32, seed=1)
    fused = torch.randn(len(batch.q_THC), 4 * 16 + 2 * 2 * 16, device=device)
    q_THC = fused[:, : 4 * 16].unflatten(1, (4, 16))
    arguments = (batch.cache, batch.metadata, None, device)
    got = attend(TritonAttention(), q_THC, *arguments)
    assert torch.equal(got, attend(TritonAttention(), q_THC.clone(), *arguments))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache_dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("new_dtype", [FP32, BF16, FP16])
def test_write_equals_reference_and_drops_rows_without_a_slot(new_dtype, cache_dtype, device):
    fused = torch.randn(7, 3 * 2 * 5, device=device).to(new_dtype)
    k_TGC, v_TGC = fused[:, 10:20].unflatten(1, (2, 5)), fused[:, 20:26].unflatten(1, (2, 3))
    slots_T = torch.tensor([3, -1, 0, 11, -1, 7, 8], device=device)
    before = [torch.randn(3, 4, 2, size, device=device).to(cache_dtype) for size in (5, 3)]
    got, want = (LayerCache(*(part.clone() for part in before)) for _ in range(2))
    TritonAttention().write(k_TGC, v_TGC, got, slots_T)
    TorchAttention().write(k_TGC, v_TGC, want, slots_T)
    # The interpreter cuts off where a GPU rounds.
    ulp = 2**-7 if device == "cpu" and cache_dtype is BF16 else 0
    torch.testing.assert_close(got.k_PSGC, want.k_PSGC, rtol=ulp, atol=0)
    torch.testing.assert_close(got.v_PSGE, want.v_PSGE, rtol=ulp, atol=0)


def test_no_more_memory_is_taken_than_was_told():
    requests, model = [Shape(520, 1, ())] * 3, Model(2, 1, 16, 16)
    batch = build_batch(requests, model, FP32, seed=0)
    told = TritonAttention().temporary_bytes(
        AttentionSizes(3, 3, batch.metadata.max_seq_len, 2, LayerCacheShape(1, 16, 16), FP32)
    )
    taken = []
    empty = torch.empty

    def counted(shape, **options):
        made = empty(shape, **options)
        taken.append(made.numel() * made.element_size())
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_attention.torch, "empty", counted)
        attend(TritonAttention(), batch.q_THC, batch.cache, batch.metadata, None)
    assert 0 < sum(taken) <= told


def test_float64_is_refused_with_the_way_out():
    batch = build_batch([Shape(3, 1, ())], Model(2, 1, 16, 4), torch.float64, seed=1)
    with pytest.raises(ConfigError, match=r"float64: use the reference kernels"):
        attend(TritonAttention(), batch.q_THC, batch.cache, batch.metadata, None)


def test_it_is_the_default_on_a_gpu():
    kernels = choose_kernels("auto", torch.device("cuda"), torch.bfloat16)
    assert isinstance(kernels.attention, TritonAttention)


def test_without_triton_a_gpu_has_the_reference(monkeypatch):
    monkeypatch.setattr("outdraft.kernels.choose.find_spec", lambda name: None)
    kernels = choose_kernels("auto", torch.device("cuda"), torch.bfloat16)
    assert isinstance(kernels.attention, TorchAttention)


@pytest.mark.slow
def test_triton_is_imported_for_a_gpu_only():
    script = (
        "import sys, torch, outdraft, outdraft.kernels.choose as c;"
        "c.choose_kernels('auto', torch.device('cpu'), torch.float32);"
        "assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("capability", some(["80", "90"], ["90"]))
def test_the_kernels_compile_for_gpus_and_fit_their_shared_memory(capability, tmp_path):
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{root}/src:{root}"}
    command = [sys.executable, "-m", "tests.attention.compile_for_gpu", "bf16", capability]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("shared memory") == 11
