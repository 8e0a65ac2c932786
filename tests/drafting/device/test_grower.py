"""Trees that a network drafts, with tables of distributions in its place."""

import heapq
import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.core.draft import TreeShape
from outdraft.distributed.group import RequestShares
from outdraft.drafting.device.grower import compiled_grow, grow
from outdraft.kernels.data.noise import NoiseKeys, Purpose
from outdraft.kernels.draft_ops import Growth, LevelTask, side_shares
from outdraft.kernels.torch import noise
from outdraft.kernels.torch.drawn_level import draw_level
from tests.kernels.tables import kernels_for
from tests.reference.draft_trees import ancestor_masks, tree_depths
from tests.reference.tabled_drafter import (
    TabledLevels,
    TabledModel,
    prefixes,
    sampling_of,
    walk_trees,
)


def build(
    shape, model, temperatures, *, num_rows=None, seeds=None, samples=True, shares_noise=None
):
    """(drafts, levels) of one tree per temperature."""
    num_requests = len(temperatures)
    seeds = range(num_requests) if seeds is None else seeds
    num_rows = [shape.num_rows] * num_requests if num_rows is None else num_rows
    num_tokens_B = torch.full((num_requests,), 100)
    levels = TabledLevels(model, num_requests)
    growth = Growth(
        kernels=kernels_for(torch.float32),
        shape=shape,
        num_tokens_B=num_tokens_B,
        num_drafts_G=torch.tensor(num_rows),
        fewest=min(num_rows),
        sampling=sampling_of(temperatures, seeds, model.vocab_size, shares_noise),
        samples=samples,
    )
    return grow(levels, growth), levels.seen


def test_ranks_that_share_levels_ask_for_each_one():
    """Though the requests of one rank have all that they want before: the other one waits."""
    model, shape = TabledModel(0, 5, 3), TreeShape.chain(3)
    levels = TabledLevels(model, 1)
    growth = Growth(
        kernels=kernels_for(torch.float32),
        shape=shape,
        num_tokens_B=torch.tensor([100]),
        num_drafts_G=torch.tensor([1, 3]),
        fewest=1,
        sampling=sampling_of([0.0], [0], model.vocab_size),
        samples=True,
        shares=RequestShares(SimpleNamespace(size=2, rank=0), (1, 1)),
    )
    assert compiled_grow(levels, growth).num_drafts_B.tolist() == [1]
    assert len(levels.seen) == shape.depth - 1  # those behind the first one


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(
    lambda rows: TreeShape(tuple(rows))
)


@st.composite
def batches(draw):
    """(shape, model, temperatures, num_rows)"""
    shape = draw(shapes)
    model = TabledModel(draw(st.integers(0, 99)), 5, 3, draw(st.sampled_from([0.0, 0.4, 0.9])))
    temperatures = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=4))
    num_rows = [draw(st.integers(1, shape.num_rows)) for _ in temperatures]
    return shape, model, temperatures, num_rows


def children_of(parents, row):
    return [j for j, parent in enumerate(parents) if parent == row]


@settings(max_examples=30, deadline=None)
@given(batches())
def test_a_draft_is_a_tree_of_as_many_rows_as_the_request_wants(batch):
    shape, model, temperatures, num_rows = batch
    drafts, _ = build(shape, model, temperatures, num_rows=num_rows)
    for ids, parents, count in zip(
        drafts.token_ids_BN.tolist(), drafts.parents_BN.tolist(), num_rows, strict=True
    ):
        assert all(0 <= token < model.vocab_size for token in ids[:count])
        assert set(ids[count:]) <= {-1}
        assert all(0 <= parent <= row for row, parent in enumerate(parents[:count]))
        paths = prefixes(ids[:count], parents[:count])
        assert len(set(paths)) == len(paths), "siblings are distinct"
        assert max(tree_depths(parents[:count])) <= shape.depth


@settings(max_examples=60, deadline=None)
@given(batches())
def test_the_children_of_a_row_are_drawn_from_what_those_before_them_leave(batch):
    shape, model, temperatures, num_rows = batch
    drafts, _ = build(shape, model, temperatures, num_rows=num_rows)
    if drafts.is_sampled_BN is None:
        assert set(temperatures) == {0.0}
        return
    for b, count in enumerate(num_rows):
        ids = drafts.token_ids_BN[b, :count].tolist()
        parents = drafts.parents_BN[b, :count].tolist()
        is_drawn = drafts.is_sampled_BN[b, :count].tolist()
        if temperatures[b] == 0:
            assert not any(is_drawn)
            continue
        for row, prefix in enumerate(prefixes(ids, parents)):
            children = children_of(parents, row)
            left = model.probs(prefix) if children else None
            for child in children:
                assert is_drawn[child] == (left.sum() > 0), "while there is something to draw from"
                if is_drawn[child]:
                    q = drafts.probs_BNV[b, child].numpy()
                    np.testing.assert_allclose(q, left / left.sum(), atol=1e-6)
                    assert left[ids[child]] > 0
                left[ids[child]] = 0
            assert len({ids[child] for child in children}) == len(children)


