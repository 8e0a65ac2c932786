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

from outdraft.kernels.torch.verification import reject_tokens, traverse
from tests.reference.drafted_trees import as_batch, every_tree, pruned, target_rows
from tests.reference.verification import total_variation, tree_outcomes, walk_tree
from tests.verification.enumeration import (
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

# Ways to draft: (prefix, tree so far, proposer's distribution) -> (tokens, number of draws).


def best(q, count):
    return tuple(np.argsort(-q, kind="stable")[:count].tolist())


def of_width(n, depth):
    return lambda prefix, _, q: ((), n if len(prefix) < depth else 0)


def one_draw(n, depth):
    """Top-(n-1)+1 of Hu et al., ICLR 2025, arXiv 2502.18779."""
    return lambda prefix, _, q: (best(q, n - 1), 1) if len(prefix) < depth else ((), 0)


def mixed_widths(prefix, _, q):
    """0 to 3 children by the prefix, of either kind."""
    if len(prefix) == 2:
        return (), 0
    code = sum((at + 2) * token for at, token in enumerate(prefix))
    return best(q, (code + 1) % 3), (code + 1) % 4 % 3


def likely_tokens(prefix, _, q):
    """As many deterministic children as are likely; leaves where the proposer is unsure."""
    is_leaf = len(prefix) == 3 or (len(prefix) > 0 and q.max() < 0.5)
    return ((), 0) if is_leaf else (tuple(np.flatnonzero(q > 0.4).tolist()), 1)


def some_branches(prefix, _, q):
    """Three levels, but only below the token 0 and below nothing twice."""
    if len(prefix) == 3 or (prefix and prefix[-1] != 0 and len(prefix) > 1):
        return (), 0
    return (best(q, 1), 1) if prefix[:1] != (2,) else ((), 0)


def by_another_branch(prefix, tree, q):
    """The second child of the root goes on as far as the first one's token says."""
    if not prefix:
        return (), 2
    is_second = prefix[0] != tree.token_ids[0]
    return ((), 2) if len(prefix) < 2 and (not is_second or tree.token_ids[0] != 1) else ((), 0)


def sampled_below_fixed(prefix, _, q):
    """Nothing is sampled at the root; below it, everything is."""
    return (best(q, 2), 0) if not prefix else ((), int(len(prefix) < 3))


SHAPES = {
    "1 draw": of_width(1, 3),
    "2 draws": of_width(2, 2),
    "3 draws": lambda prefix, _, q: ((), max(0, 3 - 2 * len(prefix))),
    "two chains": lambda prefix, _, q: ((), (2, 1, 1, 0)[len(prefix)]),
    "n = 2": one_draw(2, 2),
    "n = 3": one_draw(3, 2),
    "mixed widths": mixed_widths,
    "likely tokens": likely_tokens,
    "some branches": some_branches,
    "by another branch": by_another_branch,
    "sampled below fixed": sampled_below_fixed,
}


def drawn_trees(shape, proposer):
    return list(every_tree(lambda prefix, tree: shape(prefix, tree, proposer(prefix)), proposer))


@pytest.mark.slow
@pytest.mark.few(14)
@pytest.mark.parametrize("kinds", [KINDS, ("plain",), ("plain", "zeros")], ids=len)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_trees_are_exact_for_any_pair_of_distributions(shape, kinds):
    for seed in range(2):
        target, proposer = random_model(seed, kinds)
        emitted = trees_emit(traverse, drawn_trees(shape, proposer), target)
        assert sum(emitted.values()) == pytest.approx(1, abs=1e-12)
        assert bias(emitted, target) < 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_trees_that_grow_where_most_is_expected_are_exact(seed):
    """Best first, up to five rows: every row that exists was decided by all drawn before it."""
    target, proposer = random_model(seed, ("plain",))

    def likelihood(tree, row):
        prefix = tree.prefix(row)
        return np.prod([proposer(prefix[:at])[token] for at, token in enumerate(prefix)])

    def branches(prefix, tree):
        num_draws = 2 if proposer(prefix).max() < 0.7 else 1
        return (), min(num_draws, 5 - len(tree)) if len(prefix) < 3 else 0

    trees = list(
        every_tree(
            branches,
            proposer,
            lambda tree, waiting: max(waiting, key=lambda row: likelihood(tree, row)),
        )
    )
    assert len({tree.parents for tree in trees}) > 1
    assert bias(trees_emit(traverse, trees, target), target) < 1e-12


@pytest.mark.few(18)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["1 draw", "2 draws", "3 draws", "n = 2", "n = 3"])
def test_trees_are_exact_in_every_special_case(shape, kind):
    target, proposer = random_model(3, (kind,))
    trees = drawn_trees(SHAPES[shape], proposer)
    assert bias(trees_emit(traverse, trees, target), target) < 1e-12


def outcomes_of(tree, target, looks_at_q=True):
    """{emitted ids: probability} of one tree, by the slow twin."""
    p = [target(tree.prefix(row)) for row in range(len(tree) + 1)]
    q = tree.drawn_from if looks_at_q else [None] * len(tree)
    return tree_outcomes(tree.token_ids, tree.parents, q, p)


def mean_tokens_of(trees, target, looks_at_q=True):
    """Expected tokens of a step."""
    means = [mean_tokens(outcomes_of(tree, target, looks_at_q)) for tree in trees]
    return np.dot([tree.weight for tree in trees], means)


