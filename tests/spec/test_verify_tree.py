"""The tree rule by enumeration: no sampling noise, only arithmetic.

All trees that a way of drafting can draw are judged by the production rule under every script of
coins and draws (see `enumeration`). What it emits, decoded on with the target, must have the
target's own joint distribution.
"""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch

from outdraft.spec.draft_batch import row_start_B
from outdraft.spec.verify import Verdict, accept_block
from outdraft.spec.verify_tree import verify_tree
from tests.reference.drafted_trees import as_batch, every_tree, pruned, target_rows
from tests.reference.verification import total_variation, tree_outcomes, walk_tree
from tests.spec.enumeration import (
    KINDS,
    Script,
    V,
    bias,
    chains_emit,
    mean_tokens,
    random_model,
    repeated,
    trees_emit,
)

# Ways to draft: (prefix, tree so far, proposer's distribution) -> (tokens, draws one more).


def best(q, count):
    return tuple(np.argsort(-q, kind="stable")[:count].tolist())


def of_width(n, depth):
    return lambda prefix, _, q: (best(q, n - 1), True) if len(prefix) < depth else ((), False)


def mixed_widths(prefix, _, q):
    """1, 2 or 3 children by the prefix, some of them without a sampled one."""
    if len(prefix) == 2:
        return (), False
    code = sum((at + 2) * token for at, token in enumerate(prefix))
    return best(q, (code + 1) % 3), code % 4 != 3


def likely_tokens(prefix, _, q):
    """As many deterministic children as are likely; leaves where the proposer is unsure."""
    is_leaf = len(prefix) == 3 or (len(prefix) > 0 and q.max() < 0.5)
    return ((), False) if is_leaf else (tuple(np.flatnonzero(q > 0.4).tolist()), True)


def some_branches(prefix, _, q):
    """Three levels, but only below the token 0 and below nothing twice."""
    if len(prefix) == 3 or (prefix and prefix[-1] != 0 and len(prefix) > 1):
        return (), False
    return (best(q, 1), True) if prefix[:1] != (2,) else ((), False)


def by_another_branch(prefix, tree, q):
    """The deterministic child of the root goes on as far as the sampled one's token says."""
    if not prefix:
        return best(q, 1), True
    drawn = next(
        (t for t, q in zip(tree.token_ids, tree.drawn_from, strict=True) if q is not None), -1
    )
    is_fixed = prefix[0] != drawn
    return (best(q, 1), True) if len(prefix) < 2 and (not is_fixed or drawn != 1) else ((), False)


def sampled_below_fixed(prefix, _, q):
    """Nothing is sampled at the root; below it, everything is."""
    return (best(q, 2), False) if not prefix else ((), len(prefix) < 3)


SHAPES = {
    "n = 1": of_width(1, 3),
    "n = 2": of_width(2, 2),
    "n = 3": of_width(3, 2),
    "mixed widths": mixed_widths,
    "likely tokens": likely_tokens,
    "some branches": some_branches,
    "by another branch": by_another_branch,
    "sampled below fixed": sampled_below_fixed,
}


def drawn_trees(shape, proposer):
    return list(every_tree(lambda prefix, tree: shape(prefix, tree, proposer(prefix)), proposer))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_trees_are_exact_for_any_pair_of_distributions(shape, seed):
    target, proposer = random_model(seed)
    emitted = trees_emit(verify_tree, drawn_trees(shape, proposer), target)
    assert sum(emitted.values()) == pytest.approx(1, abs=1e-12)
    assert bias(emitted, target) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_trees_are_exact_in_every_special_case(n, kind):
    target, proposer = random_model(3, (kind,))
    trees = drawn_trees(of_width(n, 2), proposer)
    assert bias(trees_emit(verify_tree, trees, target), target) < 1e-12


def test_full_trees_of_three_levels_are_exact():
    target, proposer = random_model(4)
    trees = drawn_trees(of_width(2, 3), proposer)
    assert bias(trees_emit(verify_tree, trees, target), target) < 1e-12


def mean_tokens_of(trees, target, is_sampled):
    """Expected tokens of a step, by the slow twin."""
    mean = 0.0
    for tree in trees:
        p = [target(tree.prefix(row)) for row in range(len(tree) + 1)]
        marks = [is_sampled and q is not None for q in tree.drawn_from]
        outcomes = tree_outcomes(tree.token_ids, tree.parents, marks, p, tree.drawn_from)
        mean += tree.weight * mean_tokens(outcomes)
    return mean


