"""Lengths that a live rule decides while the drafter draws: by enumeration, only arithmetic.

Tables of distributions draft and verify. The lengths are those of the drafters' own rule, and
decisions about drafts come from the production rules of verification.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from outdraft.core.draft import Draft
from outdraft.core.plan import LiveStop
from outdraft.core.sampling import SamplingParams
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.reference.verification import reject_tokens, traverse
from outdraft.sampling.processors import Paths
from outdraft.verification.verifier import Verifier
from tests.kernels.tables import kernels_for
from tests.reference.verification import all_sequences
from tests.sampling_batches import batch_of_params
from tests.verification.enumeration import V, bias, chains_emit, random_model
from tests.verification.live_lengths import live_lengths

DEPTH = 3
RULES = pytest.mark.parametrize("rule", [reject_tokens, traverse])
SEEDS = pytest.mark.parametrize("seed", range(6))


def by_margin(proposer, chains, price):
    """int64 [B]: how long the drafters would have made each of these chains."""
    stop = LiveStop((1.0, 1.5, 0.7), (1.5, 0.0, -0.5), price)
    lengths = live_lengths(
        lambda which, prefix: proposer(prefix),
        chains,
        [stop] * len(chains),
        [DEPTH] * len(chains),
    )
    return torch.tensor(lengths)


def by_drawn_token(proposer, chains, price):
    """The same with the wrong signal: the probability of the token that was drawn."""
    survivals = [
        np.cumprod([proposer(chain[:level])[token] for level, token in enumerate(chain)])
        for chain in chains
    ]
    return torch.tensor([int((survival >= price).sum()) for survival in survivals])


def emitted(rule, target, proposer, chains, lengths_B):
    """{sequence: probability} of what one step emits, if chains end after so many tokens."""
    depth = len(chains[0])
    p_RV = torch.tensor(np.array([target(c[:i]) for c in chains for i in range(depth + 1)]))
    q_BNV = torch.tensor(np.array([[proposer(c[:i]) for i in range(depth)] for c in chains]))
    drafts = replace(
        DraftBatch.from_drafts([Draft.chain(chain) for chain in chains], "cpu"),
        probs_BNV=q_BNV,
        is_sampled_BN=torch.ones(len(chains), depth, dtype=torch.bool),
        num_drafts_B=lengths_B,
        any_sampled=True,
    )
    is_row_R = (torch.arange(depth + 1) <= lengths_B[:, None]).flatten()
    return chains_emit(rule, drafts, p_RV[is_row_R].log(), weights_of(proposer, chains))


def weights_of(proposer, chains):
    return [np.prod([proposer(c[:i])[x] for i, x in enumerate(c)]) for c in chains]


@SEEDS
@RULES
def test_chains_that_a_live_rule_ends_have_the_targets_own_law(rule, seed):
    target, proposer = random_model(seed)
    chains = all_sequences(V, DEPTH)
    seen = set()
    for price in (0.4, 0.6, 0.8):
        lengths_B = by_margin(proposer, chains, price)
        seen |= {tuple(lengths_B.tolist())}
        law = emitted(rule, target, proposer, chains, lengths_B)
        assert sum(law.values()) == pytest.approx(1, abs=1e-12)
        assert bias(law, target) < 1e-12
    assert any(len(set(lengths)) > 1 for lengths in seen), "what was drawn before has a say"


@RULES
def test_the_probability_of_the_drawn_token_would_be_seen(rule):
    target, proposer = random_model(6, ("plain",))
    chains = all_sequences(V, DEPTH)
    lengths_B = by_drawn_token(proposer, chains, 0.3)
    law = emitted(rule, target, proposer, chains, lengths_B)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert bias(law, target) > 0.05


@pytest.mark.parametrize("method", ["block", "token", "drafter_invariant"])
@pytest.mark.parametrize("seed", range(4))
def test_rows_that_were_laid_out_for_more_drafts_change_no_verdict(method, seed):
    """Where the host cannot know how many drafts there are, rows of the others hold anything."""
    rng = np.random.default_rng(seed)
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, presence_penalty=0.5),
        SamplingParams(temperature=1.0, seed=4),
    ]
    width, size, num_requests = 4, 6, 8
    laid_out = rng.integers(0, width + 1, num_requests)
    made = rng.integers(0, laid_out + 1)
    sampling = batch_of_params(
        [params[at % 4] for at in range(num_requests)],
        seeds=range(num_requests),
        vocab_size=size,
        device="cpu",
        shares_noise=method == "drafter_invariant",
    )
    ids_BN = torch.tensor(rng.integers(0, size, (num_requests, width)))
    places_N = torch.arange(width)
    q_BNV = torch.tensor(rng.dirichlet(np.ones(size), (num_requests, width))).float()
    drafts = replace(
        DraftBatch.from_drafts([Draft.chain(range(width))] * num_requests, "cpu"),
        token_ids_BN=ids_BN.masked_fill(places_N >= torch.tensor(made)[:, None], -1),
        num_drafts_B=torch.tensor(made),
        probs_BNV=q_BNV,
        is_sampled_BN=sampling.draws_B[:, None].expand(-1, width),
        any_sampled=True,
    )
    history_BL = torch.tensor(rng.integers(0, size, (num_requests, 5)))
    lens_B = torch.full((num_requests,), 5)
    paths = Paths(history_BL, lens_B - 2, lens_B, None)
    verifier = Verifier(kernels_for(torch.float64), method)
    rows = [rng.normal(0, 2, (count + 1, size)) for count in laid_out]
    needed = [own[: count + 1] for own, count in zip(rows, made, strict=True)]

    want = verifier.verify(torch.tensor(np.concatenate(needed)), drafts, sampling, paths)
    whole = replace(drafts, num_laid_out_B=torch.tensor(laid_out))
    got = verifier.verify(torch.tensor(np.concatenate(rows)), whole, sampling, paths)

    assert (made < laid_out).any()
    assert torch.equal(got.token_ids_BN1, want.token_ids_BN1)
    assert torch.equal(got.num_emitted_B, want.num_emitted_B)
    assert torch.equal(got.rows_BN, want.rows_BN)