@settings(max_examples=30, deadline=None)
@given(batches())
def test_the_rows_of_a_level_see_what_they_continue(batch):
    shape, model, temperatures, _ = batch
    drafts, levels = build(shape, model, temperatures)
    for b, temperature in enumerate(temperatures):
        parents, masks, depths, ids = [], [], [], []
        for level in levels:
            above = 0 if level.depth == 1 else levels[level.depth - 2].first_row + 1
            assert level.first_row == len(parents)
            parents += [above + origin for origin in level.origins_BF[b].tolist()]
            masks += level.ancestors_BF[b].tolist()
            ids += level.token_ids_BF[b].tolist()
            depths += [level.depth] * level.origins_BF.shape[1]
        assert masks == ancestor_masks(parents)
        assert depths == tree_depths(parents)
        if temperature > 0 or shape.is_chain:
            assert len(parents) == shape.num_rows - shape.levels[-1]
            assert parents == drafts.parents_BN[b, : len(parents)].tolist()
            assert ids == drafts.token_ids_BN[b, : len(ids)].tolist()


@settings(max_examples=40, deadline=None)
@given(batches(), st.lists(st.booleans(), min_size=4, max_size=4))
def test_a_tree_does_not_depend_on_the_rest_of_the_batch(batch, shares_noise):
    """The batch has requests that are greedy, that draw, and that share the target's noise."""
    shape, model, temperatures, num_rows = batch
    shares_noise = shares_noise[: len(temperatures)]
    together, _ = build(shape, model, temperatures, num_rows=num_rows, shares_noise=shares_noise)
    for b, temperature in enumerate(temperatures):
        one = {"num_rows": [num_rows[b]], "seeds": [b], "shares_noise": [shares_noise[b]]}
        alone, _ = build(shape, model, [temperature], **one)
        draws = temperature > 0 and not shares_noise[b]
        assert (alone.is_sampled_BN is not None) == draws
        if together.is_sampled_BN is not None:
            assert draws or not together.is_sampled_BN[b].any()
        count = num_rows[b]
        for name in ("token_ids_BN", "parents_BN"):
            assert torch.equal(getattr(together, name)[b, :count], getattr(alone, name)[0, :count])
        if alone.is_sampled_BN is not None:
            is_drawn_K = alone.is_sampled_BN[0, :count]
            assert torch.equal(together.is_sampled_BN[b, :count], is_drawn_K)
            for row in is_drawn_K.nonzero()[:, 0].tolist():
                assert torch.equal(together.probs_BNV[b, row], alone.probs_BNV[0, row])


def best_first(model, depth, num_rows):
    """Weights of the rows of the best trees of 1, 2, ... rows, by a search over all paths."""
    waiting = [(-p, (token,)) for token, p in enumerate(model.probs(()))]
    heapq.heapify(waiting)
    weights = []
    while len(weights) < num_rows:
        weight, path = heapq.heappop(waiting)
        weights.append(-weight)
        if len(path) < depth:
            for token, p in enumerate(model.probs(path)):
                heapq.heappush(waiting, (weight * p, (*path, token)))
    return weights


@pytest.mark.parametrize("seed", range(5))
def test_greedy_trees_are_the_best_of_their_size_whatever_it_is(seed):
    model = TabledModel(seed, 3, 3)
    drafts, _ = build(TreeShape((3, 9, 27)), model, [0.0])
    ids, parents = drafts.token_ids_BN[0].tolist(), drafts.parents_BN[0].tolist()
    weights = [
        np.prod([model.probs(path[:at])[token] for at, token in enumerate(path)])
        for path in prefixes(ids, parents)[1:]
    ]
    np.testing.assert_allclose(weights, best_first(model, 3, len(weights)), rtol=1e-5)


