"""What threads share of rows of logits has the bits that one thread gives."""

import numpy as np
import pytest
import torch

from outdraft.core.draft import Draft
from outdraft.core.sampling import SamplingParams
from outdraft.kernels.data.drafts import DraftBatch, Rule
from outdraft.kernels.native.library import open_library, usable_instruction_sets
from outdraft.kernels.native.table import native_kernels
from tests.sampling_batches import batch_of_params

NUM_REQUESTS, NUM_DRAFTS, VOCAB_SIZE = 7, 4, 9001  # 315,035 logits: threads share them
CPU = torch.device("cpu")
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(top_k=20),
    SamplingParams(min_p=0.02),
    SamplingParams(temperature=1.3, top_p=0.95, top_k=700),
    SamplingParams(),
    SamplingParams(temperature=0.2),
]

libraries = pytest.mark.parametrize("name", usable_instruction_sets())


def tables(name):
    library = open_library(name)
    return native_kernels(library, 1), native_kernels(library, 4)


def inputs():
    """Logits that are spread out or flat, and trees with drafts that were drawn or given."""
    rng = np.random.default_rng(5)
    num_rows = NUM_REQUESTS * (NUM_DRAFTS + 1)
    scales_R1 = torch.from_numpy(rng.uniform(0.1, 6, (num_rows, 1)))
    logits_RV = torch.from_numpy(rng.normal(size=(num_rows, VOCAB_SIZE))) * scales_R1
    trees = [
        Draft(
            tuple(rng.integers(0, VOCAB_SIZE, NUM_DRAFTS).tolist()),
            tuple(int(rng.integers(0, row + 1)) for row in range(NUM_DRAFTS)),
        )
        for _ in range(NUM_REQUESTS)
    ]
    drafts = DraftBatch.from_drafts(trees, CPU)
    drawn_BNV = torch.from_numpy(rng.normal(size=(NUM_REQUESTS, NUM_DRAFTS, VOCAB_SIZE)))
    drafts.probs_BNV = drawn_BNV.float().softmax(2)
    drafts.is_sampled_BN = torch.from_numpy(rng.random((NUM_REQUESTS, NUM_DRAFTS)) < 0.7)
    drafts.any_sampled = drafts.sampled_trees = True
    sampling = batch_of_params(
        PARAMS, seeds=range(NUM_REQUESTS), vocab_size=VOCAB_SIZE, device="cpu"
    )
    return logits_RV.float(), drafts, sampling


@libraries
def test_threads_process_rows_as_one_does(name):
    logits_RV, drafts, sampling = inputs()
    alone, shared = tables(name)
    request_R = alone.requests_of_rows(drafts, len(logits_RV))
    want_RV = alone.scale_and_cut(logits_RV, request_R, sampling)
    for _ in range(20):
        assert torch.equal(shared.scale_and_cut(logits_RV, request_R, sampling), want_RV)


@libraries
@pytest.mark.parametrize("rule", list(Rule))
def test_threads_verify_as_one_does(name, rule):
    logits_RV, drafts, sampling = inputs()
    alone, shared = tables(name)
    lengths_B = torch.arange(NUM_REQUESTS) + 20
    want = alone.verify(logits_RV, drafts, sampling, lengths_B, rule)
    for _ in range(20):
        got = shared.verify(logits_RV, drafts, sampling, lengths_B, rule)
        assert torch.equal(got.token_ids_BN1, want.token_ids_BN1)
        assert torch.equal(got.rows_BN, want.rows_BN)
        assert torch.equal(got.num_emitted_B, want.num_emitted_B)


@libraries
def test_threads_score_tokens_as_one_does(name):
    logits_RV, _, _ = inputs()
    alone, shared = tables(name)
    rows_R = torch.arange(len(logits_RV)).flip(0)
    chosen_R = logits_RV.argmax(1)
    want = alone.score_tokens(logits_RV, chosen_R, 6, rows_R)
    for _ in range(20):
        for got_R, want_R in zip(
            shared.score_tokens(logits_RV, chosen_R, 6, rows_R), want, strict=True
        ):
            assert torch.equal(got_R, want_R)
