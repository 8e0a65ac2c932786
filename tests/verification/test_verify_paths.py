"""The batched rules and path arithmetic against one-request-at-a-time twins."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.core.draft import Draft
from outdraft.kernels.data.drafts import (
    DraftBatch,
    ancestors_BN1N,
    depths_BN1,
    path_ids_BN1K,
    place_R,
    row_index_BN1,
    row_start_B,
)
from outdraft.kernels.torch.verification import (
    match,
    reject_tokens,
    requests_of_rows,
    traverse,
)
from tests.reference import verification
from tests.reference.draft_trees import tree_depths

VOCAB = 4


@st.composite
def trees(draw, max_size=9):
    size = draw(st.integers(0, max_size))
    parents = tuple(draw(st.integers(0, row)) for row in range(size))
    return Draft(tuple(draw(st.integers(0, VOCAB - 1)) for _ in range(size)), parents)


def path_of(draft, row):
    """Drafted rows (from 1) from the root's child to `row`."""
    path = []
    while row:
        path.insert(0, row)
        row = draft.parents[row - 1]
    return path


def noisy_padding(drafts):
    """The same drafts with anything in the padding of the parents."""
    parents_BN = torch.where(drafts.is_draft_BN, drafts.parents_BN, 2**40 - 7)
    return replace(drafts, parents_BN=parents_BN)


@settings(deadline=None, max_examples=60)
@given(st.lists(trees(), min_size=1, max_size=4))
def test_paths_depths_and_ancestors_are_those_of_a_walk_to_the_root(trees):
    drafts = noisy_padding(DraftBatch.from_drafts(trees, "cpu"))
    paths, depths, seen = path_ids_BN1K(drafts), depths_BN1(drafts), ancestors_BN1N(drafts)
    for b, draft in enumerate(trees):
        assert depths[b, 1 : len(draft) + 1].tolist() == tree_depths(draft.parents)
        for row in range(len(draft) + 1):
            path = path_of(draft, row)
            want_ids = [draft.token_ids[at - 1] for at in path]
            assert paths[b, row].tolist() == want_ids + [-1] * (drafts.width - len(path))
            assert (seen[b, row].nonzero().flatten() + 1).tolist() == path


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_the_fast_path_of_chains_gives_the_paths_of_trees(lengths):
    chains = DraftBatch.from_drafts([Draft.chain(range(n)) for n in lengths], "cpu")
    assert chains.is_chain
    as_trees = replace(chains, is_chain=False)
    is_row_BN1 = torch.nn.functional.pad(chains.is_draft_BN, (1, 0), value=True)
    for of in (path_ids_BN1K, depths_BN1, ancestors_BN1N):
        assert torch.equal(of(chains)[is_row_BN1], of(as_trees)[is_row_BN1])


def test_a_chain_of_the_longest_allowed_draft_has_its_whole_path():
    drafts = replace(DraftBatch.from_drafts([Draft.chain(range(63))], "cpu"), is_chain=False)
    assert depths_BN1(drafts)[0].tolist() == list(range(64))
    assert path_ids_BN1K(drafts)[0, 63].tolist() == list(range(63))


@settings(deadline=None, max_examples=40)
@given(st.lists(trees(), min_size=1, max_size=5), st.integers(0, 3))
def test_flat_rows_are_requests_in_order_roots_first(trees, num_padding):
    drafts = DraftBatch.from_drafts(trees, "cpu")
    want = [(b, row) for b, draft in enumerate(trees) for row in range(len(draft) + 1)]
    request = requests_of_rows(drafts, len(want) + num_padding)
    rows = list(zip(request.tolist(), place_R(drafts, request).tolist(), strict=True))
    assert rows[: len(want)] == want
    index = row_index_BN1(drafts)
    for b, draft in enumerate(trees):
        start = want.index((b, 0))
        assert row_start_B(drafts)[b] == start
        padding = [start] * (drafts.width - len(draft))
        assert index[b].tolist() == [*range(start, start + len(draft) + 1), *padding]


def matched(choices, drafts):
    """The verdict of choices that are listed for padded rows."""
    is_row_BN1 = torch.nn.functional.pad(drafts.is_draft_BN, (1, 0), value=True)
    return match(torch.tensor(choices)[is_row_BN1], drafts)


def check_verdict(verdict, b, ids, rows):
    assert verdict.num_emitted_B[b] == len(ids)
    width = verdict.rows_BN.shape[1]
    assert verdict.token_ids_BN1[b].tolist() == list(ids) + [-1] * (width + 1 - len(ids))
    assert verdict.rows_BN[b].tolist() == list(rows) + [-1] * (width - len(rows))


