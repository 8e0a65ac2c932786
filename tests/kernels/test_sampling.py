"""Rows of logits by each table: the same numbers, the same tokens masked, the same choices."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from outdraft.core.sampling import SamplingParams
from outdraft.kernels.choose import choose_kernels
from outdraft.kernels.data.drafts import DraftBatch, Rule
from outdraft.kernels.data.noise import NoiseKeys, Purpose
from outdraft.kernels.data.sampling import Paths
from outdraft.kernels.draft_ops import LevelTask
from outdraft.kernels.native.library import usable_instruction_sets
from outdraft.kernels.ops import Kernels
from outdraft.kernels.torch import noise
from outdraft.kernels.torch.sampling import scale_and_cut
from tests.kernels.comparisons import Case
from tests.sampling_batches import batch_of_params

MASS = 2e-6  # what rounding may do to the mass of a nucleus


def table(name: str) -> Kernels:
    return choose_kernels(name, torch.device("cpu"), torch.float32)


tables = pytest.mark.parametrize(
    "kernels",
    [*map(table, usable_instruction_sets()), table("reference")],
    ids=lambda one: one.name,
)


def compare_mask_forbidden(case: Case) -> None:
    rng, size = case.rng(), case.data.draw(st.integers(1, 100))
    logits_RV = torch.from_numpy(rng.normal(size=(3, size))).float()
    words = rng.integers(-(2**31), 2**31, (3, -(-size // 32))).astype(np.int32)
    got_RV, want_RV = (
        kernels.mask_forbidden(logits_RV, torch.from_numpy(words))
        for kernels in (case.kernels, case.reference)
    )
    assert torch.equal(got_RV, want_RV)


def compare_finite_rows(case: Case) -> None:
    rng, size = case.rng(), case.data.draw(st.integers(1, 100))
    logits_RV = torch.from_numpy(rng.normal(size=(5, size))).float()
    logits_RV[1, rng.integers(size)] = torch.nan
    logits_RV[2, rng.integers(size)] = -torch.inf
    logits_RV[3] = -torch.inf
    logits_RV[4, rng.integers(size)] = torch.inf
    got_R, want_R = (one.finite_rows(logits_RV) for one in (case.kernels, case.reference))
    assert torch.equal(got_R, want_R)
    assert want_R.tolist() == [True, False, size > 1, False, False]


def batch(params, vocab_size):
    return batch_of_params(params, seeds=[0] * len(params), vocab_size=vocab_size, device="cpu")


def kept(logits_RV, request_R, sampling, shift):
    """What the reference keeps with a top_p that is `shift` larger."""
    is_used_B = sampling.top_p_B < 1
    moved_B = (sampling.top_p_B + shift).clamp(1e-7, 1 - 1e-7)
    moved = replace(sampling, top_p_B=torch.where(is_used_B, moved_B, sampling.top_p_B))
    return scale_and_cut(logits_RV, request_R, moved) > -torch.inf


def check(kernels, logits_RV, request_R, sampling):
    """How many rows differ because of rounding at the border of their nucleus."""
    got_RV = kernels.scale_and_cut(logits_RV, request_R, sampling)
    want_RV = scale_and_cut(logits_RV, request_R, sampling)
    is_kept_RV = got_RV > -torch.inf
    both_RV = is_kept_RV & (want_RV > -torch.inf)
    assert torch.equal(got_RV[both_RV], want_RV[both_RV])
    least_RV = kept(logits_RV, request_R, sampling, -MASS)
    most_RV = kept(logits_RV, request_R, sampling, MASS)
    assert (is_kept_RV[least_RV]).all()
    assert (most_RV[is_kept_RV]).all()
    return int((is_kept_RV != (want_RV > -torch.inf)).any(1).sum())


@st.composite
def parameters(draw):
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-3, 0.3, 1.0, 1.7])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.001, 0.2, 1.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 20, 700, 10**6])),
        top_p=draw(st.sampled_from([1.0, 1.0, 1e-9, 0.1, 0.5, 0.93, 0.999999])),
    )


def compare_scale_and_cut(case: Case) -> None:
    requests = case.data.draw(st.lists(parameters(), min_size=1, max_size=3))
    size, rng = case.data.draw(st.integers(1, 1500)), case.rng()
    scale = case.data.draw(st.sampled_from([0.0, 0.5, 3.0, 40.0]))
    request_R = torch.from_numpy(np.sort(rng.integers(0, len(requests), 4)))
    logits_RV = torch.from_numpy(scale * rng.normal(size=(4, size))).float()
    logits_RV = logits_RV.round() if case.data.draw(st.booleans(), "ties") else logits_RV
    masked = case.data.draw(st.sampled_from([0.0, 0.6]))
    logits_RV = logits_RV.masked_fill(torch.from_numpy(rng.random((4, size)) < masked), -torch.inf)
    logits_RV[:, rng.integers(size)] = 1.0
    check(case.kernels, logits_RV, request_R, batch([*requests, SamplingParams()], size))


def choose(kernels: Kernels, logits_RV: Tensor, keys: NoiseKeys, is_greedy_R: Tensor) -> Tensor:
    """The tokens behind empty drafts, int64 [R]: keys of Purpose.SAMPLE, without an anchor."""
    sampling = replace(
        batch([SamplingParams(temperature=0), SamplingParams()], logits_RV.shape[1]),
        is_greedy_B=is_greedy_R,
        shares_noise_B=torch.zeros_like(is_greedy_R),
        seeds_B=keys.seeds_R,
    )
    drafts = DraftBatch.empty(len(logits_RV), "cpu")
    verdict = kernels.verify(logits_RV, drafts, sampling, keys.positions_R, Rule.MATCH)
    return verdict.token_ids_BN1[:, 0]


@st.composite
def penalties(draw):
    return SamplingParams(
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.3, -0.1])),
    )


def compare_penalize(case: Case) -> None:
    draw, rng = case.data.draw, case.rng()
    size, num_rows = draw(st.integers(1, 40)), draw(st.integers(1, 12))
    num_requests, length = draw(st.integers(1, 3)), draw(st.integers(1, 30))
    sampling = batch([draw(penalties()) for _ in range(num_requests)], size)
    history_BL = torch.from_numpy(rng.integers(0, size, (num_requests, length)))
    num_tokens_B = torch.from_numpy(rng.integers(1, length + 1, num_requests))
    prompt_lens_B = torch.from_numpy(rng.integers(0, length + 1, num_requests))
    is_past_BL = torch.arange(length) >= num_tokens_B[:, None]
    request_R = torch.from_numpy(rng.integers(0, num_requests, num_rows))
    path_RK = None
    if depth := draw(st.integers(0, 5)):
        path_RK = torch.from_numpy(rng.integers(0, size, (num_rows, depth)))
        lengths_R1 = torch.from_numpy(rng.integers(0, depth + 1, (num_rows, 1)))
        path_RK = path_RK.masked_fill(torch.arange(depth) >= lengths_R1, -1)
    paths = Paths(history_BL.masked_fill(is_past_BL, -1), prompt_lens_B, num_tokens_B, path_RK)
    logits_RV = torch.from_numpy(3 * rng.normal(size=(num_rows, size))).float()
    logits_RV[0, 0] = -torch.inf
    given_RV = logits_RV.clone()
    got_RV, want_RV = (
        kernels.penalize(logits_RV, request_R, paths, sampling)
        for kernels in (case.kernels, case.reference)
    )
    assert torch.equal(got_RV, want_RV)
    assert torch.equal(logits_RV, given_RV)


COMPARISONS = {
    "mask_forbidden": compare_mask_forbidden,
    "finite_rows": compare_finite_rows,
    "penalize": compare_penalize,
    "scale_and_cut": compare_scale_and_cut,
}


@tables
def test_rounding_at_the_border_of_the_nucleus_is_rare(kernels):
    generator = torch.Generator().manual_seed(3)
    logits_RV = 2 * torch.randn(3000, 300, generator=generator)
    request_R = torch.arange(3000) % 3
    sampling = batch(
        [SamplingParams(top_p=p, top_k=k) for p, k in ((0.5, 0), (0.9, 0), (0.99, 50))], 300
    )
    assert check(kernels, logits_RV, request_R, sampling) <= 1


@tables
def test_a_row_does_not_see_the_others(kernels):
    generator = torch.Generator().manual_seed(4)
    logits_RV = 2 * torch.randn(6, 777, generator=generator)
    sampling = batch([SamplingParams(temperature=0.7, top_k=90, top_p=0.9, min_p=0.001)] * 6, 777)
    rows_R, is_greedy_R = torch.arange(6), torch.zeros(6, dtype=torch.bool)
    whole_RV = kernels.scale_and_cut(logits_RV, rows_R, sampling)
    keys = NoiseKeys.of(rows_R, rows_R, Purpose.SAMPLE)
    ids_R = choose(kernels, whole_RV, keys, is_greedy_R)
    for row in range(6):
        one = slice(row, row + 1)
        alone_RV = kernels.scale_and_cut(logits_RV[one], rows_R[one], sampling)
        assert torch.equal(alone_RV[0], whole_RV[row])
        key = NoiseKeys.of(rows_R[one], rows_R[one], Purpose.SAMPLE)
        assert choose(kernels, alone_RV, key, is_greedy_R[one])[0] == ids_R[row]


@tables
@pytest.mark.parametrize("seed", range(12))
def test_tokens_are_those_of_the_reference_whatever_the_logits(kernels, seed):
    rng = np.random.default_rng(seed)
    size, scale = int(rng.integers(1, 5000)), rng.uniform(0, 30)
    logits_RV = torch.from_numpy(scale * rng.normal(size=(4, size))).float()
    if seed % 2:
        logits_RV[:, size // 3 + 1 :] = -torch.inf
    if seed % 3 == 0:
        logits_RV = logits_RV.round()  # ties
    columns = [torch.from_numpy(rng.integers(0, end, 4)) for end in (2**62, 2**40)]
    rows = logits_RV, NoiseKeys.of(*columns, Purpose.SAMPLE), torch.from_numpy(rng.random(4) < 0.3)
    assert torch.equal(choose(kernels, *rows), choose(table("reference"), *rows))


@tables
def test_rows_of_nan_stay_nan_and_harm_nothing(kernels):
    logits_RV = torch.randn(3, 500, generator=torch.Generator().manual_seed(5))
    logits_RV[1] = torch.nan
    sampling = batch([SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.001)], 500)
    got_RV = kernels.scale_and_cut(logits_RV, torch.zeros(3, dtype=torch.int64), sampling)
    assert torch.isfinite(got_RV[[0, 2]].softmax(1)).all()
    assert not (got_RV[1] > -torch.inf).any()
    rows_R = torch.arange(3)
    keys = NoiseKeys.of(rows_R, rows_R, Purpose.SAMPLE)
    ids_R = choose(kernels, got_RV, keys, torch.zeros(3, dtype=torch.bool))
    assert ((ids_R >= 0) & (ids_R < 500)).all()


def pick(kernels, processed_RV, greedy):
    rows_R = torch.arange(len(processed_RV))
    keys = NoiseKeys.of(rows_R, rows_R, Purpose.SAMPLE)
    return choose(kernels, processed_RV, keys, torch.tensor(greedy))


@tables
def test_greedy_rows_take_the_lowest_id_of_a_tie(kernels):
    logits_RV = torch.tensor([[0.0, 2, 1, 2], [3.0, 3, 3, 3], [-0.0, 0, -1, -1]])
    assert pick(kernels, logits_RV, [True] * 3).tolist() == [1, 0, 0]


@tables
def test_greedy_rows_get_no_noise_beside_sampled_ones(kernels):
    logits_RV = torch.tensor([[0.0, 0, 1e-6, 0]]).repeat(400, 1)
    ids_R = pick(kernels, logits_RV, [row % 2 == 0 for row in range(400)])
    assert set(ids_R[::2].tolist()) == {2}
    assert set(ids_R[1::2].tolist()) == {0, 1, 2, 3}


@tables
def test_samples_follow_the_softmax_and_never_leave_its_support(kernels):
    logits_V = torch.tensor([0.5, -torch.inf, 2.0, 0.0, -1.0, -torch.inf, 1.0])
    ids_R = pick(kernels, logits_V.repeat(60_000, 1), [False] * 60_000)
    counts_V = np.bincount(ids_R.numpy(), minlength=7)
    want_V = logits_V.softmax(0).double().numpy()
    live = want_V > 0
    assert counts_V[~live].sum() == 0
    want = want_V[live] / want_V[live].sum() * 60_000
    assert stats.chisquare(counts_V[live], want).pvalue > 1e-6


@tables
def test_exponentials_are_right_to_float32_over_their_whole_range(kernels):
    """Pairs (0, x): the second probability is exp(x) / (1 + exp(x))."""
    x_R = torch.linspace(-80, 0, 30_001)
    logits_RV = torch.stack([torch.zeros_like(x_R), x_R], dim=1)
    every_R = torch.ones(len(x_R), dtype=torch.int64)
    task = LevelTask(1, every_R, 0, every_R, every_R, every_R, every_R.bool())
    level = kernels.draw_level(logits_RV[:, None], every_R[:, None].float(), task)
    probs_RV = level.probs_BFV[:, 0]
    exact_RV = logits_RV.double().softmax(1)
    torch.testing.assert_close(probs_RV.double(), exact_RV, rtol=4e-7, atol=0)


def test_the_sample_of_float64_logits_is_the_argmax_with_the_same_noise():
    generator = torch.Generator().manual_seed(6)
    logits_RV = torch.randn(5, 90, generator=generator, dtype=torch.float64)
    rows_R = torch.arange(5)
    keys = NoiseKeys.of(rows_R, rows_R, Purpose.SAMPLE)
    want_R = (logits_RV + noise.gumbel(keys, 90)).argmax(1)
    got_R = choose(table("reference"), logits_RV, keys, torch.zeros(5, dtype=torch.bool))
    assert torch.equal(got_R, want_R)