@pytest.mark.parametrize("shape", ["n = 1", "n = 2", "mixed widths", "likely tokens"])
def test_looking_at_probabilities_accepts_more_than_matching_the_same_trees(shape):
    gains = []
    for seed in range(8):
        target, proposer = random_model(seed, ("plain", "zeros"))
        trees = drawn_trees(SHAPES[shape], proposer)
        looking, matching = (mean_tokens_of(trees, target, one) for one in (True, False))
        gains.append(looking - matching)
    assert np.mean(gains) > 0.03


def test_acceptance_at_a_row_is_the_best_possible():
    """Hu et al. 2025, theorem 4: p(T) + the sum of min(p, q) over all other tokens."""
    for seed in range(5):
        target, proposer = random_model(seed, ("plain",))
        trees = drawn_trees(of_width(2, 1), proposer)
        p, q = target(()), proposer(())
        top = q.argmax()
        rest = np.where(np.arange(V) == top, 0, q) / (1 - q[top])
        want = p[top] + np.minimum(p, rest)[np.arange(V) != top].sum()
        emitted = trees_emit(verify_tree, trees, target)
        assert mean_tokens(emitted) - 1 == pytest.approx(want, abs=1e-12)


def test_the_rule_is_its_slow_twin_on_random_trees():
    rng = np.random.default_rng(0)
    target, proposer = random_model(5)
    trees = [
        tree for shape in SHAPES.values() for tree in drawn_trees(shape, proposer) if len(tree)
    ]
    drafts, logits_RV = as_batch(trees, V), target_rows(trees, target)
    # Padding and other tensors that may hold anything.
    parents_BN = torch.where(drafts.is_draft_BN, drafts.parents_BN, 2**40 - 7)
    is_sampled_BN = drafts.is_sampled_BN | ~drafts.is_draft_BN
    drafts = replace(drafts, parents_BN=parents_BN, is_sampled_BN=is_sampled_BN)
    for _ in range(3):
        coins, gumbel = (
            rng.random((len(trees), drafts.width)),
            rng.gumbel(size=(drafts.width + 1, V)),
        )
        noise_NV = torch.tensor(gumbel)
        verdict = verify_tree(
            logits_RV,
            drafts,
            torch.tensor(coins),
            lambda log_BV, depth_B, _, noise_NV=noise_NV: (log_BV + noise_NV[depth_B]).argmax(1),
        )
        for b, tree in enumerate(trees):
            with np.errstate(divide="ignore"):
                ids, rows = walk_tree(
                    tree.token_ids,
                    tree.parents,
                    [q is not None for q in tree.drawn_from],
                    [target(tree.prefix(row)) for row in range(len(tree) + 1)],
                    tree.drawn_from,
                    coins[b],
                    lambda p, depth, noise=gumbel: int((np.log(p) + noise[depth]).argmax()),
                )
            padding = drafts.width - len(rows)
            assert verdict.token_ids_BN1[b].tolist() == [*ids, *[-1] * padding]
            assert verdict.rows_BN[b].tolist() == [*rows, *[-1] * padding]
            assert verdict.num_emitted_B[b] == len(ids)


def test_the_outcomes_of_the_slow_twin_are_those_of_the_enumeration():
    target, proposer = random_model(6)
    for tree in drawn_trees(mixed_widths, proposer)[:4]:
        tree = replace(tree, weight=1.0)
        p = [target(tree.prefix(row)) for row in range(len(tree) + 1)]
        is_sampled = [q is not None for q in tree.drawn_from]
        slow = tree_outcomes(tree.token_ids, tree.parents, is_sampled, p, tree.drawn_from)
        assert total_variation(trees_emit(verify_tree, [tree], target), slow) < 1e-12


# What must fail.


def wrong_bias(trees, rule=verify_tree, drafts=None, target=None):
    return bias(trees_emit(rule, trees, target, drafts), target)


def test_pruning_sampled_drafts_by_their_own_probability_would_be_seen():
    target, proposer = random_model(11, ("plain",))
    trees = drawn_trees(of_width(2, 2), proposer)
    cut = [pruned(tree, lambda probability: probability > 0.5) for tree in trees]
    assert wrong_bias(cut, target=target) > 0.1
    # The same cut by something that the prefix knows does no harm.
    assert wrong_bias([pruned(tree, lambda _: False) for tree in trees], target=target) < 1e-12


def test_probabilities_that_are_not_renormalised_would_be_seen():
    target, proposer = random_model(12, ("plain",))
    trees = drawn_trees(of_width(2, 2), proposer)
    whole = [
        replace(
            tree,
            drawn_from=tuple(
                None if q is None else proposer(tree.prefix(parent))
                for q, parent in zip(tree.drawn_from, tree.parents, strict=True)
            ),
        )
        for tree in trees
    ]
    assert wrong_bias(trees, drafts=as_batch(whole, V), target=target) > 0.03


