"""Products in the matrix registers of AMX: the order of their sums, and who else uses them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outdraft.core.weights import WeightFormat
from outdraft.kernels.data.coded_weight import CodedWeight
from outdraft.kernels.native.library import Team, open_library, usable_instruction_sets
from outdraft.kernels.native.linear import NativeLinear, NativeProduct

NAME = "x86-64-v4-amx"
BLOCK = 32  # inputs that one instruction adds up

pytestmark = pytest.mark.skipif(
    NAME not in usable_instruction_sets(), reason="needs a processor with AMX"
)


@pytest.fixture(scope="module")
def linear() -> NativeLinear:
    library = open_library(NAME)
    assert library is not None
    return NativeLinear(Team(library, 1))


def with_product(sums_TE: Tensor, x_T: Tensor, weight_E: Tensor) -> Tensor:
    """sums + x * weight, rounded once: float64 holds the sum of an exact product and a float32."""
    exact_TE = sums_TE.double() + x_T.double()[:, None] * weight_E.double()
    return exact_TE.float()


def in_blocks(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """As csrc/amx.h has it: even and odd inputs of a block apart, then both, then all blocks."""
    total_TE = torch.zeros(len(x_TD), len(weight_ED))
    for first in range(0, x_TD.shape[1], BLOCK):
        parts = torch.zeros(2, *total_TE.shape)
        for d in range(first, min(first + BLOCK, x_TD.shape[1])):
            parts[d % 2] = with_product(parts[d % 2], x_TD[:, d], weight_ED[:, d])
        total_TE += parts[0] + parts[1]
    return total_TE


def one_by_one(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Another order, for comparison."""
    total_TE = torch.zeros(len(x_TD), len(weight_ED))
    for d in range(x_TD.shape[1]):
        total_TE = with_product(total_TE, x_TD[:, d], weight_ED[:, d])
    return total_TE


def cancelling(num_rows: int, num_inputs: int, num_outputs: int) -> tuple[Tensor, Tensor]:
    """Rows and weights whose products are 0 but for the rounding of their sums."""
    half = num_inputs // 2
    x_TD = torch.randn(num_rows, half).bfloat16()
    weight_ED = torch.randn(num_outputs, half).bfloat16()
    other = torch.randperm(half)
    return torch.cat((x_TD, x_TD[:, other]), 1), torch.cat((weight_ED, -weight_ED[:, other]), 1)


@pytest.mark.parametrize("num_rows", [1, 5, 16, 17, 32, 33, 100])
@pytest.mark.parametrize("num_inputs", [64, 100, 1000])
def test_sums_run_in_blocks_of_even_and_odd_inputs(linear, num_inputs, num_rows):
    torch.manual_seed(num_rows)
    x_TD, weight_ED = cancelling(num_rows, num_inputs, 40)

    got_TE = linear.pack_linear(weight_ED, None)(x_TD)

    assert torch.equal(got_TE, in_blocks(x_TD, weight_ED).bfloat16())
    assert not torch.equal(got_TE, one_by_one(x_TD, weight_ED).bfloat16())


@pytest.mark.parametrize("format", [one for one in WeightFormat if one.startswith("int")])
@pytest.mark.parametrize("least", [-127, -128])
def test_every_code_is_decoded_exactly(linear, format, least):
    num_codes = 256 if format.is_int8 else 16
    least, most = (least, 127) if format.is_int8 else (-8, 7)
    codes_ED = torch.arange(256).repeat(40, 1) + 7 * torch.arange(40)[:, None]
    codes_ED = (codes_ED % num_codes - num_codes // 2).clamp(least, most).to(torch.int8)
    shape = (40, 256 // (format.group_inputs or 256))
    scales_EN = 2.0 ** torch.randint(-8, 8, shape)
    shifts_EN = torch.randint(-8, 8, shape).float() if format.has_zero else None
    weight = CodedWeight(format, codes_ED, scales_EN, shifts_EN)
    x_DD = torch.eye(256).bfloat16()

    product = linear.pack_codes(weight, None, torch.bfloat16)

    assert product.format is format
    assert torch.equal(product(x_DD).float(), weight.numbers().T)
    assert torch.equal(product(x_DD[77:78]).float(), weight.numbers().T[77:78])


@pytest.mark.parametrize("num_rows", [1, 7, 16, 40])
def test_torch_has_its_own_products_between_ours(linear, num_rows):
    torch.manual_seed(0)
    shapes = [(64, 96), (512, 160), (100, 33)]
    weights = [torch.randn(outputs, inputs).bfloat16() for inputs, outputs in shapes]
    inputs = [torch.randn(24, size).bfloat16() for size, _ in shapes]
    x_TD = torch.randn(num_rows, 64).bfloat16()
    ours: NativeProduct = linear.pack_linear(torch.randn(50, 64).bfloat16(), None)
    alone = [F.linear(x, weight) for x, weight in zip(inputs, weights, strict=True)]
    want_TE = ours(x_TD)

    for _ in range(3):
        for x, weight, want in zip(inputs, weights, alone, strict=True):
            assert torch.equal(ours(x_TD), want_TE)
            assert torch.equal(F.linear(x, weight), want)
