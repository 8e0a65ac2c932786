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
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.torch.verification import (
    match,
    reject_tokens,
    residual,
    traverse,
    verdict_of_path,
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
    """(drafts of all sequences as one batch, target logits, weight of each sequence).

    Where `is_fixed(prefix)` the draft is the proposer's best token, and no probabilities are given.
    """
    sequences = all_sequences(V, length)
    prefixes = [[s[:i] for i in range(length)] for s in sequences]
    p_RV = torch.tensor(np.array([target(s[:i]) for s in sequences for i in range(length + 1)]))
    q_BNV = torch.tensor(np.array([[proposer(prefix) for prefix in one] for one in prefixes]))
    is_fixed_BN = torch.tensor([[is_fixed(prefix) for prefix in one] for one in prefixes])

    def share(prefix, token):
        q = proposer(prefix)
        return float(token == q.argmax()) if is_fixed(prefix) else q[token]

    drafts = replace(
        DraftBatch.from_drafts([Draft.chain(s) for s in sequences], "cpu"),
        probs_BNV=q_BNV.masked_fill(is_fixed_BN[:, :, None], torch.nan),
        is_sampled_BN=~is_fixed_BN,
    )
    weights = [np.prod([share(s[:i], x) for i, x in enumerate(s)]) for s in sequences]
    return drafts, p_RV.log(), weights


def emitted_by(target, proposer, rule, length=LENGTH, drawn_from=None):
    """{sequence: probability} of what one step emits; drafts come from `drawn_from`."""
    drafts, logits_RV, _ = every_chain(target, proposer, length)
    _, _, weights = every_chain(target, drawn_from or proposer, length)
    return chains_emit(rule, drafts, logits_RV, weights)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rule", [reject_tokens, traverse])
def test_sampled_chains_are_exact_for_any_pair_of_distributions(rule, seed):
    target, proposer = random_model(seed)
    assert bias(emitted_by(target, proposer, rule), target) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [reject_tokens, traverse])
def test_sampled_chains_are_exact_in_every_special_case(rule, kind):
    target, proposer = random_model(3, (kind,))
    assert bias(emitted_by(target, proposer, rule), target) < 1e-12


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
@pytest.mark.parametrize("rule", [reject_tokens, traverse])
def test_deterministic_drafts_inside_a_sampled_chain_are_exact(rule, is_fixed):
    for seed in range(4):
        target, proposer = random_model(seed)
        emitted = chains_emit(rule, *every_chain(target, proposer, LENGTH, is_fixed))
        assert sum(emitted.values()) == pytest.approx(1, abs=1e-12)
        assert bias(emitted, target) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("is_fixed", MIXTURES.values(), ids=MIXTURES)
def test_block_verification_of_a_mixed_chain_never_emits_fewer_tokens(is_fixed):
    for seed in range(4):
        target, proposer = random_model(seed, ("plain", "zeros"))
        chains = every_chain(target, proposer, LENGTH, is_fixed)
        token, block = (mean_tokens(chains_emit(a, *chains)) for a in (reject_tokens, traverse))
        assert token <= block + 1e-12


@pytest.mark.parametrize("rule", [reject_tokens, traverse])
def test_probabilities_of_a_deterministic_draft_taken_for_its_own_would_be_seen(rule):
    target, proposer = random_model(5, ("plain",))
    _, logits_RV, weights = every_chain(target, proposer, LENGTH, lambda prefix: not prefix)
    sampled, _, _ = every_chain(target, proposer, LENGTH)
    assert bias(chains_emit(rule, sampled, logits_RV, weights), target) > 0.02


@pytest.mark.parametrize("rule", [reject_tokens, traverse])
def test_chains_that_stop_after_an_unlikely_token_are_exact(rule):
    """Length decided by the tokens drafted so far, the last one included."""
    target, proposer = random_model(6, ("plain",))

    def length_of(s):
        return next((i + 1 for i, x in enumerate(s) if proposer(s[:i])[x] < 0.45), len(s))

    drafts, logits_RV, weights = every_chain(target, proposer, LENGTH)
    lengths_B = torch.tensor([length_of(s) for s in all_sequences(V, LENGTH)])
    is_row_BN1 = torch.arange(LENGTH + 1) <= lengths_B[:, None]
    shorter = replace(drafts, num_drafts_B=lengths_B)
    assert (
        bias(chains_emit(rule, shorter, logits_RV[is_row_BN1.flatten()], weights), target) < 1e-12
    )


@pytest.mark.parametrize("seed", range(6))
def test_block_verification_never_emits_fewer_tokens_and_stays_below_the_bound(seed):
    target, proposer = random_model(seed, ("plain", "zeros"))
    token = mean_tokens(emitted_by(target, proposer, reject_tokens))
    block = mean_tokens(emitted_by(target, proposer, traverse))
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
    for rule, want in ((reject_tokens, 10 / 9), (traverse, 11 / 9)):
        emitted = emitted_by(lambda _: p, lambda _: q, rule, length=2)
        assert mean_tokens(emitted) - 1 == pytest.approx(want, abs=1e-12)


def test_block_and_token_verification_agree_on_deterministic_chains():
    target, proposer = random_model(7, ("one_hot_q",))
    token, block = (emitted_by(target, proposer, a) for a in (reject_tokens, traverse))
    assert total_variation(token, block) < 1e-12


def trees():
    chain = Draft.chain((0, 1, 2))
    bushy = Draft((0, 1, 2, 0, 1), (0, 0, 1, 1, 2))
    repeated = Draft((1, 1, 0, 2, 0), (0, 0, 1, 2, 3))
    lonely = Draft((2,), (0,))
    return [Draft(), lonely, chain, bushy, repeated]


