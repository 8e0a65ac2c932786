"""Noise: the published numbers, their distribution, and the same bits from each table."""

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scipy import stats

from outdraft.core.sampling import MAX_INT64
from outdraft.kernels.choose import choose_kernels
from outdraft.kernels.data.noise import NoiseKeys, Purpose
from outdraft.kernels.native.library import usable_instruction_sets
from outdraft.kernels.torch import noise
from outdraft.kernels.torch.noise import philox4x32
from tests.kernels.comparisons import Case

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, want):
    words = philox4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(map(int, words)) == want


def test_bits_are_philox_of_seed_position_anchor_and_purpose():
    seed, position, anchor, vocab_id = 0x123456789ABCDEF, 77, 70, 10
    key = (torch.tensor([seed]), torch.tensor([position]))
    keys = NoiseKeys.of(*key, Purpose.ACCEPT, torch.tensor([anchor]))
    bits_RV = noise.random_bits(keys, 11)
    counter = (vocab_id // 4, position, anchor, int(Purpose.ACCEPT))
    words = philox4x32(
        tuple(map(torch.tensor, counter)),
        (torch.tensor(seed & ONES), torch.tensor(seed >> 32)),
    )
    assert bits_RV[0, vocab_id] == words[vocab_id % 4]


def compare_gumbel(case: Case) -> None:
    """Bit by bit."""
    num_rows, vocab_size = case.data.draw(st.integers(1, 5)), case.data.draw(st.integers(1, 3000))
    rng = case.rng()
    columns = [rng.integers(0, end, num_rows) for end in (MAX_INT64, 2**40, 4, 2**31)]
    keys = NoiseKeys(*map(torch.from_numpy, columns))
    got_RV, want_RV = (one.gumbel(keys, vocab_size) for one in (case.kernels, case.reference))
    assert torch.equal(got_RV.view(torch.int32), want_RV.view(torch.int32))


COMPARISONS = {"gumbel": compare_gumbel}


@pytest.mark.parametrize("name", usable_instruction_sets())
def test_a_million_numbers_have_the_bits_of_the_reference(name):
    kernels = choose_kernels(name, torch.device("cpu"), torch.float32)
    rows_R = torch.arange(4)
    keys = NoiseKeys(rows_R, rows_R, rows_R, rows_R)
    assert torch.equal(kernels.gumbel(keys, 250_000), noise.gumbel(keys, 250_000))


def test_gumbel_is_the_double_logarithm_of_the_bits():
    one = torch.tensor([5])
    keys = NoiseKeys.of(one, one, Purpose.SAMPLE)
    bits_RV = noise.random_bits(keys, 100_000)
    u_RV = (bits_RV.numpy() + 0.5) / 2**32
    got_RV = noise.gumbel(keys, 100_000).numpy()
    np.testing.assert_allclose(got_RV, -np.log(-np.log(u_RV)), rtol=1e-6, atol=1e-7)


def test_extreme_bits_give_finite_gumbel():
    edge = torch.tensor([0, ONES]).double()
    gumbel = -noise._log(-noise._log((edge + 0.5) * 2.0**-32))
    want = -np.log(-np.log((np.array([0, ONES]) + 0.5) / 2**32))
    np.testing.assert_allclose(gumbel.numpy(), want, rtol=1e-9)


def test_extreme_bits_stay_inside_the_open_unit_interval():
    u = noise._unit(torch.tensor([0, ONES]))
    assert 0 < u[0] < u[1] < 1
    assert u[0] + u[1] == 1


def test_scalar_noise_is_vocabulary_id_0():
    keys = NoiseKeys.of(torch.arange(6), torch.arange(6) * 7, Purpose.ACCEPT, torch.arange(6) + 4)
    assert torch.equal(noise.uniform_scalar(keys), noise.uniform(keys, 9)[:, 0])


def test_noise_of_a_row_does_not_depend_on_the_batch():
    seeds_R, positions_R = torch.tensor([3, 9, 27]), torch.tensor([100, 5, 8])
    batch_RV = noise.gumbel(NoiseKeys.of(seeds_R, positions_R, Purpose.SAMPLE), 50)
    alone = NoiseKeys.of(seeds_R[1:2], positions_R[1:2], Purpose.SAMPLE)
    assert torch.equal(batch_RV[1], noise.gumbel(alone, 50)[0])


def test_noise_that_decides_about_drafts_needs_anchors():
    for purpose in (Purpose.DRAFT, Purpose.ACCEPT):
        with pytest.raises(ValueError, match="anchors"):
            NoiseKeys.of(torch.arange(2), torch.arange(2), purpose)


def test_uniform_noise_is_uniform_along_every_part_of_its_key():
    many, zero = torch.arange(50_000), torch.zeros(50_000, dtype=torch.int64)
    for u in (
        noise.uniform_scalar(NoiseKeys(many, zero, zero, zero)),
        noise.uniform_scalar(NoiseKeys(zero, many, zero, zero)),
        noise.uniform_scalar(NoiseKeys(zero, zero, zero, many)),
        noise.uniform(NoiseKeys(zero[:1], zero[:1], zero[:1], zero[:1]), 50_000)[0],
    ):
        assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-6


def test_purposes_and_anchors_are_independent_streams():
    many, zero = torch.arange(40_000), torch.zeros(40_000, dtype=torch.int64)
    streams = [
        noise.uniform_scalar(NoiseKeys(zero + 11, many, zero + purpose, zero + anchor))
        for purpose, anchor in [*((one, 0) for one in Purpose), (Purpose.DRAFT, 1)]
    ]
    cells = [(u * 8).long().numpy() for u in streams]
    for at, one in enumerate(cells):
        for other in cells[:at]:
            table = np.bincount(one * 8 + other, minlength=64)
            assert stats.chisquare(table).pvalue > 1e-6
