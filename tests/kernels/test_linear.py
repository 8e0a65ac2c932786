"""Products by every library: any number of rows and threads, against float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from outdraft.core.weights import WeightFormat
from outdraft.kernels.data.coded_weight import CodedWeight
from outdraft.kernels.native.library import Team, open_library, usable_instruction_sets
from outdraft.kernels.native.linear import NativeLinear, NativeProduct
from outdraft.kernels.torch.linear import quantized
from tests.kernels.comparisons import Case
from tests.rounding import UNIT, as_bytes, as_shorts, assert_float32_products

NUM_ROWS = [0, *range(1, 41), 63, 64, 65, 200, 300]
SHAPES = [(512, 160), (33, 61), (1, 1), (16, 1000), (200, 33), (1281, 64)]
DTYPES = [torch.float32, torch.bfloat16]
QUANTIZATIONS = [one for one in WeightFormat if one.startswith("int")]


def compare_pack_linear(case: Case) -> None:
    draw = case.data.draw
    num_inputs, num_outputs = draw(st.integers(1, 300), "D"), draw(st.integers(1, 150), "E")
    num_rows = draw(st.integers(1, 200), "T")
    torch.manual_seed(draw(st.integers(0, 2**31), "seed"))
    weight_ED = torch.randn(num_outputs, num_inputs).to(case.dtype)
    if draw(st.booleans(), "bfloat16 holds the weights"):
        weight_ED = weight_ED.bfloat16().to(case.dtype)
    bias_E = torch.randn(num_outputs).to(case.dtype) if draw(st.booleans(), "bias") else None
    x_TD = torch.randn(num_rows, num_inputs).to(case.dtype)
    quantization = draw(st.none() | st.sampled_from(QUANTIZATIONS), "quantization")

    first = draw(st.integers(0, num_outputs), "first part")
    parts_ED = [part_ED.clone() for part_ED in weight_ED.split([first, num_outputs - first])]
    is_whole = draw(st.booleans(), "in one piece")
    product = case.kernels.pack_linear(weight_ED if is_whole else parts_ED, bias_E, quantization)
    got_TE = product(x_TD)

    assert got_TE.dtype is case.dtype
    if quantization is None:
        assert_float32_products(got_TE, x_TD, weight_ED, bias_E)
        return
    assert product.format is quantization
    # bfloat16 does not hold scale * code: the library multiplies the codes.
    exact_ED = quantized(weight_ED.float(), quantization)
    if case.kernels.name == "reference":
        exact_ED = exact_ED.to(case.dtype)
    assert_quantized_products(got_TE, multiplied(x_TD, quantization, case), exact_ED, bias_E)


def random_codes(
    format: WeightFormat, num_outputs: int, num_inputs: int, scale_dtype: torch.dtype
) -> CodedWeight:
    """All codes, and scales of many sizes that the dtype holds."""
    least, most = (-128, 127) if format.is_int8 else (-8, 7)
    shape = (num_outputs, -(-num_inputs // (format.group_inputs or num_inputs)))
    return CodedWeight(
        format,
        torch.randint(least, most + 1, (num_outputs, num_inputs), dtype=torch.int8),
        torch.randn(shape).exp().to(scale_dtype).float(),
        torch.randn(shape).mul(4).to(scale_dtype).float() if format.has_zero else None,
    )


def compare_pack_codes(case: Case) -> None:
    draw = case.data.draw
    num_inputs, num_outputs = draw(st.integers(1, 300), "D"), draw(st.integers(1, 150), "E")
    num_rows = draw(st.integers(1, 50), "T")
    torch.manual_seed(draw(st.integers(0, 2**31), "seed"))
    format = draw(st.sampled_from(QUANTIZATIONS), "format")
    scale_dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), "scales")
    weight = random_codes(format, num_outputs, num_inputs, scale_dtype)
    bias_E = torch.randn(num_outputs).to(case.dtype) if draw(st.booleans(), "bias") else None
    x_TD = torch.randn(num_rows, num_inputs).to(case.dtype)

    product = case.kernels.pack_codes(weight, bias_E, case.dtype)

    assert product.format is format
    exact_ED = weight.numbers()
    if case.kernels.name == "reference":
        exact_ED = exact_ED.to(case.dtype)
    # Neither a code nor a shift is larger than 128, and a sum of them has no more roundings.
    largest_E1 = 128 * weight.scales_EN.amax(dim=1, keepdim=True)
    rows_TD = multiplied(x_TD, format, case)
    assert_quantized_products(product(x_TD), rows_TD, exact_ED, bias_E, largest_E1)


def multiplied(x_TD: Tensor, format: WeightFormat, case: Case) -> Tensor:
    """What of a row meets quantised weights."""
    group_inputs = case.rounded_group(format)
    return as_shorts(x_TD, group_inputs) if group_inputs else x_TD


def assert_quantized_products(
    got_TE: Tensor,
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    largest_E1: Tensor | None = None,
    lost_TD: Tensor | None = None,
) -> None:
    """As assert_float32_products; a code's size may be up to twice that of its number.

    `largest_E1`: of all numbers that a code of an output may stand for; None: the largest one.
    `lost_TD`: by how much rows may be rounded before.
    """
    if largest_E1 is None:
        largest_E1 = weight_ED.abs().amax(dim=1, keepdim=True)
    want_TE = F.linear(x_TD.double(), weight_ED.double(), None)
    size_TE = F.linear(x_TD.abs().double(), 3 * largest_E1.double().expand_as(weight_ED), None)
    if bias_E is not None:
        want_TE, size_TE = want_TE + bias_E.double(), size_TE + bias_E.abs().double()
    bound_TE = (2 * x_TD.shape[1] + 8) * UNIT * size_TE
    if lost_TD is not None:
        bound_TE = bound_TE + F.linear(lost_TD.double(), weight_ED.abs().double())
    bound_TE = bound_TE + (want_TE.abs() + bound_TE) * torch.finfo(got_TE.dtype).eps / 2
    assert ((got_TE.double() - want_TE).abs() <= bound_TE).all()


COMPARISONS = {"pack_linear": compare_pack_linear, "pack_codes": compare_pack_codes}


@pytest.fixture(scope="module", params=usable_instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda number: f"{number}-threads")
def linear(request: pytest.FixtureRequest, instruction_set: str) -> NativeLinear:
    library = open_library(instruction_set)
    assert library is not None
    return NativeLinear(Team(library, request.param))


def random_product(
    linear: NativeLinear, shape: tuple[int, int], dtype: torch.dtype, holding: torch.dtype
) -> tuple[NativeProduct, Tensor, Tensor]:
    """The product, its weight and its bias; `holding`: of the weight's numbers."""
    weight_ED = torch.randn(shape[1], shape[0]).to(holding).to(dtype)
    bias_E = torch.randn(shape[1]).to(dtype)
    return linear.pack_linear(weight_ED, bias_E), weight_ED, bias_E