def test_a_residual_that_is_not_subtracted_would_be_seen(monkeypatch):
    target, proposer = random_model(13, ("plain",))
    trees = drawn_trees(of_width(2, 2), proposer)
    monkeypatch.setattr("outdraft.spec.verify_tree.residual", lambda p_BV, *_: p_BV)
    assert wrong_bias(trees, target=target) > 0.05


def on_a_grid(rule, proposer, target, coin_of=None, cells=4000):
    """{token: probability} of the first token, by one coin on a fine grid, one level of n = 2.

    `coin_of(u)`: None draws x with its own noise; otherwise x is drawn with u, and so is the coin.
    """
    trees = drawn_trees(of_width(2, 1), proposer)
    first = defaultdict(float)
    u_C = (np.arange(cells) + 0.5) / cells
    for tree in trees:
        drafts, logits_RV = as_batch([tree], V), target_rows([tree], target)
        q = next(one for one in tree.drawn_from if one is not None)
        x = next(
            t for t, one in zip(tree.token_ids, tree.drawn_from, strict=True) if one is not None
        )
        weight_C = np.full(cells, tree.weight / cells)
        if coin_of is not None:
            ends = q.cumsum()
            weight_C = ((u_C >= ends[x] - q[x]) & (u_C < ends[x])) / cells
        for y in range(V):
            script = Script(torch.full((cells, 2), y))
            batch, rows_RV = repeated(drafts, logits_RV, torch.zeros(cells, dtype=torch.int64))
            coins_CN = torch.tensor(u_C)[:, None].expand(-1, drafts.width)
            verdict = rule(rows_RV, batch, coins_CN, script)
            share_C = script.log_weights[0].softmax(1)[:, y].numpy() * weight_C
            for token, share in zip(verdict.token_ids_BN1[:, 0].tolist(), share_C, strict=True):
                first[(token,)] += share
    return first


def fixed_first(logits_RV, drafts, coins_BN, draw):
    """Wrong: deterministic siblings are tested before the sampled one, with the same coin."""
    right = verify_tree(logits_RV, drafts, coins_BN, draw)
    p_BV = logits_RV[row_start_B(drafts)].softmax(1)
    is_fixed_BN = ~drafts.is_sampled_BN & drafts.is_draft_BN & (drafts.parents_BN == 0)
    fixed_B = drafts.token_ids_BN.gather(1, is_fixed_BN.int().argmax(1, keepdim=True))[:, 0]
    takes_B = is_fixed_BN.any(1) & (coins_BN[:, 0] < p_BV.gather(1, fixed_B[:, None])[:, 0])
    first_B = torch.where(takes_B, fixed_B, right.token_ids_BN1[:, 0])
    return Verdict(first_B[:, None], torch.ones_like(first_B), right.rows_BN)


def test_a_coin_that_decides_siblings_or_drew_the_draft_would_be_seen():
    target, proposer = random_model(14, ("plain",))
    want = {(v,): share for v, share in enumerate(target(()))}
    assert total_variation(on_a_grid(verify_tree, proposer, target), want) < 1e-3
    assert total_variation(on_a_grid(fixed_first, proposer, target), want) > 0.03
    shared = on_a_grid(verify_tree, proposer, target, coin_of=lambda u: u)
    assert total_variation(shared, want) > 0.03


def block_of_chains(trees, target):
    """What block verification emits, of trees that are all chains of one length."""
    drafts = replace(as_batch(trees, V), is_chain=True, sampled_trees=False)
    p_BN1V = target_rows(trees, target).exp().view(len(trees), -1, V)
    return chains_emit(drafts, p_BN1V, [tree.weight for tree in trees], accept_block)


def test_the_rule_must_not_be_chosen_by_the_shape_that_a_tree_came_out_with():
    """Block verification of the trees that happen to be chains, where that depends on a draw."""

    def branches_after_a_token(prefix, _, q):
        if len(prefix) == 2 and prefix[-1] == 0:
            return best(q, 1), True
        return (), len(prefix) < 3

    target, proposer = random_model(15, ("plain",))
    trees = drawn_trees(branches_after_a_token, proposer)
    chains = [tree for tree in trees if tree.parents == (0, 1, 2)]
    others = [tree for tree in trees if tree.parents != (0, 1, 2)]
    assert chains
    assert others
    assert bias(trees_emit(verify_tree, trees, target), target) < 1e-12
    by_shape = trees_emit(verify_tree, others, target)
    for sequence, weight in block_of_chains(chains, target).items():
        by_shape[sequence] += weight
    assert sum(by_shape.values()) == pytest.approx(1, abs=1e-12)
    assert bias(by_shape, target) > 0.003