def eagle_candidates(model, levels, most):
    """{path: weight}: all that EAGLE-2 considers: the most likely children of the best of each
    level."""
    nodes, pool = {(): 1.0}, {}
    for num_rows in levels:
        level = {}
        for path, weight in nodes.items():
            probs = model.probs(path)
            for token in np.argsort(-probs)[:most]:
                level[(*path, int(token))] = weight * probs[token]
        pool |= level
        nodes = dict(sorted(level.items(), key=lambda item: -item[1])[:num_rows])
    return pool


@pytest.mark.parametrize("levels", [(2, 2, 2), (3, 4, 1), (1, 1, 2), (6, 2, 3)])
def test_greedy_trees_keep_the_best_of_all_candidates(levels):
    model = TabledModel(7, 12, 3)
    drafts, _ = build(TreeShape(levels), model, [0.0])
    pool = eagle_candidates(model, levels, most=8)
    best = sorted(pool, key=lambda path: -pool[path])[: sum(levels)]
    ours = prefixes(drafts.token_ids_BN[0].tolist(), drafts.parents_BN[0].tolist())[1:]
    assert ours == best


def test_a_greedy_chain_holds_the_best_token_behind_each():
    model, path = TabledModel(7, 12, 4), []
    drafts, _ = build(TreeShape.chain(4), model, [0.0])
    for _ in range(4):
        path.append(int(model.probs(path).argmax()))
    assert drafts.is_chain
    assert drafts.token_ids_BN.tolist() == [path]
    assert drafts.parents_BN.tolist() == [[0, 1, 2, 3]]


def test_what_is_drawn_has_no_say_in_its_own_level():
    num_requests = 400
    model = TabledModel(3, 6, 3, zeros=0.5)
    drafts, levels = build(TreeShape((3, 5, 4, 1)), model, [1.0] * num_requests)
    before = [()] * num_requests  # what was drawn at the levels above
    start, num_seen = 0, []
    for level in levels:
        num_rows = level.origins_BF.shape[1]
        is_drawn_BF = drafts.is_sampled_BN[:, start : start + num_rows]
        structure = [
            (tuple(origins), tuple(drawn))
            for origins, drawn in zip(level.origins_BF.tolist(), is_drawn_BF.tolist(), strict=True)
        ]
        num_seen.append(len(set(structure)))
        assert len(set(zip(before, structure, strict=True))) == len(set(before))
        before = [
            (*above, tuple(tokens))
            for above, tokens in zip(before, level.token_ids_BF.tolist(), strict=True)
        ]
        start += num_rows
    assert num_seen[0] == 1
    assert num_seen[1] > 1, "but in the levels below it"
    assert len(set(before)) > 50


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


def is_plausible(statistic, degrees):
    """Six standard deviations above what is expected."""
    return statistic < degrees + 6 * np.sqrt(2 * degrees)


def without_replacement(q, num_ranks):
    """{ranks: probability} of the first tokens that are drawn."""
    joint = {}
    for ranks in itertools.permutations(np.flatnonzero(q), num_ranks):
        before = np.concatenate([[0], q[list(ranks)].cumsum()[:-1]])
        joint[ranks] = np.prod(q[list(ranks)] / (1 - before))
    return joint


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("shape", [TreeShape((3, 1)), TreeShape((4, 4))], ids=str)
@pytest.mark.parametrize("zeros", [0.0, 0.3])
def test_the_children_of_a_node_follow_drawing_without_replacement(shape, num_ranks, zeros):
    model, num_requests = TabledModel(1, 5, 3, zeros), 20_000
    drafts, _ = build(shape, model, [1.0] * num_requests)
    joint = without_replacement(model.probs(()), num_ranks)
    assert sum(joint.values()) == pytest.approx(1)
    drawn = Counter(map(tuple, drafts.token_ids_BN[:, :num_ranks].tolist()))
    assert drawn.keys() <= joint.keys()
    expected = num_requests * np.array(list(joint.values()))
    counts = np.array([drawn[ranks] for ranks in joint])
    assert is_plausible(chi_square(counts, expected), len(joint) - 1)
    if num_ranks > 1:
        in_other_order = np.array([drawn[ranks[::-1]] for ranks in joint])
        assert not is_plausible(chi_square(in_other_order, expected), len(joint) - 1)


def test_the_children_of_a_drawn_node_follow_drawing_without_replacement():
    model, num_requests = TabledModel(1, 4, 3), 40_000
    drafts, _ = build(TreeShape((1, 2)), model, [1.0] * num_requests)
    for parent in range(4):
        at = drafts.token_ids_BN[:, 0] == parent
        joint = without_replacement(model.probs((parent,)), 2)
        drawn = Counter(map(tuple, drafts.token_ids_BN[at, 1:3].tolist()))
        expected = int(at.sum()) * np.array(list(joint.values()))
        counts = np.array([drawn[ranks] for ranks in joint])
        assert is_plausible(chi_square(counts, expected), len(joint) - 1)


