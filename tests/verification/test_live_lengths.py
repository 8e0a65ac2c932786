"""Lengths that a live rule decides while the drafter draws: by enumeration, only arithmetic.

Tables of distributions draft and verify. The lengths are those of the drafters' own rule, and
decisions about drafts come from the production rules of verification.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from outdraft.core.draft import Draft
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.device.live_stop import LiveStops
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.draft_ops import StopRules
from outdraft.kernels.reference.verification import reject_tokens, traverse
from outdraft.sampling.batch import SamplingBatch
from outdraft.sampling.processors import Paths
from outdraft.verification.verifier import Verifier
from tests.kernels.tables import kernels_for
from tests.reference.verification import all_sequences, completed, joint
from tests.verification.enumeration import V, bias, chains_emit, each_chain_emits, random_model

DEPTH = LENGTH = 3  # of drafts, and of what the laws are compared on
RULES = pytest.mark.parametrize("rule", [reject_tokens, traverse])
SEEDS = pytest.mark.parametrize("seed", range(6))


def rules_for(num_requests, depth, price, row_cap=1 << 30, has_rule=True):
    weights, biases = [1.0, 1.5, 0.7], [1.5, 0.0, -0.5]
    return StopRules(
        torch.tensor(weights[:depth], dtype=torch.float64).expand(num_requests, -1),
        torch.tensor(biases[:depth], dtype=torch.float64).expand(num_requests, -1),
        torch.full((num_requests,), price, dtype=torch.float64),
        torch.full((num_requests,), has_rule),
        row_cap,
        num_rows_before=0,
    )


def by_margin(proposers, chains, rules):
    """int64 [B]: how long the drafters would have made each of these chains."""
    depth = len(chains[0])
    stops = LiveStops(torch.full((len(chains),), depth), rules)
    for level in range(depth):
        probs = [propose(chain[:level]) for propose, chain in zip(proposers, chains, strict=True)]
        stops.look(torch.tensor(np.array(probs)).log())
    return stops.num_drafts_B


def by_drawn_token(proposer, chains, price):
    """The same with the wrong signal: the probability of the token that was drawn."""
    survivals = [
        np.cumprod([proposer(chain[:level])[token] for level, token in enumerate(chain)])
        for chain in chains
    ]
    return torch.tensor([int((survival >= price).sum()) for survival in survivals])


def emitted(rule, target, proposer, chains, lengths_B):
    """{sequence: probability} of what one step emits."""
    batch = cut_chains(target, proposer, chains, lengths_B)
    return chains_emit(rule, *batch, weights_of(proposer, chains))


def cut_chains(target, proposer, chains, lengths_B):
    """(drafts, target logits) of chains that end after so many tokens."""
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
    return drafts, p_RV[is_row_R].log()


def weights_of(proposer, chains):
    return [np.prod([proposer(c[:i])[x] for i, x in enumerate(c)]) for c in chains]


def laws_of_cut_chains(rule, target, proposer, chains):
    """{(chain, length): law of the first tokens}."""
    cases = [(chain, length) for chain in chains for length in range(len(chain) + 1)]
    lengths_B = torch.tensor([length for _, length in cases])
    batch = cut_chains(target, proposer, [chain for chain, _ in cases], lengths_B)
    laws = each_chain_emits(rule, *batch)
    return {
        case: as_vector(completed(law, target, LENGTH))
        for case, law in zip(cases, laws, strict=True)
    }


def as_vector(law):
    return np.array([law.get(sequence, 0.0) for sequence in all_sequences(V, LENGTH)])


@SEEDS
@RULES
def test_chains_that_a_live_rule_ends_have_the_targets_own_law(rule, seed):
    target, proposer = random_model(seed)
    chains = all_sequences(V, DEPTH)
    seen = set()
    for price in (0.4, 0.6, 0.8):
        rules = rules_for(len(chains), DEPTH, price)
        lengths_B = by_margin([proposer] * len(chains), chains, rules)
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


@RULES
@pytest.mark.parametrize("drops_later", [False, True])
def test_two_requests_under_one_cap_on_rows_have_the_joint_law_of_two_alone(rule, drops_later):
    """The cap ties their lengths together. Dropped later, by what was drawn, rows would be a bias:
    here the request whose last token is the less likely one loses it."""
    depth, cap = 2, 3
    models = [random_model(seed, ("plain",)) for seed in (3, 9)]
    chains = all_sequences(V, depth)
    rest = [laws_of_cut_chains(rule, *model, chains) for model in models]
    weights = [dict(zip(chains, weights_of(q, chains), strict=True)) for _, q in models]
    proposers = [proposer for _, proposer in models]
    law = np.zeros((V**LENGTH, V**LENGTH))
    seen = set()
    for pair in itertools.product(chains, repeat=2):
        rules = rules_for(2, depth, 0.6, 1 << 30 if drops_later else cap)
        lengths = by_margin(proposers, pair, rules).tolist()
        if drops_later and sum(lengths) > cap:
            last = [
                proposer(chain[:-1])[chain[-1]]
                for proposer, chain in zip(proposers, pair, strict=True)
            ]
            lengths[int(np.argmin(last))] -= 1
        assert sum(lengths) <= cap
        seen.add(tuple(lengths))
        share = weights[0][pair[0]] * weights[1][pair[1]]
        laws = [of[chain, count] for of, chain, count in zip(rest, pair, lengths, strict=True)]
        law += share * np.outer(*laws)
    assert {(2, 1)} < seen, "the cap ends a request, and not always"
    alone = [as_vector(joint(target, LENGTH)) for target, _ in models]
    distance = 0.5 * np.abs(law - np.outer(*alone)).sum()
    assert (distance > 0.003) if drops_later else (distance < 1e-12)


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
    sampling = SamplingBatch.from_requests(
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
