"""Products with bfloat16 weights against float64, alone and with helpers."""

import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outdraft.kernels.reference.table import reference_kernels
from outdraft.models.layers import linear_kernels as kernels
from outdraft.models.layers.linear import Packing, best_packing
from outdraft.models.layers.linear_bf16 import Bf16Product, fits_bfloat16, pack_tiles
from outdraft.models.layers.linear_team import Team, shared_team
from outdraft.models.llama import CausalLM
from outdraft.models.loader import load_model, load_weights, weight_files
from tests.models.checkpoints import (
    VARIANTS,
    chunked_logits,
    llama,
    random_tokens,
    randomised,
    save,
)
from tests.rounding import MODEL_ROUNDING, assert_float32_products

CPU = torch.device("cpu")
NUM_ROWS = [0, *range(1, 41), 63, 64, 65, 200]
SHAPES = [(512, 160), (33, 61), (1, 1), (16, 1000), (200, 33), (1281, 64)]


@pytest.fixture(scope="module", params=[0, 1, 3], ids=lambda helpers: f"{helpers}-helpers")
def team(request: pytest.FixtureRequest) -> Iterator[Team | None]:
    if request.param == 0:
        yield None
        return
    team = Team(request.param)
    team.start()
    yield team


def random_product(
    shape: tuple[int, int], dtype: torch.dtype, team: Team | None, bias: bool = False
) -> tuple[Bf16Product, Tensor, Tensor | None]:
    """The product, and its weight and bias in float64."""
    weight_ED = torch.randn(shape[1], shape[0]).bfloat16()
    bias_E = torch.randn(shape[1]).to(dtype) if bias else None
    product = Bf16Product(weight_ED.to(dtype), bias_E, team)
    return product, weight_ED.double(), None if bias_E is None else bias_E.double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_float32_rows_get_the_products_of_float32(shape, bias, team):
    torch.manual_seed(0)
    product, weight_ED, bias_E = random_product(shape, torch.float32, team, bias)

    for num_rows in NUM_ROWS:
        x_TD = torch.randn(num_rows, shape[0])
        got_TE = product(x_TD)
        assert got_TE.dtype is torch.float32
        assert_float32_products(got_TE, x_TD, weight_ED, bias_E)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_rows_are_rounded_once_at_the_end(shape, bias, team):
    torch.manual_seed(0)
    product, weight_ED, bias_E = random_product(shape, torch.bfloat16, team, bias)

    for num_rows in (1, 5, 9, 70):
        x_TD = torch.randn(num_rows, shape[0]).bfloat16()
        got_TE = product(x_TD)
        assert got_TE.dtype is torch.bfloat16
        assert_float32_products(got_TE, x_TD, weight_ED, bias_E)


def test_float32_becomes_bfloat16_as_in_torch(team):
    values = torch.randn(2000) * 10.0 ** torch.randint(-38, 38, (2000,))
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 1], dtype=torch.int32)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    bias_E = torch.cat((values, ties.view(torch.float32), special))
    product = Bf16Product(torch.zeros(len(bias_E), 1), bias_E, team)
    product._dtype = torch.bfloat16  # a bias with more digits than a bfloat16 model has

    got_TE = product(torch.zeros(3, 1, dtype=torch.bfloat16))

    for got_E in got_TE:
        torch.testing.assert_close(got_E, bias_E.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype, team):
    torch.manual_seed(0)
    product, _, _ = random_product((77, 1000), dtype, team)
    x_TD = torch.randn(200, 77).to(dtype)
    alone_TE = torch.cat([product(x_D[None]) for x_D in x_TD])

    for num_rows in NUM_ROWS:
        assert torch.equal(product(x_TD[:num_rows]), alone_TE[:num_rows])


def test_helpers_change_no_bit():
    torch.manual_seed(0)
    team = Team(2)
    team.start()
    helped, weight_ED, _ = random_product((300, 2000), torch.float32, team)
    alone = Bf16Product(weight_ED.float(), None, None)

    for num_rows in [1, 5, 70] * 40:
        x_TD = torch.randn(num_rows, 300)
        assert torch.equal(helped(x_TD), alone(x_TD))


