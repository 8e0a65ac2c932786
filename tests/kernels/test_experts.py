"""Mixtures of experts by every table, against float64.

Dimension key: as in kernels/products.py.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outdraft.core.weights import WeightFormat
from outdraft.kernels.data.coded_weight import CodedWeight
from outdraft.kernels.native.library import Team, open_library, usable_instruction_sets
from outdraft.kernels.native.linear import NativeExperts, NativeLinear
from outdraft.kernels.products import Activation, ExpertWeights, Gate
from outdraft.kernels.torch.experts import GroupedExperts, TorchExperts
from outdraft.kernels.torch.linear import quantized
from tests.kernels.comparisons import Case
from tests.rounding import UNIT

QUANTIZATIONS = [one for one in WeightFormat if one.startswith("int")]
GATE = Gate(Activation.SILU)


def random_weights(
    sizes: tuple[int, int, int], dtype: torch.dtype, *, has_bias: bool = False
) -> ExpertWeights:
    """Random ones; sizes: X, D, I."""
    X, D, I = sizes  # noqa: E741
    biases = (torch.randn(X, 2 * I), torch.randn(X, D)) if has_bias else (None, None)
    return ExpertWeights(
        (torch.randn(X, 2 * I, D) / D**0.5).to(dtype).unbind(),
        (torch.randn(X, D, I) / I**0.5).to(dtype).unbind(),
        *(None if bias is None else bias.to(dtype) for bias in biases),
        dtype=dtype,
    )


def routes(draw, num_rows: int, num_experts: int) -> Tensor:
    """int64 [T, K]: drawn evenly, to one expert only, or to all but one; some lead nowhere."""
    num_picked = draw(st.integers(1, min(8, num_experts)), "K")
    kind = draw(st.sampled_from(["even", "one", "all but one", "nowhere"]), "routes")
    ids_TK = torch.stack([torch.randperm(num_experts)[:num_picked] for _ in range(num_rows)])
    if kind == "one":
        return torch.full_like(ids_TK, num_experts - 1)
    if kind == "all but one":
        ids_TK[ids_TK == 0] = num_experts - 1  # which some rows then meet twice
    if kind == "nowhere":
        ids_TK[torch.rand(ids_TK.shape) < 0.3] = num_experts
    return ids_TK


def compare_pack_experts(case: Case) -> None:
    draw, dtype = case.data.draw, case.dtype
    num_experts, num_rows = draw(st.integers(1, 10), "X"), draw(st.integers(1, 40), "T")
    sizes = num_experts, draw(st.integers(1, 150), "D"), draw(st.integers(1, 100), "I")
    torch.manual_seed(draw(st.integers(0, 2**31), "seed"))
    weights = random_weights(sizes, dtype, has_bias=draw(st.booleans(), "bias"))
    gate = Gate(draw(st.sampled_from(list(Activation)), "activation"), limit=1.5)
    quantization = draw(st.none() | st.sampled_from(QUANTIZATIONS), "quantization")
    ids_TK = routes(draw, num_rows, num_experts)
    weights_TK, x_TD = torch.rand(ids_TK.shape), torch.randn(num_rows, sizes[1]).to(dtype)

    experts = case.kernels.pack_experts(weights, gate, quantization)
    got_TD = experts(x_TD, ids_TK, weights_TK)

    assert got_TD.dtype is dtype
    if quantization is not None:
        assert experts.format is quantization
    exact = in_float64(weights, quantization, dtype if case.kernels.name == "reference" else None)
    group_inputs = 0 if quantization is None else case.rounded_group(quantization)
    want_TD, error_TD = bounded(exact, gate, x_TD, ids_TK, weights_TK, dtype, group_inputs)
    assert ((got_TD.double() - want_TD).abs() <= error_TD).all()
    alone = [
        experts(x_TD[t : t + 1], ids_TK[t : t + 1], weights_TK[t : t + 1]) for t in range(num_rows)
    ]
    assert torch.equal(got_TD, torch.cat(alone))


COMPARISONS = {"pack_experts": compare_pack_experts}


def in_float64(
    weights: ExpertWeights, quantization: WeightFormat | None, rounded: torch.dtype | None
) -> ExpertWeights:
    """The numbers that are multiplied; `rounded`: to which those of a format are."""

    def exact(weight_ED: Tensor) -> Tensor:
        if quantization is None:
            return weight_ED.double()
        found_ED = quantized(weight_ED.float(), quantization)
        return found_ED.to(rounded or torch.float32).double()

    biases = (weights.gate_up_bias_XE, weights.down_bias_XD)
    return ExpertWeights(
        [exact(one) for one in weights.gate_up_X if isinstance(one, Tensor)],
        [exact(one) for one in weights.down_X if isinstance(one, Tensor)],
        *(None if bias is None else bias.double() for bias in biases),
        dtype=torch.float64,
    )


def bounded(
    exact: ExpertWeights,
    gate: Gate,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    dtype: torch.dtype,
    group_inputs: int = 0,
) -> tuple[Tensor, Tensor]:
    """The result in float64, and how far it may be off: each product may be rounded to dtype.

    Args:
        group_inputs: of rows that are rounded to 16 bits (tests/rounding.py); 0: they are not.
    """
    eps = torch.finfo(dtype).eps
    x_TD, weights_TK = x_TD.double(), weights_TK.double()
    want_TD, error_TD, size_TD = (torch.zeros_like(x_TD) for _ in range(3))
    for t, ids_K in enumerate(ids_TK.tolist()):
        for k, expert in enumerate(ids_K):
            if expert == len(exact.down_X):
                continue
            biases = [
                None if bias is None else bias[expert]
                for bias in (exact.gate_up_bias_XE, exact.down_bias_XD)
            ]
            gate_up = exact.gate_up_X[expert]
            assert isinstance(gate_up, Tensor)
            x_1D = x_TD[t : t + 1]
            error_1D = rounding(x_1D, group_inputs)
            both_1E, error_1E = product(x_1D, error_1D, gate_up, biases[0], eps)
            h_1I, error_1I = gated(both_1E, error_1E, gate, eps)
            error_1I = error_1I + rounding(h_1I.abs() + error_1I, group_inputs)
            out_1D, error_1D = product(h_1I, error_1I, exact.down_X[expert], biases[1], eps)
            want_TD[t] += weights_TK[t, k] * out_1D[0]
            error_TD[t] += weights_TK[t, k] * error_1D[0]
            size_TD[t] += (weights_TK[t, k] * out_1D[0]).abs()
    return want_TD, error_TD + 12 * UNIT * size_TD + eps * (want_TD.abs() + error_TD)


def rounding(x_1D: Tensor, group_inputs: int) -> Tensor:
    """At most a step, which has the 15th bit of the largest number of a group."""
    if group_inputs == 0:
        return torch.zeros_like(x_1D)
    steps = [
        (one.abs().amax() * 2.0**-14).expand_as(one) for one in x_1D.split(group_inputs, dim=1)
    ]
    return torch.cat(steps, dim=1)


def product(
    x_1D: Tensor, error_1D: Tensor, weight_ED: Tensor, bias_E: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """A code's size may be up to twice that of its number."""
    largest_ED = 3 * weight_ED.abs().amax(dim=1, keepdim=True).expand_as(weight_ED)
    want_1E, size_1E = F.linear(x_1D, weight_ED, bias_E), F.linear(x_1D.abs(), largest_ED)
    if bias_E is not None:
        size_1E = size_1E + bias_E.abs()
    error_1E = (2 * x_1D.shape[1] + 8) * UNIT * size_1E + F.linear(error_1D, weight_ED.abs())
    return want_1E, error_1E + eps * (want_1E.abs() + error_1E)