@pytest.mark.parametrize("tree", trees(), ids=lambda tree: f"{len(tree)} drafts")
def test_matching_deterministic_drafts_is_exact_for_any_tree(tree):
    target, _ = random_model(9, ("plain", "zeros", "one_hot_p"))
    paths = [()]
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    choices = all_sequences(V, len(tree) + 1)
    drafts = DraftBatch.from_drafts([tree] * len(choices), "cpu")
    verdict = match(torch.tensor(choices).flatten(), drafts)
    emitted = defaultdict(float)
    for b, row_choices in enumerate(choices):
        weight = np.prod([target(path)[v] for path, v in zip(paths, row_choices, strict=True)])
        ids = verdict.token_ids_BN1[b, : verdict.num_emitted_B[b]]
        emitted[tuple(ids.tolist())] += weight
    assert bias(emitted, target) < 1e-12


# What must fail: each of these rules has shipped somewhere.


def verdict_with(logits_RV, drafts, num_accepted_B, weight_B, draw):
    """The first drafts of each chain, and a token of what they leave of weight times the target."""
    every_B, at_B = torch.arange(drafts.num_requests), num_accepted_B.clamp(max=drafts.width - 1)
    p_BV = logits_RV.softmax(1).view(drafts.num_requests, -1, V)[every_B, num_accepted_B]
    left_BV = residual(p_BV, drafts.probs_BNV[every_B, at_B], weight_B)
    takes_p_B1 = ((num_accepted_B == drafts.width) | (left_BV.amax(1) <= 0))[:, None]
    weights_BV = torch.where(takes_p_B1, p_BV, left_BV)
    is_on_path_BN = torch.arange(drafts.width) < num_accepted_B[:, None]
    return verdict_of_path(drafts, is_on_path_BN, draw(weights_BV.log(), num_accepted_B, None))


def stop_at_first_failure(logits_RV, drafts, coins_BN, draw):
    """Block verification that ends its scan at the first failed coin."""
    passed = []
    for at in range(drafts.width):
        alone_BN = torch.ones_like(coins_BN)
        alone_BN[:, at] = coins_BN[:, at]
        passed.append(traverse(logits_RV, drafts, alone_BN, draw).num_emitted_B > at + 1)
    num_accepted_B = torch.stack(passed, 1).long().cumprod(1).sum(1)
    # The joint ratio of that prefix: what the rule itself says when only its coin succeeds.
    ids_BN1 = drafts.token_ids_BN[:, :, None]
    p_BN1V = logits_RV.softmax(1).view(drafts.num_requests, -1, V)
    p = p_BN1V[:, :-1].gather(2, ids_BN1)[:, :, 0]
    q = drafts.probs_BNV.gather(2, ids_BN1)[:, :, 0]
    weight_BN1 = [torch.ones(len(p), dtype=p.dtype)]
    for at in range(drafts.width):
        weight_BN1.append((weight_BN1[-1] * p[:, at] / q[:, at].clamp(min=1e-300)).clamp(max=1))
    weight_B = torch.stack(weight_BN1, 1).gather(1, num_accepted_B[:, None])[:, 0]
    return verdict_with(logits_RV, drafts, num_accepted_B, weight_B, draw)


def keep_target(rule):
    """The residual is not subtracted."""

    def wrong(logits_RV, drafts, coins_BN, draw):
        rows_BN1V = logits_RV.view(drafts.num_requests, -1, V)
        every_B = torch.arange(drafts.num_requests)
        return rule(
            logits_RV,
            drafts,
            coins_BN,
            lambda _, at_B, is_refused_B: draw(rows_BN1V[every_B, at_B], at_B, is_refused_B),
        )

    return wrong


def weight_one(logits_RV, drafts, coins_BN, draw):
    """The residual of block verification with token-level weight."""
    num_accepted_B = traverse(logits_RV, drafts, coins_BN, draw).num_emitted_B - 1
    ones_B = torch.ones(drafts.num_requests, dtype=torch.float64)
    return verdict_with(logits_RV, drafts, num_accepted_B, ones_B, draw)


def bonus_from_the_row_before(logits_RV, drafts, coins_BN, draw):
    """After full acceptance the row of the last draft's parent is read."""
    before_BV = logits_RV.view(drafts.num_requests, -1, V)[:, -2]
    return reject_tokens(
        logits_RV,
        drafts,
        coins_BN,
        lambda log_BV, at_B, is_refused_B: draw(
            torch.where(is_refused_B[:, None], log_BV, before_BV), at_B, is_refused_B
        ),
    )


@pytest.mark.parametrize(
    ("rule", "least"),
    [
        (stop_at_first_failure, 0.05),
        (keep_target(reject_tokens), 0.05),
        (keep_target(traverse), 0.05),
        (weight_one, 0.005),
        (bonus_from_the_row_before, 0.05),
    ],
)
def test_wrong_rules_are_seen_by_the_enumeration(rule, least):
    target, proposer = random_model(11, ("plain",))
    assert bias(emitted_by(target, proposer, rule), target) > least


@pytest.mark.parametrize("rule", [reject_tokens, traverse])
def test_probabilities_other_than_those_drawn_from_are_seen_by_the_enumeration(rule):
    target, proposer = random_model(12, ("plain",))

    def sharper(prefix):
        return proposer(prefix) ** 2 / (proposer(prefix) ** 2).sum()

    assert bias(emitted_by(target, proposer, rule, drawn_from=sharper), target) > 0.02
