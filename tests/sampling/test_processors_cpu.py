"""The compiled last stages against the tensor ones: the same numbers, the same tokens masked."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.core.sampling import SamplingParams
from outdraft.sampling.batch import SamplingBatch
from outdraft.sampling.processors import Paths, process_logits, scale_and_cut

NO_TEXT = torch.zeros(1, dtype=torch.int64)
MASS = 2e-6  # what rounding may do to the mass of a nucleus


def batch(params, vocab_size):
    return SamplingBatch.from_requests(
        params, seeds=[0] * len(params), vocab_size=vocab_size, device="cpu"
    )


def compiled(logits_RV, request_R, sampling):
    return process_logits(logits_RV, request_R, Paths(None, NO_TEXT, NO_TEXT, None), sampling)


def kept(logits_RV, request_R, sampling, shift):
    """What the tensor twin keeps with a top_p that is `shift` larger."""
    is_used_B = sampling.top_p_B < 1
    moved_B = (sampling.top_p_B + shift).clamp(1e-7, 1 - 1e-7)
    moved = replace(sampling, top_p_B=torch.where(is_used_B, moved_B, sampling.top_p_B))
    return scale_and_cut(logits_RV, request_R, moved) > -torch.inf


def check(logits_RV, request_R, sampling):
    """How many rows differ because of rounding at the border of their nucleus."""
    got_RV = compiled(logits_RV, request_R, sampling)
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
def params(draw):
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-3, 0.3, 1.0, 1.7])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.001, 0.2, 1.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 20, 700, 10**6])),
        top_p=draw(st.sampled_from([1.0, 1.0, 1e-9, 0.1, 0.5, 0.93, 0.999999])),
    )


@settings(deadline=None, max_examples=300)
@given(
    st.lists(params(), min_size=1, max_size=3),
    st.integers(1, 1500),
    st.sampled_from([0.0, 0.5, 3.0, 40.0]),
    st.sampled_from([0.0, 0.6]),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_the_same_tokens_stay_with_the_same_logits(requests, size, scale, masked, is_tied, seed):
    rng = np.random.default_rng(seed)
    request_R = torch.from_numpy(np.sort(rng.integers(0, len(requests), 4)))
    logits_RV = torch.from_numpy(scale * rng.normal(size=(4, size))).float()
    logits_RV = logits_RV.round() if is_tied else logits_RV
    logits_RV = logits_RV.masked_fill(torch.from_numpy(rng.random((4, size)) < masked), -torch.inf)
    logits_RV[:, rng.integers(size)] = 1.0
    check(logits_RV, request_R, batch([*requests, SamplingParams()], size))


def test_rounding_at_the_border_of_the_nucleus_is_rare():
    generator = torch.Generator().manual_seed(3)
    logits_RV = 2 * torch.randn(3000, 300, generator=generator)
    request_R = torch.arange(3000) % 3
    sampling = batch(
        [SamplingParams(top_p=p, top_k=k) for p, k in ((0.5, 0), (0.9, 0), (0.99, 50))], 300
    )
    assert check(logits_RV, request_R, sampling) <= 1


def test_a_row_does_not_see_the_others():
    generator = torch.Generator().manual_seed(4)
    logits_RV = 2 * torch.randn(6, 777, generator=generator)
    sampling = batch([SamplingParams(temperature=0.7, top_k=90, top_p=0.9, min_p=0.001)] * 6, 777)
    whole_RV = compiled(logits_RV, torch.arange(6), sampling)
    for row in range(6):
        alone_RV = compiled(logits_RV[row : row + 1], torch.tensor([row]), sampling)
        assert torch.equal(alone_RV[0], whole_RV[row])


def test_rows_of_nan_stay_nan_and_harm_nothing():
    logits_RV = torch.randn(3, 500, generator=torch.Generator().manual_seed(5))
    logits_RV[1] = torch.nan
    sampling = batch([SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.001)], 500)
    request_R = torch.zeros(3, dtype=torch.int64)
    got_RV = compiled(logits_RV, request_R, sampling)
    assert torch.isfinite(got_RV[[0, 2]].softmax(1)).all()
    assert not (got_RV[1] > -torch.inf).any()
