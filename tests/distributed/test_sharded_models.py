"""Models that are spread over ranks against the same models on one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outdraft.core.weight_format import WeightFormat
from outdraft.distributed.group import Ranks
from outdraft.kernels.choose import choose_kernels
from outdraft.models.llama import CausalLM
from outdraft.models.loader import load_model
from tests.models.checkpoints import (
    TINY,
    VARIANTS,
    chunked_logits,
    random_tokens,
    randomised,
    save,
)
from tests.ranks import on_ranks
from tests.rounding import MODEL_ROUNDING

CPU = torch.device("cpu")
NUM_TOKENS = 64
SIZES = [2, 4]
# Biases, query-key norms, windows, tied heads; 2 kv heads are fewer than 4 ranks, 4 are not.
FAMILIES = (
    *("llama", "llama-tied", "llama-biases", "llama-one-head-each", "llama-llama3-rope"),
    *("mistral-window", "qwen2", "qwen3", "qwen3-window"),
)
CHUNKS = {size: [size] * (NUM_TOKENS // size) for size in (1, 2, 64)} | {5: [5] * 12 + [4]}
KINDS = [
    pytest.param("reference", torch.float64, id="float64"),
    pytest.param("reference", torch.float32, id="float32-reference"),
    pytest.param("reference", torch.bfloat16, id="bfloat16-reference"),
    pytest.param("auto", torch.float32, id="float32"),
    pytest.param("auto", torch.bfloat16, id="bfloat16"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories of tiny models, each made once."""
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = save(randomised(VARIANTS[family]()), folder)
        return made[family]

    return of


def load(
    path: Path,
    ranks: Ranks,
    dtype: torch.dtype = torch.float64,
    kernels: str = "reference",
    quantization: WeightFormat | None = None,
) -> CausalLM:
    table = choose_kernels(kernels, CPU, dtype)
    return load_model(path, dtype, CPU, table, None, quantization, ranks.target)


def joined(parts: list[Tensor], vocab_size: int = TINY["vocab_size"]) -> Tensor:
    """[T, V]: the columns of all ranks; what is behind the vocabulary is never the best."""
    whole = torch.cat(parts, dim=1)
    assert (whole[:, vocab_size:] == -torch.inf).all()
    return whole[:, :vocab_size]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_columns_of_all_ranks_are_the_logits_of_one(
    family: str, size: int, checkpoint: Callable[[str], Path]
):
    path, ids_T = checkpoint(family), random_tokens(NUM_TOKENS)
    want_TV = chunked_logits(load(path, Ranks()), ids_T, [20, 44])

    parts = on_ranks(size, 1, lambda ranks: chunked_logits(load(path, ranks), ids_T, [20, 44]))

    assert all(part.shape == (NUM_TOKENS, -(-TINY["vocab_size"] // size)) for part in parts)
    got_TV = joined(parts)
    assert want_TV.std() > 0.3  # there is something to get wrong
    assert (got_TV - want_TV).abs().max() <= 1e-10
    assert torch.equal(got_TV.argmax(-1), want_TV.argmax(-1))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("kernels", "dtype"), KINDS)
def test_rows_have_the_same_bits_in_chunks_of_any_size(
    kernels: str, dtype: torch.dtype, size: int, checkpoint: Callable[[str], Path]
):
    path, ids_T = checkpoint("qwen3-window"), random_tokens(NUM_TOKENS)

    def logits_in_chunks(ranks: Ranks) -> dict[int, Tensor]:
        model = load(path, ranks, dtype, kernels)
        return {chunk: chunked_logits(model, ids_T, sizes) for chunk, sizes in CHUNKS.items()}

    for rank, logits in enumerate(on_ranks(size, 1, logits_in_chunks)):
        for chunk, part_TS in logits.items():
            assert torch.equal(part_TS, logits[64]), f"rank {rank}, chunks of {chunk}"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("kernels", "dtype"), KINDS)
def test_rounding_is_all_that_ranks_change(
    kernels: str, dtype: torch.dtype, size: int, checkpoint: Callable[[str], Path]
):
    path, ids_T = checkpoint("qwen2"), random_tokens(NUM_TOKENS)
    exact_TV = chunked_logits(load(path, Ranks()), ids_T, [NUM_TOKENS])
    bound = MODEL_ROUNDING if dtype is not torch.bfloat16 else bfloat16_bound(size)

    parts = on_ranks(
        size,
        1,
        lambda ranks: chunked_logits(load(path, ranks, dtype, kernels), ids_T, [NUM_TOKENS]),
    )

    got_TV = joined(parts)
    assert got_TV.dtype is torch.promote_types(dtype, torch.float32)
    assert (got_TV - exact_TV).abs().max() <= bound * exact_TV.abs().max()


def bfloat16_bound(size: int) -> float:
    """Where each layer rounds its norms, q, k, v, scores' values, gate, up, their product and both
    sums once, and the parts of both sums once for each rank; weights are rounded as well."""
    return (TINY["num_hidden_layers"] * (14 + 2 * size) + 3) * 2.0**-9
