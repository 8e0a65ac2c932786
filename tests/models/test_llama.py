"""The network against transformers' own, and against itself in other chunks."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from outdraft.core.weights import WeightFormat
from outdraft.kernels.torch.table import reference_kernels
from outdraft.models.decoder.loader import load_model
from tests.kernels.tables import cpu_kernels
from tests.models.checkpoints import VARIANTS, chunked_logits, random_tokens, randomised, save
from tests.rounding import MODEL_ROUNDING

NUM_TOKENS = 53
CHUNKS = [1, 20, 3, 1, 28]


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A checkpoint directory, a prompt, and transformers' logits of it."""
    theirs = randomised(VARIANTS[request.param]())
    token_ids_T = random_tokens(NUM_TOKENS)
    with torch.no_grad():
        logits_TV = theirs(token_ids_T[None]).logits[0]
    return save(theirs, tmp_path_factory.mktemp(request.param)), token_ids_T, logits_TV


def test_logits_in_chunks_equal_those_of_transformers(variant):
    path, token_ids_T, want_TV = variant
    model = load_model(path, torch.float32, "cpu", reference_kernels())

    got_TV = chunked_logits(model, token_ids_T, CHUNKS)

    assert got_TV.dtype is torch.float32
    assert want_TV.std() > 0.3  # there is something to get wrong
    torch.testing.assert_close(got_TV, want_TV, rtol=1e-4, atol=1e-4)
    assert torch.equal(got_TV.argmax(-1), want_TV.argmax(-1))


def test_weight_bytes_are_those_of_the_file_without_an_untied_embedding(variant):
    path, _, _ = variant
    tensors = load_file(path / "model.safetensors")
    if not json.loads((path / "config.json").read_text())["tie_word_embeddings"]:
        del tensors["model.embed_tokens.weight"]

    model = load_model(path, torch.float32, "cpu", reference_kernels())

    assert model.weight_bytes == sum(tensor.nbytes for tensor in tensors.values())


@pytest.fixture(scope="module", params=["llama-llama3-rope", "qwen2-window", "qwen3-window"])
def float64_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    path = save(randomised(VARIANTS[request.param]()), tmp_path_factory.mktemp("float64"))
    return load_model(path, torch.float64, "cpu", reference_kernels())


@settings(max_examples=15, deadline=None)
@given(
    chunk_sizes=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    block_size=st.sampled_from([1, 3, 16]),
)
def test_chunking_does_not_change_logits(float64_model, chunk_sizes, block_size):
    token_ids_T = random_tokens(sum(chunk_sizes))

    whole_TV = chunked_logits(float64_model, token_ids_T, [len(token_ids_T)])
    parts_TV = chunked_logits(float64_model, token_ids_T, chunk_sizes, block_size)

    assert parts_TV.dtype is torch.float64
    torch.testing.assert_close(parts_TV, whole_TV, rtol=1e-10, atol=1e-10)


def test_windows_change_the_logits_of_rows_behind_them_only(tmp_path: Path):
    theirs = randomised(VARIANTS["mistral-window"]())
    path = save(theirs, tmp_path)
    token_ids_T = random_tokens(20)
    windowed = load_model(path, torch.float64, "cpu", reference_kernels())
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"sliding_window": None}))
    full = load_model(path, torch.float64, "cpu", reference_kernels())

    difference_T = (
        (chunked_logits(windowed, token_ids_T, [20]) - chunked_logits(full, token_ids_T, [20]))
        .abs()
        .amax(-1)
    )

    assert difference_T[:7].max() < 1e-12
    assert difference_T[7:].min() > 1e-6


def test_a_tied_head_shares_the_memory_of_the_embedding(tmp_path: Path):
    path = save(randomised(VARIANTS["llama-tied"]()), tmp_path)

    model = load_model(path, torch.float64, "cpu", reference_kernels())

    assert model.lm_head.weight is model.embed_weight


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3-window"])
def test_packing_changes_no_logit_beyond_rounding(name: str, tmp_path: Path):
    path = save(randomised(VARIANTS[name]()), tmp_path)
    packed = load_model(path, torch.float32, "cpu", cpu_kernels())
    plain = load_model(path, torch.float32, "cpu", reference_kernels())
    token_ids_T = random_tokens(NUM_TOKENS)

    assert packed.lm_head.format is WeightFormat.FLOAT32
    assert plain.lm_head.format is WeightFormat.PLAIN
    torch.testing.assert_close(
        chunked_logits(packed, token_ids_T, CHUNKS),
        chunked_logits(plain, token_ids_T, CHUNKS),
        rtol=MODEL_ROUNDING,
        atol=MODEL_ROUNDING,
    )


@pytest.mark.parametrize(("name", "num_copies"), [("llama", 0), ("llama-tied", 1)])
def test_packed_weights_are_counted_and_a_tied_head_twice(
    name: str, num_copies: int, tmp_path: Path
):
    path = save(randomised(VARIANTS[name]()), tmp_path)
    tensors = load_file(path / "model.safetensors")

    packed = load_model(path, torch.float32, "cpu", cpu_kernels())

    table_VD = tensors["model.embed_tokens.weight"]
    copy_bytes = num_copies * table_VD.nbytes
    padding = -len(table_VD) % 32 * table_VD[0].nbytes  # outputs of a head, in tiles of 32
    assert packed.lm_head.format is not WeightFormat.PLAIN
    assert packed.memory_bytes == sum(t.nbytes for t in tensors.values()) + copy_bytes + padding


def test_inference_mode_changes_nothing(tmp_path: Path):
    path = save(randomised(VARIANTS["qwen3"]()), tmp_path)
    model = load_model(path, torch.float32, "cpu", reference_kernels())
    token_ids_T = random_tokens(NUM_TOKENS)
    want_TV = chunked_logits(model, token_ids_T, CHUNKS)

    with torch.inference_mode():
        got_TV = chunked_logits(model, token_ids_T, CHUNKS)

    assert torch.equal(got_TV, want_TV)


def test_bfloat16_logits_are_close_to_float32_ones(tmp_path: Path):
    path = save(randomised(VARIANTS["qwen3"]()), tmp_path)
    token_ids_T = random_tokens(NUM_TOKENS)
    exact = load_model(path, torch.float32, "cpu", reference_kernels())
    rounded = load_model(path, torch.bfloat16, "cpu", reference_kernels())

    want_TV = chunked_logits(exact, token_ids_T, CHUNKS)
    got_TV = chunked_logits(rounded, token_ids_T, CHUNKS)

    assert got_TV.dtype is torch.float32
    assert (got_TV - want_TV).std() < 0.05 * want_TV.std()


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_logits_on_a_gpu_equal_those_on_a_cpu(name: str, tmp_path: Path):
    path = save(randomised(VARIANTS[name]()), tmp_path)
    token_ids_T = random_tokens(NUM_TOKENS)
    on_cpu = load_model(path, torch.float64, "cpu", reference_kernels())
    on_gpu = load_model(path, torch.float64, "cuda", reference_kernels())

    got_TV = chunked_logits(on_gpu, token_ids_T, CHUNKS).cpu()

    want_TV = chunked_logits(on_cpu, token_ids_T, CHUNKS)
    torch.testing.assert_close(got_TV, want_TV, rtol=1e-8, atol=1e-8)