def test_nodes_of_one_level_draw_independently():
    model, num_requests = TabledModel(1, 5, 1), 20_000
    model.logits_XV[1] = model.logits_XV[0].expand(5, -1)  # the prefix makes no difference
    drafts, _ = build(TreeShape((2, 5)), model, [1.0] * num_requests)
    is_child_BK2 = drafts.parents_BN[:, 2:, None] == torch.tensor([1, 2])
    has_both_B = is_child_BK2.any(1).all(1)
    first_child_B2 = 2 + is_child_BK2.int().argmax(1)
    first_B, second_B = drafts.token_ids_BN.gather(1, first_child_B2)[has_both_B].T
    assert len(first_B) > 5_000
    chance = float((model.probs(()) ** 2).sum())
    rate = float((first_B == second_B).double().mean())
    assert abs(rate - chance) < 6 * np.sqrt(chance * (1 - chance) / len(first_B))


EXACT_SHAPES = [
    TreeShape((1, 1, 1)),
    TreeShape((2, 2)),
    TreeShape((3, 2, 2)),
    TreeShape((1, 3)),
    TreeShape((4,)),
    TreeShape((4, 5)),
    TreeShape((3, 3, 2)),
]


def emitted_statistic(drafts, target, seed=0, length=3):
    """(chi-square of the joint of the first emitted tokens, degrees of freedom)"""
    emitted = walk_trees(drafts, target, np.random.default_rng(seed), length)
    numbers = np.zeros(len(emitted), np.int64)
    for place in range(length):
        numbers = numbers * target.vocab_size + emitted[:, place]
    paths = list(itertools.product(range(target.vocab_size), repeat=length))
    joint = np.array(
        [np.prod([target.probs(path[:at])[path[at]] for at in range(length)]) for path in paths]
    )
    counts = np.bincount(numbers, minlength=len(joint))
    return chi_square(counts, len(emitted) * joint), len(joint) - 1


@pytest.mark.parametrize("shape", EXACT_SHAPES, ids=str)
@pytest.mark.parametrize("zeros", [0.0, 0.5])
def test_drawn_trees_emit_the_targets_joint_distribution(shape, zeros):
    drafter, target = TabledModel(11, 5, 3, zeros), TabledModel(12, 5, 3)
    drafts, _ = build(shape, drafter, [1.0] * 40_000)
    assert is_plausible(*emitted_statistic(drafts, target))


def test_requests_that_want_fewer_rows_emit_the_targets_joint_distribution():
    drafter, target = TabledModel(13, 5, 3), TabledModel(14, 5, 3)
    for num_rows in (2, 4, 6):
        drafts, _ = build(
            TreeShape((3, 2, 2)), drafter, [1.0] * 30_000, num_rows=[num_rows] * 30_000
        )
        assert is_plausible(*emitted_statistic(drafts, target))


@pytest.mark.parametrize(
    "fault", [None, "q not renormalised", "pruned after drawing", "one noise", "in another order"]
)
def test_faulty_drawn_trees_do_not(fault):
    drafter, target = TabledModel(11, 5, 3), TabledModel(12, 5, 3)
    seeds = [0] * 40_000 if fault == "one noise" else None
    drafts, _ = build(TreeShape((3, 2)), drafter, [1.0] * 40_000, seeds=seeds)
    if fault == "q not renormalised":
        probs_BNV = drafts.probs_BNV.clone()
        probs_BNV[:, 1:3] = torch.tensor(drafter.probs(()), dtype=torch.float32)
        drafts = replace(drafts, probs_BNV=probs_BNV)
    if fault == "pruned after drawing":
        own_BK = drafts.probs_BNV.gather(2, drafts.token_ids_BN[:, :, None])[:, :, 0]
        is_unlikely_BK = drafts.is_sampled_BN & (own_BK < 0.4)
        drafts = replace(drafts, token_ids_BN=drafts.token_ids_BN.masked_fill(is_unlikely_BK, -1))
    if fault == "in another order":
        drafts = with_swapped_first_rows(drafts)
    assert is_plausible(*emitted_statistic(drafts, target)) == (fault is None)


