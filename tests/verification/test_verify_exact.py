"""Losslessness by enumeration: no sampling noise, only arithmetic.

Decisions come from the production rules (see `enumeration`), and the joint distribution of the
first tokens must be the target's own.
"""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch

from outdraft.core.draft import Draft
from outdraft.verification.draft_batch import DraftBatch
from outdraft.verification.verify import (
    Acceptance,
    accept_block,
    accept_tokens,
    last_weights,
    match_draft,
)
from tests.reference.verification import all_sequences, joint, total_variation
from tests.verification.enumeration import (
    KINDS,
    V,
    bias,
    chains_emit,
    mean_tokens,
    random_model,
)

LENGTH = 3


def every_chain(target, proposer, length, is_fixed=lambda _: False):
    """(drafts of all sequences as one batch, target probabilities, weight of each sequence).

    Where `is_fixed(prefix)` the draft is the proposer's best token, and no probabilities are given.
    """
    sequences = all_sequences(V, length)
    prefixes = [[s[:i] for i in range(length)] for s in sequences]
    p_BN1V = torch.tensor(np.array([[target(s[:i]) for i in range(length + 1)] for s in sequences]))
    q_BNV = torch.tensor(np.array([[proposer(prefix) for prefix in one] for one in prefixes]))
    is_fixed_BN = torch.tensor([[is_fixed(prefix) for prefix in one] for one in prefixes])

    def share(prefix, token):
        q = proposer(prefix)
        return float(token == q.argmax()) if is_fixed(prefix) else q[token]

    drafts = replace(
        DraftBatch.from_drafts([Draft.chain(s) for s in sequences], "cpu"),
        probs_BNV=q_BNV.masked_fill(is_fixed_BN[:, :, None], torch.nan),
        is_sampled_BN=~is_fixed_BN,
        any_sampled=True,
    )
    weights = [np.prod([share(s[:i], x) for i, x in enumerate(s)]) for s in sequences]
    return drafts, p_BN1V, weights


def emitted_by(target, proposer, accept, last=last_weights, length=LENGTH, drawn_from=None):
    """{sequence: probability} of what one step emits; drafts come from `drawn_from`."""
    drafts, p_BN1V, _ = every_chain(target, proposer, length)
    _, _, weights = every_chain(target, drawn_from or proposer, length)
    return chains_emit(drafts, p_BN1V, weights, accept, last)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("accept", [accept_tokens, accept_block])
def test_sampled_chains_are_exact_for_any_pair_of_distributions(accept, seed):
    target, proposer = random_model(seed)
    assert bias(emitted_by(target, proposer, accept), target) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accept", [accept_tokens, accept_block])
def test_sampled_chains_are_exact_in_every_special_case(accept, kind):
    target, proposer = random_model(3, (kind,))
    assert bias(emitted_by(target, proposer, accept), target) < 1e-12


MIXTURES = {
    "first": lambda prefix: len(prefix) == 0,
    "last": lambda prefix: len(prefix) == 2,
    "first two": lambda prefix: len(prefix) < 2,
    "middle": lambda prefix: len(prefix) == 1,
    "first and last": lambda prefix: len(prefix) != 1,
    "all": lambda _: True,
    "after a token": lambda prefix: prefix[-1:] == (0,),
}


