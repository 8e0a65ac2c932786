"""The assembled verifier: real processing, real noise, many steps; seeded goodness of fit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from outdraft.core.draft import Draft
from outdraft.core.sampling import SamplingParams
from outdraft.kernels.data.drafts import DraftBatch, path_ids_BN1K
from outdraft.kernels.data.noise import NoiseKeys, Purpose
from outdraft.kernels.data.sampling import Paths
from outdraft.kernels.torch import noise
from outdraft.kernels.torch.verification import reject_tokens
from outdraft.sampling.processors import process_logits
from outdraft.verification.verifier import Verifier
from tests.drafting.lockstep import (
    ALL,
    ALPHA,
    PLAIN,
    TARGET,
    VOCAB,
    Decoding,
    exact_joint,
    p_value,
)
from tests.kernels.tables import draw_tokens, kernels_for
from tests.sampling_batches import batch_of_params


def chains_of(length):
    return lambda decoding: decoding.sampled_chains(length)


def fixed_tree(decoding):
    tree = Draft((0, 4, 3, 1, 4), (0, 0, 1, 1, 2))
    return DraftBatch.from_drafts([tree] * decoding.num_requests, "cpu")


def ragged_mixture(decoding):
    """Sampled chains of 0 to 3 drafts; every third request has deterministic drafts instead."""
    chains = decoding.sampled_chains(3)
    number_B = torch.arange(decoding.num_requests)
    num_drafts_B = number_B // 3 % 4
    is_sampled_B = number_B % 3 != 0
    fixed_BN = torch.tensor([4, 0, 4]).expand(decoding.num_requests, -1)
    token_ids_BN = torch.where(is_sampled_B[:, None], chains.token_ids_BN, fixed_BN)
    is_draft_BN = torch.arange(3) < num_drafts_B[:, None]
    garbage_BNV = torch.where(is_draft_BN[:, :, None], chains.probs_BNV, torch.nan)
    return replace(
        chains,
        token_ids_BN=torch.where(is_draft_BN, token_ids_BN, -1),
        num_drafts_B=num_drafts_B,
        is_sampled_BN=is_sampled_B[:, None].expand_as(token_ids_BN),
        probs_BNV=torch.where(is_sampled_B[:, None, None], garbage_BNV, torch.nan),
        all_sampled=False,
    )


@pytest.mark.slow
@pytest.mark.few(5)
@pytest.mark.parametrize("params", [PLAIN, ALL], ids=["plain", "all processors"])
@pytest.mark.parametrize(
    ("method", "draft"),
    [
        ("block", chains_of(3)),
        ("token", chains_of(3)),
        ("drafter_invariant", chains_of(2)),
        ("block", fixed_tree),
        ("block", ragged_mixture),
        ("token", ragged_mixture),
    ],
    ids=["block", "token", "invariant", "tree", "block, mixed", "token, mixed"],
)
def test_output_fits_the_target_with(method, draft, params):
    ids_BL = Decoding(params, 10_000, method).run(draft)
    assert p_value(ids_BL, exact_joint(params)) > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("method", "as_trees"), [("block", False), ("block", True), ("token", False)]
)
def test_a_drafter_whose_probabilities_are_nan_does_not_touch_the_output(
    method, as_trees, dtype, monkeypatch
):
    """Whatever its drafts are: here one token that is always the same."""
    table = "tests.drafting.lockstep.TARGET"
    monkeypatch.setattr(table, TARGET.to(dtype))  # in float64 the tensor rules are used

    def broken(decoding):
        chains = decoding.sampled_chains(2)
        return replace(
            chains,
            token_ids_BN=torch.zeros_like(chains.token_ids_BN),
            probs_BNV=torch.full_like(chains.probs_BNV, torch.nan),
            sampled_trees=as_trees,
        )

    ids_BL = Decoding(PLAIN, 5_000, method).run(broken)
    assert p_value(ids_BL, exact_joint(PLAIN)) > ALPHA


@pytest.mark.slow
def test_noise_of_rejected_drafts_used_again_would_be_seen():
    """Without anchors a step drafts with noise that block verification has already judged."""
    ids_BL = Decoding(PLAIN, 40_000, "block", anchored=False).run(chains_of(3))
    assert p_value(ids_BL, exact_joint(PLAIN)) < ALPHA


def test_recovery_noise_shared_with_the_draft_would_be_seen():
    num = 20_000
    p_V, q_V = torch.tensor([0.05, 0.05, 0.4, 0.5]), torch.tensor([0.5, 0.3, 0.18, 0.02])
    seeds_B, zero_B = torch.arange(num), torch.zeros(num, dtype=torch.int64)
    draft_BV = noise.gumbel(NoiseKeys.of(seeds_B, zero_B, Purpose.DRAFT, zero_B), 4)
    drafts = replace(
        DraftBatch.from_drafts([Draft((0,), (0,))] * num, "cpu"),
        token_ids_BN=(q_V.log() + draft_BV).argmax(1)[:, None],
        probs_BNV=q_V.expand(num, 1, 4),
        is_sampled_BN=torch.ones(num, 1, dtype=torch.bool),
    )
    accept = NoiseKeys.of(seeds_B, zero_B, Purpose.ACCEPT, zero_B)
    coins_BN = noise.uniform_scalar(accept)[:, None]
    fresh_BV = noise.gumbel(NoiseKeys.of(seeds_B, zero_B, Purpose.RECOVER), 4)
    p_values = []
    for noise_BV in (draft_BV, fresh_BV):
        verdict = reject_tokens(
            p_V.log().expand(2 * num, 4),
            drafts,
            coins_BN,
            lambda log_BV, *_, n=noise_BV: (log_BV + n).argmax(1),
        )
        counts = np.bincount(verdict.token_ids_BN1[:, 0].numpy(), minlength=4)
        p_values.append(stats.chisquare(counts, np.array([0.05, 0.05, 0.4, 0.5]) * num).pvalue)
    assert p_values[0] < ALPHA < p_values[1]


@pytest.mark.slow
def test_drafts_processed_unlike_their_probabilities_would_be_seen():
    def mismatched(decoding):
        chains = decoding.sampled_chains(2)
        sharper_BNV = chains.probs_BNV**1.5
        return replace(chains, probs_BNV=sharper_BNV / sharper_BNV.sum(2, keepdim=True))

    ids_BL = Decoding(PLAIN, 10_000).run(mismatched)
    assert p_value(ids_BL, exact_joint(PLAIN)) < ALPHA


def test_penalties_that_forget_the_path_would_be_seen(monkeypatch):
    def one_short(drafts):
        path_BN1K = path_ids_BN1K(drafts)
        return torch.cat([path_BN1K[:, :1], path_BN1K[:, :-1]], 1)  # every row sees its parent's

    monkeypatch.setattr("outdraft.verification.verifier.path_ids_BN1K", one_short)
    params = SamplingParams(presence_penalty=2.0)
    ids_BL = Decoding(params, 10_000).run(chains_of(3))
    assert p_value(ids_BL, exact_joint(params)) < ALPHA


@pytest.mark.parametrize("params", [PLAIN, ALL], ids=["plain", "all processors"])
def test_drafter_invariant_ids_are_those_of_plain_decoding(params):
    plain, invariant = (Decoding(params, 500, "drafter_invariant") for _ in range(2))
    want_BL = plain.run(lambda decoding: DraftBatch.empty(decoding.num_requests, "cpu"))
    assert torch.equal(invariant.run(chains_of(3)), want_BL)
    assert torch.equal(Decoding(params, 500, "block").run(fixed_tree), want_BL)
    assert invariant.num_accepted > 0.3 * invariant.num_drafts


def test_block_verification_accepts_more_than_token_level_and_both_accept():
    rates = {}
    for method in ("token", "block"):
        decoding = Decoding(PLAIN, 10_000, method)
        decoding.step(decoding.sampled_chains(3))
        rates[method] = decoding.num_accepted / decoding.num_drafts
    assert 0.2 < rates["token"] < rates["block"]


def test_a_request_gets_the_same_verdict_in_any_batch():
    decoding = Decoding(ALL, 60)
    drafts = ragged_mixture(decoding)
    whole = decoding.verifier.verify(
        decoding.target_rows(drafts), drafts, decoding.sampling, decoding.committed
    )
    for b in (0, 13, 59):
        alone = Decoding(ALL, 1)
        alone.sampling = replace(alone.sampling, seeds_B=decoding.sampling.seeds_B[b : b + 1])
        one = replace(
            drafts,
            token_ids_BN=drafts.token_ids_BN[b : b + 1],
            parents_BN=drafts.parents_BN[b : b + 1],
            num_drafts_B=drafts.num_drafts_B[b : b + 1],
            probs_BNV=drafts.probs_BNV[b : b + 1],
            is_sampled_BN=drafts.is_sampled_BN[b : b + 1],
        )
        got = alone.verifier.verify(alone.target_rows(one), one, alone.sampling, alone.committed)
        assert torch.equal(got.token_ids_BN1[0], whole.token_ids_BN1[b])
        assert got.num_emitted_B[0] == whole.num_emitted_B[b]


def test_greedy_requests_follow_the_argmax_beside_sampled_ones():
    decoding = Decoding(PLAIN, 64)
    greedy = [at % 2 == 0 for at in range(64)]
    decoding.sampling = batch_of_params(
        [SamplingParams(temperature=0.0) if is_greedy else PLAIN for is_greedy in greedy],
        seeds=range(64),
        vocab_size=VOCAB,
        device="cpu",
    )
    decoding.step(decoding.sampled_chains(3))
    for text, is_greedy in zip(decoding.text_BL.tolist(), greedy, strict=True):
        emitted = [token for token in text[1:] if token >= 0]
        if is_greedy:
            assert emitted[1:] == [int(TARGET[last].argmax()) for last in emitted[:-1]]


@pytest.mark.parametrize("method", ["block", "token", "lossy_typical"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_requests_with_a_seed_are_matched_beside_others_that_are_not(method, dtype, monkeypatch):
    """Every other request brings its seed: it gets the ids of plain decoding, from drafts that
    claim to be drawn; its neighbours get what they get among themselves."""
    table = "tests.drafting.lockstep.TARGET"
    monkeypatch.setattr(table, TARGET.to(dtype))  # in float64 the tensor rules are used
    mixed, plain, unseeded = (Decoding(PLAIN, 200, method) for _ in range(3))
    is_seeded_B = torch.arange(200) % 2 == 0
    mixed.sampling = batch_of_params(
        [replace(PLAIN, seed=7 + at if at % 2 == 0 else None) for at in range(200)],
        seeds=range(7, 207),
        vocab_size=VOCAB,
        device="cpu",
    )
    want_BL = plain.run(lambda decoding: DraftBatch.empty(decoding.num_requests, "cpu"))
    got_BL, others_BL = (decoding.run(chains_of(3)) for decoding in (mixed, unseeded))
    assert torch.equal(got_BL[is_seeded_B], want_BL[is_seeded_B])
    assert torch.equal(got_BL[~is_seeded_B], others_BL[~is_seeded_B])
    assert not torch.equal(others_BL[is_seeded_B], want_BL[is_seeded_B])


def test_a_plain_greedy_batch_is_matched_on_its_raw_logits_with_padding_rows():
    logits_RV = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(2)).bfloat16()
    best = logits_RV.argmax(1).tolist()
    drafts = DraftBatch.from_drafts(
        [Draft.chain((best[0], best[1])), Draft(), Draft((best[4], best[4]), (0, 0))], "cpu"
    )
    sampling = batch_of_params(
        [SamplingParams(temperature=0.0)] * 3, seeds=[0] * 3, vocab_size=VOCAB, device="cpu"
    )
    nothing_B = torch.zeros(3, dtype=torch.int64)
    verdict = Verifier(kernels_for(torch.bfloat16), "block").verify(
        logits_RV, drafts, sampling, Paths(None, nothing_B, nothing_B, None)
    )
    assert verdict.token_ids_BN1.tolist() == [
        best[:3],
        [best[3], -1, -1],
        [best[4], best[5], -1],
    ]
    assert verdict.rows_BN.tolist() == [[0, 1], [-1, -1], [0, -1]]


def test_plain_decoding_is_the_sampler_at_the_next_position():
    decoding = Decoding(PLAIN, 50)
    kernels, sampling = decoding.kernels, decoding.sampling
    processed_BV = process_logits(
        kernels, TARGET[decoding.root_B], torch.arange(50), decoding.committed, sampling
    )
    keys = NoiseKeys.of(sampling.seeds_B, decoding.num_tokens_B, Purpose.SAMPLE)
    want_B, _ = draw_tokens(kernels, processed_BV, keys, sampling.is_greedy_B)
    verdict = decoding.step(DraftBatch.empty(50, "cpu"))
    assert torch.equal(verdict.token_ids_BN1[:, 0], want_B)
    assert (verdict.num_emitted_B == 1).all()