def test_rows_may_lie_apart_or_across(team):
    torch.manual_seed(0)
    product, weight_ED, _ = random_product((48, 20), torch.float32, team)
    for x_TD in (torch.randn(5, 96)[:, 48:], torch.randn(48, 5).T):
        assert_float32_products(product(x_TD), x_TD, weight_ED)


def test_more_tiles_than_units_are_all_computed(team):
    num_outputs = kernels.MAX_UNITS * 32 * 2 + 40
    product, weight_ED, _ = random_product((4, num_outputs), torch.float32, team)
    x_TD = torch.randn(2, 4)
    assert_float32_products(product(x_TD), x_TD, weight_ED)


def test_nan_and_infinity_reach_the_outputs_they_belong_to(team):
    product, _, _ = random_product((10, 40), torch.float32, team)
    x_TD = torch.zeros(3, 10)
    x_TD[1, 4], x_TD[2, 9] = torch.nan, torch.inf

    got_TE = product(x_TD)

    assert torch.equal(got_TE[0], torch.zeros(40))
    assert got_TE[1].isnan().all()
    assert got_TE[2].isinf().all()


def test_neither_a_helper_nor_the_team_of_another_thread_is_waited_for():
    torch.manual_seed(0)
    team = Team(1)  # never started: its helper is as late as can be
    product, weight_ED, _ = random_product((64, 2000), torch.float32, team)
    x_TD = torch.randn(5, 64)
    want_TE = Bf16Product(weight_ED.float(), None, None)(x_TD)
    assert torch.equal(product(x_TD), want_TE)

    team._words[kernels.LOCK] = 1
    assert torch.equal(product(x_TD), want_TE)


