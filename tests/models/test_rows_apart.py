"""A row's bits do not depend on the rows beside it: in products, and in the whole model."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outdraft.kernels.choose import choose_kernels
from outdraft.kernels.torch.pointwise import silu_mul
from outdraft.models.decoder.loader import load_model
from outdraft.models.modules import Linear
from tests.kernels.tables import cpu_kernels
from tests.models.checkpoints import (
    VARIANTS,
    chunked_logits,
    llama,
    qwen3,
    random_tokens,
    randomised,
    save,
)

CPU = torch.device("cpu")
NUM_ROWS = 100
CHUNKS = (1, 2, 3, 4, 5, 8, 63, 65, 100)
KINDS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.float16, torch.float16),
]  # dtype of the rows, and one that holds the weights
# Libraries choose their code by the shape: one row is multiplied otherwise in the last three.
SHAPES = [(32, 61), (64, 64), (257, 131), (384, 1024), (1025, 1000), (1536, 512), (2048, 640)]


@pytest.fixture(params=[1, 3], ids=lambda threads: f"{threads}-threads")
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def in_chunks(compute: Callable[[Tensor], Tensor], x_TD: Tensor, size: int) -> Tensor:
    return torch.cat([compute(part_TD) for part_TD in x_TD.split(size)])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "holding"), KINDS)
def test_a_product_gives_a_row_the_same_bits_in_chunks_of_any_size(
    dtype: torch.dtype, holding: torch.dtype, shape: tuple[int, int], num_threads: int
):
    torch.manual_seed(0)
    linear = Linear(*shape, bias=True, dtype=dtype, device=CPU)
    for weight in linear.parameters():
        weight.copy_((torch.randn(weight.shape) * shape[0] ** -0.5).to(holding))
    linear.pack(choose_kernels("auto", CPU, dtype))
    x_TD = torch.randn(NUM_ROWS, shape[0]).to(dtype)

    whole_TE = linear(x_TD)

    for size in CHUNKS:
        assert torch.equal(in_chunks(linear, x_TD, size), whole_TE), f"chunks of {size}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_gate_gives_a_row_the_same_bits_in_chunks_of_any_size(
    dtype: torch.dtype, num_threads: int
):
    torch.manual_seed(0)
    gate_up_T2I = torch.randn(NUM_ROWS, 2 * 679).to(dtype) * 4

    whole_TI = silu_mul(gate_up_T2I)

    for size in CHUNKS:
        assert torch.equal(in_chunks(silu_mul, gate_up_T2I, size), whole_TI)


WIDE = {"hidden_size": 256, "intermediate_size": 679}
MODELS = {
    **VARIANTS,
    "llama-wide": lambda: llama(**WIDE),
    "qwen3-wide": lambda: qwen3(**WIDE),
}
WEIGHTS = {  # what is loaded, and whether bfloat16 holds the weights
    "bfloat16": (torch.bfloat16, True),
    "float32-over-bfloat16": (torch.float32, True),
    "float32": (torch.float32, False),
}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_a_row_the_same_bits_in_prompt_chunks_of_any_size(
    name: str, weights: str, tmp_path: Path
):
    dtype, fits_bfloat16 = WEIGHTS[weights]
    theirs = randomised(MODELS[name]())
    path = save(theirs.bfloat16() if fits_bfloat16 else theirs, tmp_path)
    model = load_model(path, dtype, CPU, cpu_kernels(1))
    token_ids_T = random_tokens(96)

    with torch.inference_mode():
        whole_TV = chunked_logits(model, token_ids_T, [96])
        for size in CHUNKS[:-1]:
            sizes = [size] * (96 // size) + [96 % size] * (96 % size > 0)
            parts_TV = chunked_logits(model, token_ids_T, sizes)
            assert torch.equal(parts_TV, whole_TV), f"chunks of {size}"