def gated(both_1E: Tensor, error_1E: Tensor, gate: Gate, eps: float) -> tuple[Tensor, Tensor]:
    """No activation here is steeper than 1.2."""
    (x_1I, up_1I), (x_error_1I, up_error_1I) = both_1E.chunk(2, -1), error_1E.chunk(2, -1)
    if gate.activation is Activation.CLAMPED:
        x_1I, up_1I = x_1I.clamp(max=gate.limit), up_1I.clamp(-gate.limit, gate.limit) + 1
        act_1I = x_1I * torch.sigmoid(gate.alpha * x_1I)
    elif gate.activation is Activation.SILU:
        act_1I = F.silu(x_1I)
    else:
        tanh = "tanh" if gate.activation is Activation.GELU_TANH else "none"
        act_1I = F.gelu(x_1I, approximate=tanh)
    act_error_1I = 1.2 * x_error_1I + (8 * UNIT + eps) * (x_1I.abs() + x_error_1I)
    up_error_1I = up_error_1I + eps * (up_1I.abs() + up_error_1I)
    h_1I = act_1I * up_1I
    error_1I = act_error_1I * (up_1I.abs() + up_error_1I) + act_1I.abs() * up_error_1I
    return h_1I, error_1I + eps * (h_1I.abs() + error_1I)


