import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outdraft.core.draft import Draft
from outdraft.core.sampling import SamplingParams
from outdraft.kernels.data.drafts import DraftBatch, path_ids_BN1K, place_R
from outdraft.kernels.data.sampling import Paths
from outdraft.kernels.torch.sampling import apply_top_k_top_p
from outdraft.kernels.torch.verification import requests_of_rows
from outdraft.sampling.processors import process_logits
from tests.kernels.tables import kernels_for
from tests.reference.processors import processed_logits
from tests.sampling_batches import batch_of_params

VOCAB = 12


def batch(params, bad_words=None, stop_ids=None):
    return batch_of_params(
        params,
        seeds=list(range(len(params))),
        vocab_size=VOCAB,
        device="cpu",
        bad_words=bad_words,
        stop_ids=stop_ids,
    )


def committed(prompts, outputs):
    texts = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    width = max(map(len, texts))
    return Paths(
        history_BL=torch.tensor([text + [-1] * (width - len(text)) for text in texts]),
        prompt_lens_B=torch.tensor([len(prompt) for prompt in prompts]),
        num_tokens_B=torch.tensor([len(text) for text in texts]),
        path_ids_RK=None,
    )


def process(logits_RV, params, prompts=None, outputs=None, **lists):
    prompts = prompts or [[0]] * len(params)
    outputs = outputs or [[]] * len(params)
    request = torch.arange(len(params))
    return process_logits(
        kernels_for(logits_RV.dtype),
        logits_RV,
        request,
        committed(prompts, outputs),
        batch(params, **lists),
    )


def random_logits(num_rows, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(num_rows, VOCAB, generator=generator, dtype=dtype)


def assert_same_distribution(got_V, want):
    """Equal supports, and equal logits up to a constant."""
    want_V = torch.tensor(want, dtype=got_V.dtype)
    assert (got_V == -math.inf).tolist() == (want_V == -math.inf).tolist()
    torch.testing.assert_close(got_V.softmax(0), want_V.softmax(0), rtol=1e-9, atol=1e-12)


ids = st.integers(0, VOCAB - 1)
texts = st.lists(ids, min_size=0, max_size=6)


# All of these are exact in float32, the type of the parameters on the device.
@st.composite
def requests(draw):
    """(params, prompt, output, bad words, stop ids) of one request."""
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.25, 1.0, 1.75])),
        top_k=draw(st.sampled_from([0, -1, 1, 3, 7, VOCAB, 99])),
        top_p=draw(st.sampled_from([0.0625, 0.5, 0.9375, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.03125, 0.5, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.75, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.375, -0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.5, 0.75])),
        logit_bias=draw(st.none() | st.dictionaries(ids, st.floats(-5, 5, width=16), max_size=3)),
        allowed_token_ids=draw(st.none() | st.lists(ids, min_size=1, max_size=8)),
        min_tokens=draw(st.integers(0, 5)),
    )
    words = draw(st.lists(st.lists(ids, min_size=1, max_size=3), max_size=3))
    stops = draw(st.lists(ids, max_size=3))
    return params, [draw(ids), *draw(texts)], draw(texts), words, stops


@st.composite
def trees(draw, max_size=5):
    size = draw(st.integers(0, max_size))
    parents = tuple(draw(st.integers(0, row)) for row in range(size))
    return Draft(tuple(draw(ids) for _ in range(size)), parents)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.tuples(requests(), trees()), min_size=1, max_size=3), st.integers(0, 99))