@pytest.mark.parametrize("holding", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_number_of_rows_gets_float32_sums_that_depend_on_no_other_row(
    linear, shape, dtype, holding
):
    torch.manual_seed(0)
    product, weight_ED, bias_E = random_product(linear, shape, dtype, holding)
    x_TD = torch.randn(max(NUM_ROWS), shape[0]).to(dtype)

    alone_TE = torch.cat([product(x_D[None]) for x_D in x_TD])

    assert_float32_products(alone_TE, x_TD, weight_ED, bias_E)
    for num_rows in NUM_ROWS:
        assert torch.equal(product(x_TD[:num_rows]), alone_TE[:num_rows])


def test_a_weight_is_kept_as_bfloat16_only_if_that_holds_every_number(linear):
    weight_ED = torch.randn(40, 8).bfloat16().float()
    assert linear.pack_linear(weight_ED, None).format is WeightFormat.BFLOAT16
    for number in (1.0 + 2.0**-9, torch.nan):
        weight_ED[39, 7] = number
        assert linear.pack_linear(weight_ED, None).format is WeightFormat.FLOAT32


def test_a_long_weight_takes_as_many_bytes_as_its_numbers(linear):
    weight_ED = torch.randn(96, 64)
    assert linear.pack_linear(weight_ED, None).nbytes == 4 * weight_ED.numel()
    assert linear.pack_linear(weight_ED.bfloat16(), None).nbytes == 2 * weight_ED.numel()


def test_more_tiles_than_units_are_all_computed(linear):
    product, weight_ED, bias_E = random_product(
        linear, (4, 1024 * 32 * 2 + 40), torch.float32, torch.bfloat16
    )
    x_TD = torch.randn(2, 4)
    assert_float32_products(product(x_TD), x_TD, weight_ED, bias_E)


def test_rows_and_weights_may_lie_apart_or_across(linear):
    torch.manual_seed(0)
    for weight_ED in (torch.randn(20, 96)[:, 48:], torch.randn(48, 20).T):
        product = linear.pack_linear(weight_ED, None)
        for x_TD in (torch.randn(5, 96)[:, 48:], torch.randn(48, 5).T):
            assert_float32_products(product(x_TD), x_TD, weight_ED)


@pytest.mark.parametrize("holding", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_reach_the_outputs_they_belong_to(linear, dtype, holding):
    product, weight_ED, bias_E = random_product(linear, (10, 40), dtype, holding)
    x_TD = torch.zeros(3, 10, dtype=dtype)
    x_TD[1, 4], x_TD[2, 9] = torch.nan, torch.inf

    got_TE = product(x_TD)

    assert torch.equal(got_TE[0], bias_E)
    assert got_TE[1].isnan().all()
    assert torch.equal(got_TE[2], torch.inf * weight_ED[:, 9].sign())


def test_float32_becomes_bfloat16_as_in_torch(linear):
    values = torch.randn(2000) * 10.0 ** torch.randint(-38, 38, (2000,))
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 1], dtype=torch.int32)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    bias_E = torch.cat((values, ties.view(torch.float32), special))
    product = linear.pack_linear(torch.zeros(len(bias_E), 1, dtype=torch.bfloat16), bias_E)

    got_TE = product(torch.zeros(3, 1, dtype=torch.bfloat16))

    for got_E in got_TE:
        torch.testing.assert_close(got_E, bias_E.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("format", QUANTIZATIONS)
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-36, 1e-30, 1e25])
def test_rows_of_any_size_meet_quantized_weights_with_fifteen_bits(linear, format, size):
    torch.manual_seed(0)
    weight = random_codes(format, 40, 300, torch.bfloat16)
    x_TD = torch.randn(9, 300) * size
    x_TD[1] *= torch.randn(300).mul(4).exp()  # most are far below the largest one
    x_TD[3, 100:] = 0

    got_TE = linear.pack_codes(weight, None, torch.float32)(x_TD)

    group_inputs = (format.group_inputs or 128) if format.is_int8 else 32
    # A step is not below 2 ** -126.
    rows_TD = as_shorts(x_TD, group_inputs) if size > 1e-32 else x_TD
    lost_TD = torch.zeros_like(x_TD) if size > 1e-32 else torch.full_like(x_TD, 2.0**-127)
    largest_E1 = 128 * weight.scales_EN.amax(dim=1, keepdim=True)
    assert_quantized_products(got_TE, rows_TD, weight.numbers(), None, largest_E1, lost_TD)