def with_swapped_first_rows(drafts):
    """The same trees, whose first two rows, both children of the root, change places."""
    order = [1, 0, *range(2, drafts.token_ids_BN.shape[1])]
    parents_BN = drafts.parents_BN[:, order]
    return replace(
        drafts,
        token_ids_BN=drafts.token_ids_BN[:, order],
        parents_BN=torch.where(parents_BN == 1, 2, torch.where(parents_BN == 2, 1, parents_BN)),
        probs_BNV=drafts.probs_BNV[:, order],
        is_sampled_BN=drafts.is_sampled_BN[:, order],
    )


@pytest.mark.parametrize("shape", [TreeShape((2, 3, 2)), TreeShape((3, 3, 2))])
def test_trees_that_share_the_targets_noise_hold_what_it_would_choose(shape):
    model, num_requests = TabledModel(5, 8, 3), 50
    drafts, _ = build(shape, model, [1.0] * num_requests, shares_noise=[True] * num_requests)
    assert drafts.is_sampled_BN is None
    seeds_B = torch.arange(num_requests)
    row_B, prefix_B = torch.zeros(num_requests).long(), torch.zeros(num_requests).long()
    for level in range(2):
        logits_BV = model.logits_XV[level][prefix_B]
        positions_B = torch.full((num_requests,), 100 + level)
        chosen_B = noise.sample_gumbel(
            logits_BV, NoiseKeys.of(seeds_B, positions_B, Purpose.SAMPLE)
        )
        is_hit_BK = (drafts.parents_BN == row_B[:, None]) & (
            drafts.token_ids_BN == chosen_B[:, None]
        )
        if level == 0:
            assert is_hit_BK.any(1).all()
        assert is_hit_BK.any(1).double().mean() > 0.9
        row_B = torch.where(is_hit_BK.any(1), is_hit_BK.long().argmax(1) + 1, 99)
        prefix_B = prefix_B * 8 + chosen_B


def test_without_sampling_every_tree_is_that_of_temperature_0():
    model = TabledModel(5, 8, 3)
    greedy, _ = build(TreeShape((2, 3, 2)), model, [0.0])
    drafts, _ = build(TreeShape((2, 3, 2)), model, [1.0, 0.0], samples=False)
    assert drafts.is_sampled_BN is None
    assert torch.equal(drafts.token_ids_BN, greedy.token_ids_BN.expand(2, -1))
    assert torch.equal(drafts.parents_BN, greedy.parents_BN.expand(2, -1))


def test_a_vocabulary_that_cannot_fill_a_level_is_refused():
    with pytest.raises(ValueError, match="3 tokens cannot fill 4 rows"):
        build(TreeShape((4,)), TabledModel(0, 3, 1), [0.0])


def test_rows_go_where_most_is_expected():
    sure, torn = [0.96, 0.02, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25]
    logits_BEV = torch.tensor([[sure, torn, torn]]).log()
    task = LevelTask(
        num_rows=9,
        num_kept_B=torch.tensor([9]),
        first_above=1,
        positions_B=torch.tensor([11]),
        num_tokens_B=torch.tensor([10]),
        seeds_B=torch.tensor([0]),
        draws_B=torch.tensor([True]),
    )
    level = draw_level(logits_BEV, torch.tensor([[1.0, 0.8, 0.05]]), task)
    acceptance = 0.47 + 0.42 * np.array([0.96, 0.25, 0.25])
    weight = np.array([1.0, 0.8, 0.05])
    gains = {(node, 0): weight[node] * acceptance[node] ** 0.5 for node in range(3)}
    for rank, share in ((1, 0.35), (2, 0.2), (3, 0.14)):
        gains |= {(node, rank): weight[node] * (1 - acceptance[node]) * share for node in range(3)}
    best = sorted(gains, key=lambda place: -gains[place])[:9]
    assert level.origins_BF.tolist() == [[node for node, _ in best]]
    for row, (node, rank) in enumerate(best):
        own = float(level.probs_BFV[0, row, level.token_ids_BF[0, row]])
        first = weight[node] * (0.45 + 0.5 * own**0.5) ** 0.5
        expected = first if rank == 0 else 0.7 * gains[node, rank]
        assert float(level.weight_BF[0, row]) == pytest.approx(expected, rel=1e-5)


def test_what_further_ranks_cover_falls_and_is_less_than_the_whole():
    assert side_shares(1) == []
    assert side_shares(3) == [0.35, 0.2]
    shares = side_shares(63)
    assert len(shares) == 62
    assert shares[3:5] == pytest.approx([0.14 * 0.8, 0.14 * 0.64])
    assert all(before > after > 0 for before, after in itertools.pairwise(shares))