def test_every_tree_row_is_processed_like_a_plain_request_with_that_path(cases, seed):
    params, prompts, outputs, words, stops = zip(*(case[0] for case in cases), strict=True)
    drafts = DraftBatch.from_drafts([case[1] for case in cases], "cpu")
    num_rows = sum(len(case[1]) + 1 for case in cases)
    request = requests_of_rows(drafts, num_rows)
    place = place_R(drafts, request)
    history = committed(prompts, outputs)
    paths = Paths(
        history.history_BL,
        history.prompt_lens_B,
        history.num_tokens_B,
        path_ids_BN1K(drafts)[request, place],
    )
    logits_RV = random_logits(num_rows, seed, torch.float64)
    if seed % 2:
        logits_RV = logits_RV.round()  # many ties
    sampling = batch(params, bad_words=words, stop_ids=stops)
    got_RV = process_logits(kernels_for(logits_RV.dtype), logits_RV, request, paths, sampling)
    for row in range(num_rows):
        (one, prompt, output, one_words, one_stops), draft = cases[request[row]]
        path, at = [], int(place[row])
        while at:
            path.insert(0, draft.token_ids[at - 1])
            at = draft.parents[at - 1]
        want = processed_logits(
            logits_RV[row].tolist(),
            one,
            prompt,
            [*output, *path],
            bad_words=one_words,
            stop_ids=one_stops,
        )
        assert_same_distribution(got_RV[row], want)


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
        ({"top_k": 4}, [TopKLogitsWarper(4)]),
        ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        ({"repetition_penalty": 1.5}, [RepetitionPenaltyLogitsProcessor(1.5)]),
        (
            {
                "repetition_penalty": 1.2,
                "temperature": 1.4,
                "min_p": 0.03,
                "top_k": 6,
                "top_p": 0.8,
            },
            [
                RepetitionPenaltyLogitsProcessor(1.2),
                TemperatureLogitsWarper(1.4),
                MinPLogitsWarper(0.03),
                TopKLogitsWarper(6),
                TopPLogitsWarper(0.8),
            ],
        ),
    ],
)
def test_processed_logits_are_those_of_transformers(options, stages):
    logits_RV = random_logits(40)
    text = [[3, 5, 5, 1]] * 40
    got_RV = process(
        logits_RV, [SamplingParams(**options)] * 40, [t[:2] for t in text], [t[2:] for t in text]
    )
    want_RV = logits_RV.clone()
    for stage in stages:
        want_RV = stage(torch.tensor(text), want_RV)
    assert torch.equal(got_RV == -math.inf, want_RV == -math.inf)
    torch.testing.assert_close(got_RV.softmax(1), want_RV.softmax(1))


def test_all_ties_with_the_kth_logit_stay_as_in_transformers():
    logits_RV = torch.tensor([[0.0, 2, 1, 1, 1, 3, -1, 1, 0, 0, 0, 0]])
    for top_p in (1.0, 0.999):
        got_RV = process(logits_RV, [SamplingParams(top_k=3, top_p=top_p)])
        want_RV = TopKLogitsWarper(3)(torch.tensor([[0]]), logits_RV)
        assert torch.equal(got_RV == -math.inf, want_RV == -math.inf)


def test_of_ties_at_the_border_of_the_nucleus_the_lowest_ids_stay():
    got_RV = process(torch.zeros(1, VOCAB), [SamplingParams(top_p=0.45)])
    assert (got_RV[0] > -math.inf).nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_a_request_without_top_p_keeps_its_tail_beside_one_that_has_it():
    logits_RV = torch.zeros(2, VOCAB)
    logits_RV[:, 0] = 80.0  # the others vanish in the sum of float32 probabilities
    got_RV = process(logits_RV, [SamplingParams(), SamplingParams(top_p=0.5)])
    assert (got_RV[0] > -math.inf).all()
    assert (got_RV[1] > -math.inf).sum() == 1


def test_greedy_requests_keep_their_scale_beside_sampled_ones():
    logits_RV = random_logits(2)
    got_RV = process(logits_RV, [SamplingParams(temperature=0.0), SamplingParams(temperature=0.5)])
    torch.testing.assert_close(got_RV[0].softmax(0), logits_RV[0].softmax(0))
    assert torch.isfinite(got_RV).all()


@pytest.mark.parametrize("temperature", [1e-40, 1e-6, 100.0])
def test_extreme_temperatures_give_no_nan(temperature):
    logits_RV = random_logits(1) * 50
    probs_V = process(logits_RV, [SamplingParams(temperature=temperature)]).softmax(1)[0]
    assert torch.isfinite(probs_V).all()
    if temperature < 1:
        assert probs_V.argmax() == logits_RV.argmax()
        assert probs_V.max() == 1


