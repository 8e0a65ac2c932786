"""Weights in the blocks of GGUF files by every library, against the gguf package and float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outdraft.core.weights import BLOCK_FORMATS, WeightFormat
from outdraft.kernels.data.block_weight import TILE_BYTES, BlockRows, BlockWeight, fits_tiles
from outdraft.kernels.native.library import Team, open_library, usable_instruction_sets
from outdraft.kernels.native.linear import NativeLinear
from tests.kernels.gguf_blocks import random_rows
from tests.rounding import UNIT, as_bytes, as_shorts

MIXED = (WeightFormat.Q4_K, WeightFormat.Q6_K, WeightFormat.Q8_0, WeightFormat.Q8_0)


@pytest.fixture(scope="module", params=usable_instruction_sets())
def library(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=[True, False], ids=["bytes", "shorts"])
def meets_bytes(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module", params=[1, 3], ids=lambda number: f"{number}-threads")
def linear(library: str, meets_bytes: bool, request: pytest.FixtureRequest) -> NativeLinear:
    return NativeLinear(Team(open_library(library), request.param), meets_bytes=meets_bytes)


def weight_of(*parts: BlockRows) -> BlockWeight:
    return BlockWeight(parts)


def assert_products(
    got_TE: Tensor, x_TD: Tensor, weight: BlockWeight, linear: NativeLinear
) -> None:
    """They are those of rounded rows, with exact sums over groups.

    Rows get 15 bits for each group of 32 inputs, or 8 bits for each largest block of the weight.
    Numbers of a block are at most 256 times one of its scales, and its offsets as large.
    """
    numbers_ED = weight.numbers()
    if linear.meets_bytes:
        x_TD = as_bytes(x_TD, max(part.format.group_inputs for part in weight.parts))
    else:
        x_TD = as_shorts(x_TD.float(), 32)
    want_TE = F.linear(x_TD.double(), numbers_ED.double())
    size_TE = F.linear(x_TD.abs().double(), numbers_ED.abs().double())
    largest_E = numbers_ED.abs().amax(dim=1).double()
    bound_TE = 8 * x_TD.shape[1] * UNIT * (size_TE + largest_E * x_TD.abs().sum(1, keepdim=True))
    bound_TE += want_TE.abs() * torch.finfo(got_TE.dtype).eps / 2
    assert ((got_TE.double() - want_TE).abs() <= bound_TE).all()


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_the_numbers_of_tiles_are_those_that_the_package_reads(linear: NativeLinear, format):
    rows = random_rows(format, 77, 512)
    product = linear.pack_codes(weight_of(rows), None, torch.float32)
    outputs_T = torch.tensor([0, 76, 31, 32, 33, 31])
    assert torch.equal(product.rows(outputs_T), rows.numbers()[outputs_T])
    assert torch.equal(product.rows(torch.arange(77)), rows.numbers())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_products_are_those_of_float64(linear: NativeLinear, format, dtype):
    rows = random_rows(format, 70, 768)
    product = linear.pack_codes(weight_of(rows), None, dtype)
    torch.manual_seed(0)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25, 33, 289):
        x_TD = torch.randn(num_rows, 768).to(dtype)
        assert_products(product(x_TD), x_TD, weight_of(rows), linear)


def test_parts_of_several_kinds_are_one_product_with_a_bias(linear: NativeLinear):
    parts = [random_rows(kind, 64, 256, seed) for seed, kind in enumerate(MIXED)]
    parts.append(random_rows(WeightFormat.IQ4_NL, 11, 256))
    weight, bias_E = BlockWeight(tuple(parts)), torch.randn(4 * 64 + 11)
    product = linear.pack_codes(weight, bias_E, torch.float32)
    x_TD = torch.randn(9, 256)
    assert product.format is WeightFormat.MIXED
    assert_products(product(x_TD) - bias_E, x_TD, weight, linear)
    assert torch.equal(product.rows(torch.arange(267)), weight.numbers())


def test_outputs_come_in_the_order_that_is_asked_for(linear: NativeLinear):
    rows = random_rows(WeightFormat.Q5_K, 64, 512)
    order_E = torch.randperm(64)
    part = rows.part(order_E, slice(256, 512)).part(slice(3, 40), slice(0, 256))
    product = linear.pack_codes(weight_of(part), None, torch.float32)
    want = rows.numbers()[order_E][3:40, 256:]
    assert torch.equal(part.numbers(), want)
    assert torch.equal(product.rows(torch.arange(37)), want)


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_products_of_a_row_depend_on_no_other_row_and_no_thread(
    library: str, meets_bytes: bool, format
):
    rows = random_rows(format, 160, 512)
    x_TD = torch.randn(40, 512)
    products = [
        NativeLinear(Team(open_library(library), number), meets_bytes=meets_bytes).pack_codes(
            weight_of(rows), None, torch.float32
        )
        for number in (1, 2)
    ]
    want_TE = products[0](x_TD)
    assert torch.equal(products[1](x_TD), want_TE)
    alone_TE = torch.cat([products[1](x_1D) for x_1D in x_TD.split(1)])
    assert torch.equal(alone_TE, want_TE)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_is_not_finite_changes_no_other_row(linear: NativeLinear, number: float):
    product = linear.pack_codes(
        weight_of(random_rows(WeightFormat.Q4_K, 40, 256)), None, torch.float32
    )
    x_TD = torch.randn(3, 256)
    before_TE = product(x_TD)
    x_TD[1, 170] = number
    got_TE = product(x_TD)
    assert torch.equal(got_TE[::2], before_TE[::2])
    assert not got_TE[1].isfinite().any()


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_tiles_take_little_more_than_the_file(linear: NativeLinear, format):
    rows = random_rows(format, 64, 512)
    product = linear.pack_codes(weight_of(rows), None, torch.float32)
    blocks = 64 * 512 // format.group_inputs
    assert product.nbytes == blocks * TILE_BYTES[format] <= 1.04 * rows.rows_EB.nbytes


def test_kinds_meet_between_tiles_only():
    assert fits_tiles([(WeightFormat.Q4_K, 32), (WeightFormat.Q6_K, 7)])
    assert fits_tiles([(WeightFormat.Q4_K, 7), (WeightFormat.Q4_K, 7)])
    assert not fits_tiles([(WeightFormat.Q4_K, 7), (WeightFormat.Q6_K, 32)])


def test_outputs_that_are_not_there_are_refused(linear: NativeLinear):
    product = linear.pack_codes(
        weight_of(random_rows(WeightFormat.Q4_K, 40, 256)), None, torch.float32
    )
    for output in (40, -1):
        with pytest.raises(IndexError, match="from 0 to 39"):
            product.rows(torch.tensor([0, output]))
