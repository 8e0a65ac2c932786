"""What a grammar allows is applied first, and nothing brings back what it forbids."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.core.sampling import SamplingParams, StructuredOutput
from outdraft.kernels.data.sampling import Paths
from outdraft.sampling.processors import process_logits
from tests.kernels.tables import kernels_for
from tests.sampling_batches import batch_of_params

FORM = StructuredOutput("json_object")


def packed(is_allowed_RV: np.ndarray) -> torch.Tensor:
    """int32 words, bit by bit."""
    num_rows, size = is_allowed_RV.shape
    words = np.zeros((num_rows, -(-size // 32)), dtype=np.uint32)
    for row, token in zip(*np.nonzero(is_allowed_RV), strict=True):
        words[row, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return torch.from_numpy(words.view(np.int32))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 100), st.integers(0, 999), st.sampled_from([32, 64]))
def test_forbidden_tokens_lose_all_mass_and_no_other_changes(num_rows, size, seed, width):
    rng = np.random.default_rng(seed)
    is_allowed = rng.random((num_rows, size)) < rng.random()
    logits = torch.from_numpy(rng.normal(size=(num_rows, size)).astype(f"float{width}"))
    want = np.where(is_allowed, logits.numpy(), -np.inf)
    got = kernels_for(logits.dtype).mask_forbidden(logits, packed(is_allowed))
    np.testing.assert_array_equal(got.numpy(), want)


def process(logits_V: list[float], allowed: list[int], **changes) -> list[float]:
    size = len(logits_V)
    params = SamplingParams(structured=FORM, **changes)
    sampling = batch_of_params(
        [params],
        seeds=[0],
        vocab_size=size,
        device="cpu",
        bad_words=[[[word] for word in range(size)]] if params.bad_words else None,
        stop_ids=[[0]],
    )
    assert sampling.has_grammar
    assert not sampling.is_plain_greedy
    is_allowed = np.isin(np.arange(size), allowed)[None]
    paths = Paths(
        torch.tensor([[1, 2]]), torch.tensor([1]), torch.tensor([2]), None, packed(is_allowed)
    )
    logits = torch.tensor([logits_V])
    kernels, first_R = kernels_for(logits.dtype), torch.zeros(1, dtype=torch.int64)
    return process_logits(kernels, logits, first_R, paths, sampling)[0].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "changes",
    [
        {"allowed_token_ids": [3, 4]},
        {"min_tokens": 5},
        {"bad_words": ["all of them"]},
        {"logit_bias": {3: 100.0}},
        {"allowed_token_ids": [1], "bad_words": ["all of them"], "min_tokens": 5},
        {"repetition_penalty": 0.1, "presence_penalty": -2.0, "frequency_penalty": -2.0},
        {"top_k": 4, "top_p": 0.9, "min_p": 0.1},
    ],
)
def test_no_other_parameter_brings_a_forbidden_token_back(temperature: float, changes: dict):
    kept = process([5.0, 4.0, 3.0, 2.0, 1.0], allowed=[0], temperature=temperature, **changes)
    assert kept[0] > -math.inf
    assert kept[1:] == [-math.inf] * 4


def test_other_parameters_choose_among_what_the_grammar_allows():
    both = process([1.0, 2.0, 3.0, 4.0], allowed=[1, 2], temperature=0.0, allowed_token_ids=[2, 3])
    assert both == [-math.inf, -math.inf, 3.0, -math.inf]
    neither = process([1.0, 2.0, 3.0, 4.0], allowed=[1, 2], temperature=0.0, allowed_token_ids=[3])
    assert neither == [-math.inf, -math.inf, 3.0, -math.inf]  # the form is kept