@pytest.mark.parametrize("penalty", [1e-46, 1e-38, 1e-30])
def test_extreme_penalties_give_no_nan(penalty):
    logits_RV = torch.full((1, VOCAB), 20.0)
    logits_RV[0, 3:5] = torch.tensor([30.0, 40.0])
    params = SamplingParams(repetition_penalty=penalty)
    probs_V = process(logits_RV, [params], prompts=[[3, 4]]).softmax(1)[0]
    assert probs_V.tolist() == [float(token == 4) for token in range(VOCAB)]


def test_a_row_without_any_token_left_keeps_the_best_allowed_one():
    logits_RV = torch.arange(VOCAB).float()[None]
    params = SamplingParams(allowed_token_ids=[2, 4], min_tokens=1, max_tokens=4)
    got_RV = process(logits_RV, [params], bad_words=[[[2]]], stop_ids=[[4]])
    assert (got_RV[0] > -math.inf).nonzero().flatten().tolist() == [4]


def test_half_precision_logits_are_processed_in_float32_and_not_written_to():
    logits_RV = random_logits(1).bfloat16()
    before_RV = logits_RV.clone()
    got_RV = process(logits_RV, [SamplingParams(logit_bias={1: 5.0}, temperature=0.7)])
    assert got_RV.dtype == torch.float32
    assert torch.equal(logits_RV, before_RV)


def test_penalties_off_by_one_along_the_path_would_be_seen():
    """A negative control of the property above: a path that misses its own row gives else."""
    params = SamplingParams(presence_penalty=1.0)
    history = committed([[1]], [[2]])
    logits_RV, request = random_logits(1), torch.tensor([0])
    right, short = (
        process_logits(
            kernels_for(torch.float32),
            logits_RV,
            request,
            Paths(history.history_BL, history.prompt_lens_B, history.num_tokens_B, path_RK),
            batch([params]),
        )
        for path_RK in (torch.tensor([[3, 4]]), torch.tensor([[3, -1]]))
    )
    assert not torch.allclose(right.softmax(1), short.softmax(1), atol=1e-3)


def test_flags_of_a_plain_greedy_batch_switch_everything_off():
    sampling = batch([SamplingParams(temperature=0.0, top_k=20, top_p=0.8, min_p=0.1)] * 2)
    assert sampling.is_plain_greedy
    assert (sampling.needs_top_p, sampling.needs_min_p, sampling.max_top_k) == (False, False, 0)
    assert not batch([SamplingParams(temperature=0.0, presence_penalty=1.0)]).is_plain_greedy
    assert not batch([SamplingParams(temperature=0.0), SamplingParams()]).is_plain_greedy


@pytest.mark.parametrize(
    ("top_ks", "width"), [((5,), 8), ((1,), 1), ((4, 0), 4), ((9, 3), VOCAB), ((0, 20), 0)]
)
def test_widths_of_top_k_are_few_and_cut_nothing_else(top_ks, width):
    sampling = batch([SamplingParams(top_k=top_k) for top_k in top_ks])
    assert sampling.max_top_k == width
    logits_RV = random_logits(len(top_ks))
    cut_RV = apply_top_k_top_p(logits_RV, torch.arange(len(top_ks)), sampling)
    for top_k, logits_V, cut_V in zip(top_ks, logits_RV, cut_RV, strict=True):
        kept = logits_V.topk(top_k if 0 < top_k < VOCAB else VOCAB).indices
        assert (cut_V == logits_V).nonzero().flatten().tolist() == sorted(kept.tolist())


def test_repeated_ids_of_a_set_take_no_room():
    sampling = batch([SamplingParams(allowed_token_ids=[3, 1, 3, *[1] * 1000]), SamplingParams()])
    assert sampling.allowed is not None
    assert sampling.allowed.ids_BE.tolist() == [[3, 1], [0, 0]]
