import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from outdraft.core.sampling import MAX_SEED
from outdraft.sampling import noise, noise_cpu
from outdraft.sampling.noise import Purpose, philox4x32

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
    bits_RV = noise.random_bits(
        torch.tensor([seed]), torch.tensor([position]), Purpose.ACCEPT, 11, torch.tensor([anchor])
    )
    counter = (vocab_id // 4, position, anchor, int(Purpose.ACCEPT))
    words = philox4x32(
        tuple(map(torch.tensor, counter)),
        (torch.tensor(seed & ONES), torch.tensor(seed >> 32)),
    )
    assert bits_RV[0, vocab_id] == words[vocab_id % 4]


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, MAX_SEED),
    st.integers(0, 2**40),
    st.integers(0, 2**31),
    st.sampled_from(Purpose),
    st.integers(1, 3000),
)
def test_both_twins_give_the_same_gumbel_bits(seed, position, anchor, purpose, vocab_size):
    key = (torch.tensor([seed, 1]), torch.tensor([position, 2]))
    anchors_R = torch.tensor([anchor, 3])
    reference_RV = noise.gumbel_reference(*key, purpose, vocab_size, anchors_R)
    fast_RV = noise.gumbel_cpu(*key, purpose, vocab_size, anchors_R)
    assert torch.equal(reference_RV.view(torch.int32), fast_RV.view(torch.int32))


def test_both_twins_agree_on_a_million_numbers_with_a_purpose_per_row():
    seeds_R, purpose_R = torch.arange(4), torch.arange(4)
    fast_RV = noise.gumbel_cpu(seeds_R, seeds_R, purpose_R, 250_000)
    assert torch.equal(fast_RV, noise.gumbel_reference(seeds_R, seeds_R, purpose_R, 250_000))
    row_V = noise.gumbel_cpu(seeds_R[2:3], seeds_R[2:3], Purpose.RECOVER, 250_000)[0]
    assert torch.equal(fast_RV[2], row_V)


def test_gumbel_is_the_double_logarithm_of_the_bits():
    one = torch.tensor([5])
    bits_RV = noise.random_bits(one, one, Purpose.SAMPLE, 100_000)
    u_RV = (bits_RV.numpy() + 0.5) / 2**32
    got_RV = noise.gumbel(one, one, Purpose.SAMPLE, 100_000).numpy()
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


def test_scalar_noise_is_vocabulary_id_0_in_any_shape():
    seeds, positions = torch.arange(6).view(2, 3), torch.arange(6).view(2, 3) * 7
    anchors = torch.full((2, 3), 4)
    flat_R = noise.uniform(
        seeds.flatten(), positions.flatten(), Purpose.ACCEPT, 9, anchors.flatten()
    )[:, 0]
    got = noise.uniform_scalar(seeds, positions, Purpose.ACCEPT, anchors)
    assert torch.equal(got, flat_R.view(2, 3))


def test_noise_of_a_row_does_not_depend_on_the_batch():
    seeds_R, positions_R = torch.tensor([3, 9, 27]), torch.tensor([100, 5, 8])
    batch_RV = noise.gumbel(seeds_R, positions_R, Purpose.SAMPLE, 50)
    alone_RV = noise.gumbel(seeds_R[1:2], positions_R[1:2], Purpose.SAMPLE, 50)
    assert torch.equal(batch_RV[1], alone_RV[0])


def test_uniform_noise_is_uniform_along_every_part_of_its_key():
    many, zero = torch.arange(50_000), torch.zeros(50_000, dtype=torch.int64)
    for u in (
        noise.uniform_scalar(many, zero, Purpose.DRAFT),
        noise.uniform_scalar(zero, many, Purpose.DRAFT),
        noise.uniform_scalar(zero, zero, Purpose.DRAFT, many),
        noise.uniform(zero[:1], zero[:1], Purpose.DRAFT, 50_000)[0],
    ):
        assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-6


def test_purposes_and_anchors_are_independent_streams():
    many, zero = torch.arange(40_000), torch.zeros(40_000, dtype=torch.int64)
    streams = [noise.uniform_scalar(zero + 11, many, purpose) for purpose in Purpose]
    streams.append(noise.uniform_scalar(zero + 11, many, Purpose.DRAFT, zero + 1))
    cells = [(u * 8).long().numpy() for u in streams]
    for at, one in enumerate(cells):
        for other in cells[:at]:
            table = np.bincount(one * 8 + other, minlength=64)
            assert stats.chisquare(table).pvalue > 1e-6


def noisy_logits(seed, vocab_size, scale, is_cut):
    generator = torch.Generator().manual_seed(seed)
    logits_RV = scale * torch.randn(3, vocab_size, generator=generator)
    if is_cut:
        logits_RV[:, vocab_size // 3 + 1 :] = -torch.inf
    key = (torch.arange(3) + seed, torch.arange(3))
    return logits_RV, key, noise.gumbel_reference(*key, Purpose.SAMPLE, vocab_size)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 5000), st.floats(0, 30), st.booleans())
def test_the_fused_sample_is_the_argmax_of_logits_and_noise(seed, vocab_size, scale, is_cut):
    logits_RV, key, noise_RV = noisy_logits(seed, vocab_size, scale, is_cut)
    for row, want in enumerate((logits_RV + noise_RV).argmax(1).tolist()):
        got = noise_cpu.sample_logits(
            logits_RV[row].numpy(), seed + row, row, 0, int(Purpose.SAMPLE)
        )
        assert got == want
    generic_R = noise.sample_gumbel(logits_RV.double(), *key, Purpose.SAMPLE)
    assert torch.equal(generic_R, (logits_RV.double() + noise_RV).argmax(1))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 5000), st.floats(0, 30), st.booleans())
def test_a_sample_of_weights_is_the_argmax_of_their_logarithms_and_noise(
    seed, vocab_size, scale, is_cut
):
    logits_RV, _, noise_RV = noisy_logits(seed, vocab_size, scale, is_cut)
    weights_RV = logits_RV.softmax(1) * 10 ** -(seed % 7)
    for row in range(3):
        got = noise_cpu.sample_weights(
            weights_RV[row].numpy(), seed + row, row, 0, int(Purpose.SAMPLE)
        )
        keys_V = weights_RV[row].double().log() + noise_RV[row]
        # Only keys that float32 cannot tell apart may change places.
        assert keys_V[got] > keys_V.max() - 1e-5


@pytest.mark.parametrize("purpose", [Purpose.ACCEPT, Purpose.DRAFT])
def test_both_twins_give_the_same_coins(purpose):
    many = torch.arange(500)
    want = noise.uniform_scalar(many * 10**15, many * 3, purpose, many)
    got = [noise_cpu.uniform_scalar(k * 10**15, k * 3, k, int(purpose)) for k in range(500)]
    assert want.tolist() == got


def test_no_noise_exceeds_the_ceiling_of_its_leading_bits():
    cells = torch.arange(4096)
    largest = ((cells << 20) + 0xFFFFF).double()
    gumbel = -noise._log(-noise._log((largest + 0.5) * 2.0**-32)).float()
    assert (gumbel <= torch.from_numpy(noise_cpu._CEILINGS)).all()