@pytest.mark.parametrize("shape", ["1 draw", "2 draws", "n = 2", "mixed widths"])
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
        trees = drawn_trees(one_draw(2, 1), proposer)
        p, q = target(()), proposer(())
        top = q.argmax()
        rest = np.where(np.arange(V) == top, 0, q) / (1 - q[top])
        want = p[top] + np.minimum(p, rest)[np.arange(V) != top].sum()
        emitted = trees_emit(traverse, trees, target)
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
        verdict = traverse(
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
                    tree.drawn_from,
                    [target(tree.prefix(row)) for row in range(len(tree) + 1)],
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
        slow = outcomes_of(tree, target)
        assert total_variation(trees_emit(traverse, [tree], target), slow) < 1e-12


# What must fail.


def wrong_bias(trees, rule=traverse, drafts=None, target=None):
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
    assert wrong_bias(trees, drafts=as_batch(whole, V), target=target) > 0.01


def test_siblings_that_are_not_tested_as_they_were_drawn_would_be_seen():
    target, proposer = random_model(19, ("plain",))
    trees = drawn_trees(of_width(2, 1), proposer)
    turned = [
        replace(tree, token_ids=tree.token_ids[::-1], drawn_from=tree.drawn_from[::-1])
        for tree in trees
    ]
    assert wrong_bias(trees, target=target) < 1e-12
    assert wrong_bias(turned, target=target) > 0.05


def test_a_residual_that_is_not_subtracted_would_be_seen(monkeypatch):
    target, proposer = random_model(13, ("plain",))
    trees = drawn_trees(of_width(2, 2), proposer)
    monkeypatch.setattr("outdraft.kernels.torch.verification.residual", lambda p_BV, *_: p_BV)
    assert wrong_bias(trees, target=target) > 0.05


def on_a_grid(proposer, target, depends, cells=4000):
    """{token: probability} of the first token of two draws behind the root.

    `depends`: what else the coin of the first draw decides: "nothing", "its sibling", "its token".
    """
    first = defaultdict(float)
    u_C = torch.tensor((np.arange(cells) + 0.5) / cells)
    for tree in drawn_trees(of_width(2, 1), proposer):
        drafts, logits_RV = as_batch([tree], V), target_rows([tree], target)
        batch, rows_RV = repeated(drafts, logits_RV, torch.zeros(cells, dtype=torch.int64))
        other_C = u_C if depends == "its sibling" else u_C[torch.randperm(cells)]
        weight_C = torch.full((cells,), tree.weight / cells)
        if depends == "its token":
            x, q = tree.token_ids[0], tree.drawn_from[0]
            ends = q.cumsum()
            is_x_C = (u_C >= ends[x] - q[x]) & (u_C < ends[x])
            weight_C = is_x_C * tree.weight / q[x] / cells
        for y in range(V):
            script = Script(torch.full((cells,), y))
            verdict = traverse(rows_RV, batch, torch.stack([u_C, other_C], 1), script)
            shares = (script.shares_B() * weight_C).tolist()
            for token, share in zip(verdict.token_ids_BN1[:, 0].tolist(), shares, strict=True):
                first[(token,)] += share
    return first


def test_a_coin_that_decides_siblings_or_drew_the_draft_would_be_seen():
    torch.manual_seed(0)
    target, proposer = random_model(19, ("plain",))
    want = {(v,): share for v, share in enumerate(target(()))}
    apart = {
        depends: total_variation(on_a_grid(proposer, target, depends), want)
        for depends in ("nothing", "its sibling", "its token")
    }
    assert apart["nothing"] < 0.01
    assert apart["its sibling"] > 0.03
    assert apart["its token"] > 0.03


def as_chains(trees, target, rule):
    """What a rule emits, of trees that are all chains of one length."""
    drafts = replace(as_batch(trees, V), is_chain=True, sampled_trees=False)
    return chains_emit(rule, drafts, target_rows(trees, target), [tree.weight for tree in trees])


def test_chains_and_trees_are_enumerated_alike_and_the_rules_are_not_the_same():
    target, proposer = random_model(15, ("plain", "zeros"))
    chains = [tree for tree in drawn_trees(of_width(1, 3), proposer) if len(tree) == 3]
    as_trees = trees_emit(traverse, chains, target)
    assert total_variation(as_trees, as_chains(chains, target, traverse)) < 1e-12
    assert total_variation(as_trees, as_chains(chains, target, reject_tokens)) > 0.01


def test_the_rule_must_not_be_chosen_by_the_shape_that_a_tree_came_out_with():
    """Token-level verification of trees that happen to be chains, where that depends on a draw."""

    def branches_after_a_token(prefix, _, q):
        if len(prefix) == 2 and prefix[-1] == 0:
            return (), 2
        return (), int(len(prefix) < 3)

    target, proposer = random_model(15, ("plain",))
    trees = drawn_trees(branches_after_a_token, proposer)
    chains = [tree for tree in trees if tree.parents == (0, 1, 2)]
    others = [tree for tree in trees if tree.parents != (0, 1, 2)]
    assert chains
    assert others
    assert bias(trees_emit(traverse, trees, target), target) < 1e-12
    by_shape = trees_emit(traverse, others, target)
    for sequence, weight in as_chains(chains, target, reject_tokens).items():
        by_shape[sequence] += weight
    assert sum(by_shape.values()) == pytest.approx(1, abs=1e-12)
    assert bias(by_shape, target) > 0.003
