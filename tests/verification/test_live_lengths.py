"""Lengths that a live rule decides while the drafter draws: by enumeration, only arithmetic.

Tables of distributions draft and verify. The lengths are those of the drafters' own rule, and
decisions about drafts come from the production rules of verification.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from outdraft.core.decision import LiveStop
from outdraft.core.draft import Draft
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.torch.verification import reject_tokens, traverse
from tests.reference.verification import all_sequences
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