def test_a_unit_that_a_helper_does_not_finish_is_computed_by_the_caller():
    torch.manual_seed(0)
    team = Team(1)
    product, weight_ED, _ = random_product((64, 2000), torch.float32, team)
    x_TD = torch.randn(5, 64)
    want_TE = Bf16Product(weight_ED.float(), None, None)(x_TD)
    units = team._words[kernels.helper_word(1, 0) :]
    num_claims, num_late, is_over = 0, 0, threading.Event()

    def claim_and_vanish() -> None:
        nonlocal num_claims
        while not is_over.is_set():
            free = (units[:16] != 0) & (units[:16] % 4 == 0)
            for unit in free.nonzero().flatten().tolist():
                word = int(units[unit])
                num_claims += kernels.claim_unit(team.address, unit, word // 4)

    thief = threading.Thread(target=claim_and_vanish)
    thief.start()
    try:
        for _ in range(20_000):
            team._words[kernels.ALONE] = 0
            assert torch.equal(product(x_TD), want_TE)
            num_late += int(team._words[kernels.ALONE]) > 0  # it goes on alone for a while
            if num_late > 2:
                break
    finally:
        is_over.set()
        thief.join()
    assert num_claims >= num_late > 0


def test_threads_may_multiply_at_the_same_time():
    torch.manual_seed(0)
    team = Team(1)
    team.start()
    product, weight_ED, _ = random_product((128, 700), torch.float32, team)
    inputs = [torch.randn(5, 128) for _ in range(4)]
    alone = Bf16Product(weight_ED.float(), None, None)
    failures: list[int] = []

    def multiply(index: int) -> None:
        want_TE = alone(inputs[index])
        for _ in range(200):
            if not torch.equal(product(inputs[index]), want_TE):
                failures.append(index)

    threads = [threading.Thread(target=multiply, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_helpers_end_with_their_team():
    before = set(threading.enumerate())
    team = Team(2)
    team.start()
    product, _, _ = random_product((16, 64), torch.float32, team)
    product(torch.randn(1, 16))
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 2

    del product, team
    gc.collect()

    for helper in helpers:
        helper.join(timeout=10)
        assert not helper.is_alive()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tiles_hold_the_bits_of_every_weight_and_zeros(dtype):
    weight_ED = torch.randn(45, 7).bfloat16()

    tiles = pack_tiles(weight_ED.to(dtype))

    assert tiles.shape == (2, 4, 32, 2)
    assert tiles.is_contiguous()
    for output in range(64):
        for k in range(8):
            bits = tiles[output // 32, k // 2, output % 32, k % 2]
            held = output < 45 and k < 7
            assert bits.view(torch.bfloat16) == (weight_ED[output, k] if held else 0)


def test_one_weight_with_more_digits_does_not_fit():
    weight_ED = torch.randn(8, 8).bfloat16().float()
    assert fits_bfloat16(weight_ED)
    weight_ED[3, 5] = torch.tensor(1.0) + 2.0**-9
    assert not fits_bfloat16(weight_ED)
    assert not fits_bfloat16(torch.full((2, 2), torch.nan))


def test_the_packing_is_chosen_by_what_the_weights_hold():
    assert best_packing(torch.float32, CPU, weights_fit_bfloat16=True) is Packing.BF16
    assert best_packing(torch.float32, CPU) is not Packing.BF16
    assert best_packing(torch.float64, CPU, weights_fit_bfloat16=True) is Packing.PLAIN
    cuda = torch.device("cuda")
    assert best_packing(torch.float32, cuda, weights_fit_bfloat16=True) is Packing.PLAIN


@pytest.mark.parametrize(
    ("native", "packing"), [({}, Packing.BF16), ({"amx_bf16": True}, Packing.ONEDNN)]
)
def test_bfloat16_goes_to_onednn_where_the_cpu_multiplies_it(native, packing, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: native)
    assert best_packing(torch.bfloat16, CPU) is packing


@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-biases"])
def test_a_bfloat16_checkpoint_runs_in_float32_from_its_own_bytes(name: str, tmp_path: Path):
    path = save(randomised(VARIANTS[name]()).bfloat16(), tmp_path)
    model = load_model(path, torch.float32, "cpu", reference_kernels())
    plain = CausalLM(model.config, reference_kernels())
    load_weights(plain, weight_files(path))
    token_ids_T = random_tokens(23)

    assert model.lm_head.packing is Packing.BF16
    torch.testing.assert_close(
        chunked_logits(model, token_ids_T, [15, 1, 7]),
        chunked_logits(plain, token_ids_T, [15, 1, 7]),
        rtol=MODEL_ROUNDING,
        atol=MODEL_ROUNDING,
    )


def test_weight_bytes_are_those_that_are_stored_and_read(tmp_path: Path):
    config = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}
    path = save(randomised(llama(**config)).bfloat16(), tmp_path)
    model = load_model(path, torch.float32, "cpu", reference_kernels())
    plain = CausalLM(model.config, reference_kernels())
    load_weights(plain, weight_files(path))

    products = sum(p.numel() for p in plain.parameters() if p.dim() == 2) - 128 * 64
    others = sum(p.numel() for p in plain.parameters() if p.dim() == 1)
    assert model.weight_bytes == 2 * products + 4 * others
    assert model.memory_bytes == model.weight_bytes + 4 * 128 * 64


def test_one_weight_that_does_not_fit_keeps_float32(tmp_path: Path):
    theirs = randomised(VARIANTS["llama"]()).bfloat16().float()
    with torch.no_grad():
        theirs.model.layers[1].mlp.up_proj.weight[3, 4] = 1 + 2.0**-12
    path = save(theirs, tmp_path)

    model = load_model(path, torch.float32, "cpu", reference_kernels())

    assert model.lm_head.packing is best_packing(torch.float32, CPU)
    assert model.lm_head.packing is not Packing.BF16


def _multiply_in_child(product: Bf16Product, x_TD: Tensor, want_TE: Tensor) -> None:
    os._exit(0 if torch.equal(product(x_TD), want_TE) else 1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_computes_right_without_helpers():
    torch.manual_seed(0)
    team = Team(1)
    team.start()
    product, _, _ = random_product((64, 2000), torch.float32, team)
    x_TD = torch.randn(5, 64)
    want_TE = product(x_TD)

    child = multiprocessing.get_context("fork").Process(
        target=_multiply_in_child, args=(product, x_TD, want_TE)
    )
    child.start()
    child.join(timeout=20)

    assert child.exitcode == 0


def test_a_process_has_one_team_and_none_for_one_thread():
    assert shared_team(1) is None
    assert shared_team(2) is shared_team(2)