@pytest.mark.parametrize("format", QUANTIZATIONS)
@pytest.mark.parametrize("largest", [32767.0, 32767.75, -32767.75])
def test_sums_of_the_largest_codes_and_inputs_are_exact(linear, format, largest):
    """A group's largest number is a step below a power of two, or would be rounded up to it."""
    weight = random_codes(format, 40, 1281, torch.bfloat16)
    most = 127 if format.is_int8 else 7
    codes_ED = torch.full((40, 1281), most, dtype=torch.int8)
    codes_ED[1::2] = -most - 1
    ones_EN = torch.ones_like(weight.scales_EN)
    shifts_EN = None if weight.shifts_EN is None else 0 * ones_EN
    product = linear.pack_codes(
        CodedWeight(format, codes_ED, ones_EN, shifts_EN), None, torch.float32
    )

    got_TE = product(torch.full((7, 1281), largest))

    kept = 32767 if largest > 0 else -32767
    want_E = 1281 * kept * codes_ED[:, 0].double()
    torch.testing.assert_close(got_TE.double(), want_E.expand(7, -1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("format", QUANTIZATIONS)
def test_whole_numbers_of_fifteen_bits_stay_as_they_are(linear, format):
    torch.manual_seed(0)
    weight = random_codes(format, 40, 300, torch.bfloat16)
    weight = CodedWeight(
        format,
        weight.codes_ED,
        torch.ones_like(weight.scales_EN),
        None if weight.shifts_EN is None else torch.zeros_like(weight.shifts_EN),
    )
    x_TD = torch.randint(-99, 100, (7, 300)).float()
    x_TD[:, ::32] = 16385  # each group's largest one: a step is 1

    got_TE = linear.pack_codes(weight, None, torch.float32)(x_TD)

    want_TE = F.linear(x_TD.double(), weight.numbers().double())
    torch.testing.assert_close(got_TE.double(), want_TE, rtol=0, atol=4)


@pytest.mark.parametrize("format", [one for one in QUANTIZATIONS if not one.is_int8])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_inputs", [300, 31, 128, 1281])
def test_rows_of_8_bits_meet_codes_of_4(instruction_set, num_inputs, scale_dtype, format):
    """An output's 128 or 32 inputs share a step of the row, as they share a scale."""
    torch.manual_seed(0)
    weight = random_codes(format, 70, num_inputs, scale_dtype)
    bias_E, x_TD = torch.randn(70), torch.randn(20, num_inputs)
    teams = [Team(open_library(instruction_set), number) for number in (1, 2)]
    products = [
        NativeLinear(team, meets_bytes=True).pack_codes(weight, bias_E, torch.float32)
        for team in teams
    ]

    alone_TE = torch.cat([products[0](x_D[None]) for x_D in x_TD])

    rows_TD = as_bytes(x_TD, 32 if "-g32" in format else 128).float()
    largest_E1 = 128 * weight.scales_EN.amax(dim=1, keepdim=True)
    assert_quantized_products(alone_TE, rows_TD, weight.numbers(), bias_E, largest_E1)
    for num_rows in (1, 2, 3, 5, 8, 9, 20):
        for product in products:
            assert torch.equal(product(x_TD[:num_rows]), alone_TE[:num_rows])


@pytest.mark.parametrize("format", QUANTIZATIONS)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_gives_nothing_finite_and_no_other_row_changes(
    linear, dtype, number, format
):
    torch.manual_seed(0)
    product = linear.pack_linear(torch.randn(40, 300).add(3).to(dtype), None, format)
    x_TD = torch.randn(3, 300).to(dtype)
    before_TE = product(x_TD)
    x_TD[1, 170] = number

    got_TE = product(x_TD)

    assert torch.equal(got_TE[::2], before_TE[::2])
    assert not got_TE[1].isfinite().any()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_products_of_a_row_depend_on_no_other_row(linear, dtype, quantization):
    torch.manual_seed(0)
    weight_ED = torch.randn(70, 333)
    product = linear.pack_linear(weight_ED.to(dtype), torch.randn(70), quantization)
    x_TD = torch.randn(70, 333).to(dtype)

    alone_TE = torch.cat([product(x_D[None]) for x_D in x_TD])

    for num_rows in (1, 2, 5, 8, 13, 24, 25, 70):
        assert torch.equal(product(x_TD[:num_rows]), alone_TE[:num_rows])


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_unit_rows_read_the_quantized_numbers_of_the_reference(linear, quantization):
    torch.manual_seed(0)
    weight_ED = torch.randn(40, 300) * torch.randn(40, 1).exp()
    weight_ED[3], weight_ED[4, :200] = 0, -1
    product = linear.pack_linear(weight_ED, None, quantization)

    got_DE = product(torch.eye(300))

    # At most the rounding of scale * code + offset.
    torch.testing.assert_close(got_DE.T, quantized(weight_ED, quantization), rtol=1e-6, atol=1e-6)


def test_quantized_weights_take_their_share_of_the_bytes(linear):
    weight_ED = torch.randn(64, 512)
    bytes_of = {one: linear.pack_linear(weight_ED, None, one).nbytes for one in QUANTIZATIONS}
    numbers = weight_ED.numel()
    assert bytes_of[WeightFormat.INT8] == numbers + 64 * 2
    assert bytes_of[WeightFormat.INT8_G32] == numbers + 64 * 16 * 2
    assert bytes_of[WeightFormat.INT4] == numbers // 2 + 64 * 4 * 2
    assert bytes_of[WeightFormat.INT4_G32_ZERO] == numbers // 2 + 2 * 64 * 16 * 2


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", QUANTIZATIONS)
def test_unit_rows_read_the_numbers_of_the_codes(linear, format, scale_dtype):
    torch.manual_seed(0)
    weight = random_codes(format, 40, 300, scale_dtype)
    product = linear.pack_codes(weight, None, torch.float32)

    got_DE = product(torch.eye(300))

    # Codes and scales are kept as they came. A shift is added to the product, not to the code.
    tolerance = 1e-6 if format.has_zero else 0
    torch.testing.assert_close(got_DE.T, weight.numbers(), rtol=tolerance, atol=32 * tolerance)


def test_scales_that_a_dtype_of_two_bytes_holds_take_two_bytes_and_others_four(linear):
    dtypes = torch.bfloat16, torch.float16, torch.float32
    kinds = [
        linear.pack_codes(random_codes(WeightFormat.INT4_ZERO, 64, 512, dtype), None, torch.float32)
        for dtype in dtypes
    ]
    assert [kind.nbytes for kind in kinds] == [64 * (256 + 2 * 4 * size) for size in (2, 2, 4)]


def test_a_scale_that_is_no_number_gives_outputs_that_are_none_and_changes_no_other(linear):
    weight = random_codes(WeightFormat.INT4, 40, 256, torch.bfloat16)
    weight.scales_EN[3, 0] = torch.nan
    got_TE = linear.pack_codes(weight, None, torch.float32)(torch.randn(2, 256))
    assert got_TE.isfinite().all(dim=0).tolist() == [output != 3 for output in range(40)]