@pytest.mark.parametrize("is_fixed", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize("accept", [accept_tokens, accept_block])
def test_deterministic_drafts_inside_a_sampled_chain_are_exact(accept, is_fixed):
    for seed in range(4):
        target, proposer = random_model(seed)
        emitted = chains_emit(*every_chain(target, proposer, LENGTH, is_fixed), accept)
        assert sum(emitted.values()) == pytest.approx(1, abs=1e-12)
        assert bias(emitted, target) < 1e-12


@pytest.mark.parametrize("is_fixed", MIXTURES.values(), ids=MIXTURES)
def test_block_verification_of_a_mixed_chain_never_emits_fewer_tokens(is_fixed):
    for seed in range(4):
        target, proposer = random_model(seed, ("plain", "zeros"))
        chains = every_chain(target, proposer, LENGTH, is_fixed)
        token, block = (mean_tokens(chains_emit(*chains, a)) for a in (accept_tokens, accept_block))
        assert token <= block + 1e-12


@pytest.mark.parametrize("accept", [accept_tokens, accept_block])
def test_probabilities_of_a_deterministic_draft_taken_for_its_own_would_be_seen(accept):
    target, proposer = random_model(5, ("plain",))
    _, p_BN1V, weights = every_chain(target, proposer, LENGTH, lambda prefix: not prefix)
    sampled, _, _ = every_chain(target, proposer, LENGTH)
    assert bias(chains_emit(sampled, p_BN1V, weights, accept), target) > 0.02


@pytest.mark.parametrize("accept", [accept_tokens, accept_block])
def test_chains_that_stop_after_an_unlikely_token_are_exact(accept):
    """Length decided by the tokens drafted so far, the last one included."""
    target, proposer = random_model(6, ("plain",))

    def length_of(s):
        return next((i + 1 for i, x in enumerate(s) if proposer(s[:i])[x] < 0.45), len(s))

    def shortened(p_BN1V, drafts, coins_BN):
        lengths_B = torch.tensor([length_of(s) for s in all_sequences(V, LENGTH)])
        return accept(p_BN1V, replace(drafts, num_drafts_B=lengths_B), coins_BN)

    def last(p_BN1V, drafts, acceptance):
        lengths_B = torch.tensor([length_of(s) for s in all_sequences(V, LENGTH)])
        return last_weights(p_BN1V, replace(drafts, num_drafts_B=lengths_B), acceptance)

    assert bias(emitted_by(target, proposer, shortened, last), target) < 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_block_verification_never_emits_fewer_tokens_and_stays_below_the_bound(seed):
    target, proposer = random_model(seed, ("plain", "zeros"))
    token = mean_tokens(emitted_by(target, proposer, accept_tokens))
    block = mean_tokens(emitted_by(target, proposer, accept_block))
    p, q = joint(target, LENGTH), joint(proposer, LENGTH)
    bound = 1.0
    for length in range(1, LENGTH + 1):
        p, q = joint(target, length), joint(proposer, length)
        bound += sum(min(p.get(s, 0.0), q.get(s, 0.0)) for s in q)
    assert token <= block + 1e-12
    assert block <= bound + 1e-12


def test_accepted_lengths_are_the_papers_in_its_own_example():
    """Sun et al. 2025, section 2: two tokens, two drafts; 10/9 by token and 11/9 by block."""
    p, q = np.array([1 / 3, 2 / 3, 0]), np.array([2 / 3, 1 / 3, 0])
    for accept, want in ((accept_tokens, 10 / 9), (accept_block, 11 / 9)):
        emitted = emitted_by(lambda _: p, lambda _: q, accept, length=2)
        assert mean_tokens(emitted) - 1 == pytest.approx(want, abs=1e-12)


def test_block_and_token_verification_agree_on_deterministic_chains():
    target, proposer = random_model(7, ("one_hot_q",))
    token, block = (emitted_by(target, proposer, a) for a in (accept_tokens, accept_block))
    assert total_variation(token, block) < 1e-12


def trees():
    chain = Draft.chain((0, 1, 2))
    bushy = Draft((0, 1, 2, 0, 1), (0, 0, 1, 1, 2))
    repeated = Draft((1, 1, 0, 2, 0), (0, 0, 1, 2, 3))
    lonely = Draft((2,), (0,))
    return [Draft(), lonely, chain, bushy, repeated]


@pytest.mark.parametrize(
    ("tree", "is_chain"),
    [(tree, fast) for tree in trees() for fast in {tree.is_chain, False}],
    ids=lambda value: str(value) if isinstance(value, bool) else f"{len(value)} drafts",
)
def test_matching_deterministic_drafts_is_exact_for_any_tree(tree, is_chain):
    target, _ = random_model(9, ("plain", "zeros", "one_hot_p"))
    paths = [()]
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    choices = all_sequences(V, len(tree) + 1)
    drafts = DraftBatch.from_drafts([tree] * len(choices), "cpu")
    verdict = match_draft(torch.tensor(choices), replace(drafts, is_chain=is_chain))
    emitted = defaultdict(float)
    for b, row_choices in enumerate(choices):
        weight = np.prod([target(path)[v] for path, v in zip(paths, row_choices, strict=True)])
        ids = verdict.token_ids_BN1[b, : verdict.num_emitted_B[b]]
        emitted[tuple(ids.tolist())] += weight
    assert bias(emitted, target) < 1e-12


# What must fail: each of these rules has shipped somewhere.


def stop_at_first_failure(p_BN1V, drafts, coins_BN):
    """Block verification that ends its scan at the first failed coin."""
    passed = []
    for at in range(drafts.width):
        alone_BN = torch.ones_like(coins_BN)
        alone_BN[:, at] = coins_BN[:, at]
        passed.append(accept_block(p_BN1V, drafts, alone_BN).num_accepted_B > at)
    num_accepted_B = torch.stack(passed, 1).long().cumprod(1).sum(1)
    # The joint ratio of that prefix: what the rule itself says when only its coin succeeds.
    p = p_BN1V[:, :-1].gather(2, drafts.token_ids_BN[:, :, None])[:, :, 0]
    q = drafts.probs_BNV.gather(2, drafts.token_ids_BN[:, :, None])[:, :, 0]
    weight_BN1 = [torch.ones(len(p), dtype=p.dtype)]
    for at in range(drafts.width):
        weight_BN1.append((weight_BN1[-1] * p[:, at] / q[:, at].clamp(min=1e-300)).clamp(max=1))
    weight_B = torch.stack(weight_BN1, 1).gather(1, num_accepted_B[:, None])[:, 0]
    return Acceptance(num_accepted_B, weight_B)


def keep_target(p_BN1V, drafts, acceptance):
    """The residual is not subtracted."""
    return p_BN1V[torch.arange(drafts.num_requests), acceptance.num_accepted_B]


def weight_one(p_BN1V, drafts, acceptance):
    """The residual of block verification with token-level weight."""
    ones_B = torch.ones_like(acceptance.weight_B)
    return last_weights(p_BN1V, drafts, replace(acceptance, weight_B=ones_B))


def bonus_from_the_row_before(p_BN1V, drafts, acceptance):
    """After full acceptance the row of the last draft's parent is read."""
    is_bonus_B1 = (acceptance.num_accepted_B == drafts.num_drafts_B)[:, None]
    right_BV = last_weights(p_BN1V, drafts, acceptance)
    return torch.where(is_bonus_B1, p_BN1V[:, -2], right_BV)


@pytest.mark.parametrize(
    ("accept", "last", "least"),
    [
        (stop_at_first_failure, last_weights, 0.05),
        (accept_tokens, keep_target, 0.05),
        (accept_block, keep_target, 0.05),
        (accept_block, weight_one, 0.005),
        (accept_tokens, bonus_from_the_row_before, 0.05),
    ],
)
def test_wrong_rules_are_seen_by_the_enumeration(accept, last, least):
    target, proposer = random_model(11, ("plain",))
    assert bias(emitted_by(target, proposer, accept, last), target) > least


@pytest.mark.parametrize("accept", [accept_tokens, accept_block])
def test_probabilities_other_than_those_drawn_from_are_seen_by_the_enumeration(accept):
    target, proposer = random_model(12, ("plain",))

    def sharper(prefix):
        return proposer(prefix) ** 2 / (proposer(prefix) ** 2).sum()

    assert bias(emitted_by(target, proposer, accept, drawn_from=sharper), target) > 0.02
