"""A drafter of another vocabulary behaves like one of the target's that knows fewer tokens."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from outdraft.core.draft import Draft
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.device.translated_model import TranslatedModel, VocabularyMap
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.data.noise import NoiseKeys, Purpose
from outdraft.kernels.data.sampling import Paths, SamplingBatch
from outdraft.kernels.torch.table import reference_kernels
from outdraft.kv.cache import KVCache
from outdraft.models.decoder.causal_lm import CausalLM
from outdraft.models.decoder.config import ModelConfig
from outdraft.models.decoder.loader import load_model
from outdraft.sampling.processors import process_logits
from outdraft.verification.verifier import Verifier
from tests.attention.causal import causal_metadata
from tests.kernels.tables import cpu_kernels, draw_tokens, kernels_for
from tests.models.checkpoints import llama, randomised, save
from tests.reference.processors import probabilities, processed_logits
from tests.sampling_batches import batch_of_params

ALPHA = 1e-6


def random_map(size: int, draft_size: int, num_shared: int, seed: int = 0) -> VocabularyMap:
    """Shared pairs and stand-ins in no order at all."""
    rng = np.random.default_rng(seed)
    target_ids = torch.from_numpy(rng.permutation(size)[:num_shared])
    draft_ids = torch.from_numpy(rng.permutation(draft_size)[:num_shared])
    to_draft_V = torch.from_numpy(rng.integers(0, draft_size, size))
    to_target_U = torch.full((draft_size,), -1)
    to_draft_V[target_ids] = draft_ids
    to_target_U[draft_ids] = target_ids
    return VocabularyMap(to_draft_V, to_target_U, size, draft_size)


def pairs(vocabulary: VocabularyMap) -> dict[int, int]:
    """Shared ids, target's to drafter's."""
    return {v: u for u, v in enumerate(vocabulary.draft_to_target_U.tolist()) if v >= 0}


@pytest.fixture(scope="module", params=[torch.float64, torch.float32])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """61 ids; packed as bfloat16 a few rows take the compiled pass."""
    oracle = randomised(llama(num_hidden_layers=2)).bfloat16().float()
    path = save(oracle, tmp_path_factory.mktemp("drafter"))
    if request.param is torch.float64:
        return load_model(path, torch.float64, torch.device("cpu"), reference_kernels())
    return load_model(path, torch.float32, torch.device("cpu"), cpu_kernels())


def cache_of(model: CausalLM) -> KVCache:
    config = model.config
    return KVCache(
        config.cache_shapes,
        4,
        8,
        model.dtype,
        model.device,
    )


def one_row(place: int) -> Any:
    table_P = torch.arange(4, dtype=torch.int32)
    return causal_metadata(place, 1, torch.tensor([place]), table_P)


def test_it_reads_translated_ids_and_predicts_shared_ones_only(model):
    vocabulary = random_map(90, 61, 40)
    translated = TranslatedModel(model, vocabulary)
    ids_T, batch = (
        torch.arange(90).flip(0)[:20],
        causal_metadata(0, 20, torch.arange(20), torch.arange(4, dtype=torch.int32)),
    )
    hidden_TD = translated(ids_T, cache_of(model).layers, batch)
    own_ids_T = vocabulary.target_to_draft_V[ids_T]
    want_TD = model(own_ids_T, cache_of(model).layers, batch)
    assert torch.equal(hidden_TD, want_TD)
    logits_TV, own_TU = translated.logits(hidden_TD), model.logits(hidden_TD)
    assert logits_TV.shape == (20, 90)
    assert logits_TV.dtype == own_TU.dtype
    shared = pairs(vocabulary)
    for v in range(90):
        want_T = own_TU[:, shared[v]] if v in shared else torch.full((20,), -math.inf)
        assert torch.equal(logits_TV[:, v], want_T.to(own_TU.dtype))


def test_it_keeps_the_models_shapes_and_counts_its_own_tables(model):
    translated = TranslatedModel(model, random_map(90, 61, 40))
    assert translated.shard.vocab_size == 90
    assert translated.shard.num_layers == model.config.num_layers
    assert (translated.dtype, translated.device) == (model.dtype, model.device)
    assert translated.weight_bytes == model.weight_bytes
    assert translated.memory_bytes == model.memory_bytes + 90 * (8 + 4)


def test_vocabularies_that_share_nothing_are_refused():
    nothing = VocabularyMap(torch.zeros(3, dtype=torch.int64), torch.full((2,), -1), 3, 2)
    with pytest.raises(AssertionError, match="no token to draft"):
        TranslatedModel(Scripted(torch.zeros(1, 2)), nothing)


class Scripted:
    """The logits of hidden state s are row s of a table."""

    dtype, device = torch.float32, torch.device("cpu")
    weight_bytes = memory_bytes = 0

    def __init__(self, table_SU: torch.Tensor) -> None:
        self.table_SU = table_SU
        self.config = self.shard = _tiny_config(table_SU.shape[1])

    def __call__(self, *_: Any) -> torch.Tensor:
        raise NotImplementedError

    def logits(self, states_R: torch.Tensor) -> torch.Tensor:
        return self.table_SU[states_R]


def _tiny_config(vocab_size: int) -> Any:
    raw = llama(vocab_size=vocab_size).config.to_dict()
    return ModelConfig.from_mapping(raw | {"architectures": ["LlamaForCausalLM"]})


@st.composite
def parameters(draw: Any, size: int) -> SamplingParams:
    some_ids = st.lists(st.integers(0, size - 1), min_size=1, max_size=3, unique=True)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.01, 0.5, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 1, 3, size - 1])),
        top_p=draw(st.sampled_from([1.0, 0.4, 0.90625])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.5])),
        logit_bias=draw(st.sampled_from([None, {0: 2.5, size - 1: -2.5}])),
        allowed_token_ids=draw(st.none() | some_ids),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(deadline=None, max_examples=40)
@given(data=st.data(), size=st.integers(2, 40), seed=st.integers(0, 10**6))
def test_q_is_the_processed_distribution_over_the_shared_tokens(dtype, data, size, seed):
    """Compiled and not: as the definition has it for a drafter with no other tokens."""
    rng = np.random.default_rng(seed)
    num_shared = data.draw(st.integers(1, size))
    vocabulary = random_map(size, size + 3, num_shared, seed)
    table_SU = torch.from_numpy(2 * rng.normal(size=(3, size + 3))).to(dtype)
    params = data.draw(st.lists(parameters(size), min_size=3, max_size=3))
    translated = TranslatedModel(Scripted(table_SU), vocabulary)
    ids, probs_BV = drawn(translated.logits(torch.arange(3)), params)
    for b, wanted in enumerate(params):
        logits = [-math.inf] * size
        for v, u in pairs(vocabulary).items():
            logits[v] = float(table_SU[b, u])
        want = probabilities(processed_logits(logits, wanted, [], []))
        np.testing.assert_allclose(probs_BV[b].numpy(), want, atol=2e-6)
        assert abs(float(probs_BV[b].double().sum()) - 1) < 1e-5
        assert probs_BV[b, ids[b]] > 0
        assert ids[b] in pairs(vocabulary)


def drawn(logits_BV: torch.Tensor, params: list[SamplingParams]) -> tuple[list[int], torch.Tensor]:
    """Drafts and what they were drawn from, as the proposers do it."""
    num, size = logits_BV.shape
    sampling = batch_of(params, size)
    zeros_B = torch.zeros(num, dtype=torch.int64)
    kernels = kernels_for(logits_BV.dtype)
    processed_BV = process_logits(
        kernels, logits_BV, torch.arange(num), Paths(None, zeros_B, zeros_B, None), sampling
    )
    keys = NoiseKeys.of(sampling.seeds_B, zeros_B, Purpose.DRAFT, zeros_B)
    ids_B, probs_BV = draw_tokens(kernels, processed_BV, keys, sampling.is_greedy_B)
    return ids_B.tolist(), probs_BV


def batch_of(params: list[SamplingParams], size: int) -> SamplingBatch:
    return batch_of_params(params, seeds=list(range(len(params))), vocab_size=size, device="cpu")


# The rule: one draft of many requests that differ in their seeds, and what comes out first.

TARGET_V = torch.tensor([0.9, 0.1, -0.4, 0.6, -1.0, 0.3])
DRAFTER_U = torch.tensor([0.2, 1.1, 0.7, -0.5, 0.9])
TO_DRAFT_V, TO_TARGET_U = torch.tensor([1, 3, 0, 4, 3, 2]), torch.tensor([2, 0, -1, 1, 3])
NUM = 12_000


def first_tokens(method: Any, tell: str) -> torch.Tensor:
    """The first token of every request; `tell` is what the drafter does."""
    params = [SamplingParams(temperature=1.0)] * NUM
    vocabulary = VocabularyMap(TO_DRAFT_V, TO_TARGET_U, 6, 5)
    logits_V = TranslatedModel(Scripted(DRAFTER_U[None]), vocabulary).logits(torch.tensor([0]))[0]
    if tell == "some outside":  # ids that are not shared become the token that they stand for
        logits_V = DRAFTER_U[TO_DRAFT_V]
    ids, probs_BV = drawn(logits_V.expand(NUM, -1), params)
    if tell == "not renormalised":
        probs_BV = torch.where(probs_BV > 0, DRAFTER_U.softmax(0)[TO_DRAFT_V], 0.0)
    if tell == "some outside":
        is_shared_V = vocabulary.is_shared_V
        probs_BV = probs_BV * is_shared_V / (probs_BV * is_shared_V).sum(1, keepdim=True)
        probs_BV = probs_BV.clamp(min=1e-9)
    drafts = DraftBatch.from_drafts([Draft.chain([token]) for token in ids], "cpu")
    drafts = with_probs(drafts, probs_BV[:, None])
    num_tokens_B = torch.zeros(NUM, dtype=torch.int64)
    verdict = Verifier(kernels_for(torch.float32), method).verify(
        TARGET_V.expand(2 * NUM, -1),
        drafts,
        batch_of(params, 6),
        Paths(None, num_tokens_B, num_tokens_B, None),
    )
    return verdict.token_ids_BN1[:, 0]


def with_probs(drafts: DraftBatch, probs_BNV: torch.Tensor) -> DraftBatch:
    return replace(
        drafts,
        probs_BNV=probs_BNV.contiguous(),
        is_sampled_BN=torch.ones_like(drafts.token_ids_BN, dtype=torch.bool),
        all_sampled=True,
    )


def p_value(tokens_B: torch.Tensor) -> float:
    found = np.bincount(tokens_B.numpy(), minlength=6)
    return float(chisquare(found, TARGET_V.double().softmax(0).numpy() * NUM).pvalue)


@pytest.mark.parametrize("method", ["block", "token"])
def test_verified_drafts_have_the_targets_distribution(method):
    assert p_value(first_tokens(method, "the truth")) > ALPHA


@pytest.mark.parametrize("method", ["block", "token"])
@pytest.mark.parametrize("lie", ["not renormalised", "some outside"])
def test_a_wrong_q_is_caught(method, lie):
    assert p_value(first_tokens(method, lie)) < ALPHA