@pytest.fixture(scope="module", params=usable_instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> str:
    return request.param


def native(instruction_set: str, num_threads: int) -> Callable[..., NativeExperts]:
    library = open_library(instruction_set)
    assert library is not None
    linear = NativeLinear(Team(library, num_threads))
    return partial(NativeExperts, linear)


@pytest.mark.parametrize("quantization", [None, WeightFormat.INT8, WeightFormat.INT4_G32_ZERO])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_have_the_same_bits_with_any_number_of_threads_and_rows(
    instruction_set, dtype, quantization
):
    torch.manual_seed(0)
    weights = random_weights((6, 64, 48), dtype, has_bias=True)
    x_TD, weights_TK = torch.randn(700, 64).to(dtype), torch.rand(700, 3)
    ids_TK = torch.stack([torch.randperm(6)[:3] for _ in range(700)])
    ids_TK[:400, 0] = 5  # more rows than meet a tile at a time
    found = []
    for num_threads in (1, 2, 4):
        experts = native(instruction_set, num_threads)(weights, GATE, quantization)
        found.append(experts(x_TD, ids_TK, weights_TK))
        for part in (slice(0, 1), slice(390, 397), slice(100, 690)):
            few_TD = experts(x_TD[part], ids_TK[part], weights_TK[part])
            assert torch.equal(few_TD, found[0][part])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_more_tiles_than_units_are_all_computed(instruction_set):
    torch.manual_seed(0)
    weights = random_weights((40, 33, 32 * 40 + 5), torch.float32)
    experts = native(instruction_set, 2)(weights, GATE)
    x_TD, ids_TK, weights_TK = torch.randn(40, 33), torch.arange(40)[:, None], torch.ones(40, 1)
    want_TD = TorchExperts(weights, GATE, None)(x_TD, ids_TK, weights_TK)
    torch.testing.assert_close(experts(x_TD, ids_TK, weights_TK), want_TD, rtol=0, atol=1e-4)


# Rows without an expert hold any bits between the products.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@given(data=st.data())
def test_groups_of_a_gpu_give_what_float64_gives(data: st.DataObject):
    draw, dtype = data.draw, torch.bfloat16
    num_experts, num_rows = draw(st.integers(2, 10), "X"), draw(st.integers(0, 40), "T")
    sizes = num_experts, *(8 * draw(st.integers(1, 12), name) for name in "DI")
    torch.manual_seed(draw(st.integers(0, 2**31), "seed"))
    weights = random_weights(sizes, dtype, has_bias=draw(st.booleans(), "bias"))
    gate = Gate(draw(st.sampled_from(list(Activation)), "activation"), limit=1.5)
    ids_TK = routes(draw, num_rows, num_experts) if num_rows else torch.zeros(0, 2).long()
    weights_TK, x_TD = torch.rand(ids_TK.shape), torch.randn(num_rows, sizes[1]).to(dtype)

    got_TD = GroupedExperts(weights, gate)(x_TD, ids_TK, weights_TK)

    assert got_TD.dtype is dtype
    exact = in_float64(weights, None, None)
    want_TD, error_TD = bounded(exact, gate, x_TD, ids_TK, weights_TK, dtype)
    assert ((got_TD.double() - want_TD).abs() <= error_TD).all()


def test_all_rows_meet_the_only_expert(instruction_set):
    weights, x_TD = random_weights((1, 16, 8), torch.bfloat16), torch.randn(5, 16).bfloat16()
    for pack in (native(instruction_set, 1), TorchExperts, GroupedExperts):
        experts = pack(weights, GATE, None)
        want_TD = experts(x_TD, torch.zeros(5, 1).long(), torch.ones(5, 1))
        assert torch.equal(experts(x_TD), want_TD)


@pytest.mark.parametrize("wrong", [-1, 4])
def test_an_id_out_of_range_is_refused_by_every_table(instruction_set, wrong):
    weights = random_weights((3, 8, 8), torch.float32)
    ids_TK = torch.tensor([[0, 1], [2, wrong]])
    for pack in (native(instruction_set, 1), TorchExperts):
        with pytest.raises(IndexError, match="from 0 to 3"):
            pack(weights, GATE, None)(torch.randn(2, 8), ids_TK, torch.ones(2, 2))


def test_no_rows_and_rows_without_experts_give_nothing(instruction_set):
    weights = random_weights((3, 8, 8), torch.float32)
    for pack in (native(instruction_set, 1), TorchExperts):
        experts = pack(weights, GATE, None)
        no_ids_0K = torch.zeros((0, 2), dtype=torch.int64)
        assert experts(torch.randn(0, 8), no_ids_0K, torch.rand(0, 2)).shape == (0, 8)
        nowhere_TK = torch.full((2, 2), 3)
        assert torch.equal(
            experts(torch.randn(2, 8), nowhere_TK, torch.rand(2, 2)), torch.zeros(2, 8)
        )


@pytest.mark.parametrize("tile", [WeightFormat.INT8_G32, WeightFormat.INT4_G32_ZERO])
def test_codes_of_experts_stay_as_they_are(instruction_set, tile: WeightFormat):
    """The experts of their numbers give the same, by the torch twin."""
    X, D, I = 3, 64, 96  # noqa: E741
    torch.manual_seed(0)

    def coded(num_outputs: int, num_inputs: int) -> CodedWeight:
        codes_ED = torch.randint(-8, 8, (num_outputs, num_inputs), dtype=torch.int8)
        scales_EN = torch.rand(num_outputs, num_inputs // 32).bfloat16().float() / 40
        shifts_EN = torch.ones_like(scales_EN) if tile.has_zero else None
        return CodedWeight(tile, codes_ED, scales_EN, shifts_EN)

    gate_up_X, down_X = ([coded(*sizes) for _ in range(X)] for sizes in ((2 * I, D), (D, I)))
    codes = ExpertWeights(gate_up_X, down_X, dtype=torch.float32)
    numbers = ExpertWeights(
        [one.numbers() for one in gate_up_X],
        [one.numbers() for one in down_X],
        dtype=torch.float32,
    )
    rows = torch.randn(9, D), torch.randint(0, X, (9, 2)), torch.rand(9, 2)
    want_TD = TorchExperts(numbers, GATE)(*rows)
    for pack in (native(instruction_set, 1), TorchExperts):
        experts = pack(codes, GATE)
        assert experts.format is tile
        torch.testing.assert_close(experts(*rows), want_TD, rtol=1e-2, atol=1e-2)


def test_experts_of_one_layer_have_their_codes_in_one_format(instruction_set):
    """Rows are laid out once for all of them."""

    def coded(tile: WeightFormat) -> CodedWeight:
        codes_ED = torch.zeros(128, 128, dtype=torch.int8)
        return CodedWeight(tile, codes_ED, torch.ones(128, 128 // (tile.group_inputs or 128)))

    one, other = coded(WeightFormat.INT4), coded(WeightFormat.INT4_G32)
    same = [coded(WeightFormat.INT4)] * 2
    gate_up = CodedWeight(
        WeightFormat.INT4, torch.zeros(256, 128, dtype=torch.int8), torch.ones(256, 1)
    )
    with pytest.raises(ValueError, match="several formats"):
        native(instruction_set, 1)(
            ExpertWeights([gate_up] * 2, [one, other], dtype=torch.float32), GATE
        )
    native(instruction_set, 1)(ExpertWeights([gate_up] * 2, same, dtype=torch.float32), GATE)


def test_gate_and_up_may_come_in_parts_and_across(instruction_set):
    torch.manual_seed(0)
    whole = random_weights((3, 24, 40), torch.float32)
    turned = [weight.T.contiguous().T for weight in whole.gate_up_X if isinstance(weight, Tensor)]
    parts = ExpertWeights(
        [weight.split(40) for weight in turned],
        [one.T.contiguous().T for one in whole.down_X if isinstance(one, Tensor)],
        dtype=torch.float32,
    )
    x_TD, ids_TK, weights_TK = torch.randn(9, 24), torch.randint(0, 3, (9, 2)), torch.rand(9, 2)
    pack = native(instruction_set, 1)
    for gate in (GATE, Gate(Activation.CLAMPED)):
        got_TD = pack(parts, gate)(x_TD, ids_TK, weights_TK)
        assert torch.equal(got_TD, pack(whole, gate)(x_TD, ids_TK, weights_TK))