@settings(deadline=None, max_examples=100)
@given(st.data(), st.lists(trees(), min_size=1, max_size=4))
def test_matching_is_a_walk_along_the_choices(data, trees):
    drafts = noisy_padding(DraftBatch.from_drafts(trees, "cpu"))
    row = st.lists(st.integers(0, VOCAB - 1), min_size=drafts.width + 1, max_size=drafts.width + 1)
    choices = [data.draw(row) for _ in trees]
    verdict = matched(choices, drafts)
    for b, draft in enumerate(trees):
        check_verdict(verdict, b, *verification.walk(draft.token_ids, draft.parents, choices[b]))


@settings(deadline=None, max_examples=100)
@given(st.data(), st.lists(trees(), min_size=1, max_size=4))
def test_nothing_is_emitted_behind_the_first_end_on_the_path(data, trees):
    drafts = noisy_padding(DraftBatch.from_drafts(trees, "cpu"))
    row = st.lists(st.integers(0, 1), min_size=drafts.width + 1, max_size=drafts.width + 1)
    verdict = matched([data.draw(row) for _ in trees], drafts)
    is_end_BN = torch.tensor([data.draw(row)[1:] for _ in trees], dtype=torch.bool)
    cut = verdict.cut_behind(is_end_BN)
    for b in range(len(trees)):
        ids = [v for v in verdict.token_ids_BN1[b].tolist() if v >= 0]
        rows = [v for v in verdict.rows_BN[b].tolist() if v >= 0]
        before = next((i for i, row in enumerate(rows) if is_end_BN[b, row]), len(rows))
        check_verdict(cut, b, ids[: before + 1], rows[:before])


def random_distributions(rng, *shape):
    """With zeros, repeated rows and one-hot rows among them."""
    x = rng.dirichlet(np.full(VOCAB, 0.7), shape)
    x = np.where((rng.random(x.shape) < 0.2) & (x < x.max(-1, keepdims=True)), 0, x)
    one_hot = np.eye(VOCAB)[rng.integers(VOCAB, size=shape)]
    x = np.where(rng.random(shape)[..., None] < 0.2, one_hot, x)
    return x / x.sum(-1, keepdims=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", ["tokens", "block"])
def test_of_chains_the_rules_are_token_level_and_block_verification_coin_by_coin(rule, dtype):
    rng = np.random.default_rng(4)
    num, width = 3000, 5
    p, q = random_distributions(rng, num, width + 1), random_distributions(rng, num, width)
    q = np.where(rng.random((num, 1, 1)) < 0.2, p[:, :-1], q)  # some with p == q
    ids = (q.cumsum(-1) < rng.random((num, width, 1)) * q.sum(-1, keepdims=True)).sum(-1)
    coins, gumbel = rng.random((num, width)), rng.gumbel(size=(num, VOCAB))
    lengths = rng.integers(0, width + 1, num)
    drafts = replace(
        DraftBatch.from_drafts(
            [Draft.chain(one[:n]) for one, n in zip(ids, lengths, strict=True)], "cpu"
        ),
        probs_BNV=torch.tensor(q, dtype=dtype),
        is_sampled_BN=torch.ones(num, width, dtype=torch.bool),
    )
    is_row_BN1 = torch.arange(width + 1) <= drafts.num_drafts_B[:, None]
    verify = reject_tokens if rule == "tokens" else traverse
    accept = getattr(verification, f"accept_{rule}")
    noise_BV = torch.tensor(gumbel, dtype=dtype)
    verdict = verify(
        torch.tensor(p, dtype=dtype).log()[is_row_BN1],
        drafts,
        torch.tensor(coins, dtype=dtype),
        lambda log_BV, *_: (log_BV + noise_BV).argmax(1),
    )
    num_wrong = 0
    for b in range(num):
        n = lengths[b]
        tau, weight = accept(p[b], q[b, :n], ids[b, :n], coins[b])
        last = verification.last_distribution(p[b], q[b, :n], tau, weight)
        with np.errstate(divide="ignore"):
            y = int((np.log(last) + gumbel[b]).argmax())
        if verdict.token_ids_BN1[b, : verdict.num_emitted_B[b]].tolist() == [*ids[b, :tau], y]:
            check_verdict(verdict, b, [*ids[b, :tau], y], range(tau))
        else:
            num_wrong += 1
    # Where p == q, float32 may find a residual of rounding errors; nothing else may differ.
    assert num_wrong <= (3 if dtype == torch.float32 else 0)
