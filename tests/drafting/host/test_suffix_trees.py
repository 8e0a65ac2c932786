"""Suffix decoding with branches against counting by scans."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.config.speculation import SuffixConfig
from outdraft.core.draft import MAX_DRAFTS, DraftAsk
from outdraft.drafting.proposers import SuffixProposer
from outdraft.kernels.ops import Kernels
from outdraft.kernels.torch.table import reference_kernels
from tests.kernels.tables import cpu_kernels

KERNELS, REFERENCE = cpu_kernels(), reference_kernels()

Rule = tuple[int, float, float, int]  # depth, factor, least probability, branching

rules = st.tuples(
    st.integers(2, 9),
    st.sampled_from([0.5, 1.0, 1.7, 4.0]),
    st.sampled_from([0, 0.1, 0.4, 1]),
    st.integers(1, 4),
)


def proposer(rule: Rule, requests: int = 3, kernels: Kernels = KERNELS) -> SuffixProposer:
    depth, factor, min_prob, branching = rule
    config = SuffixConfig(
        suffix_decoding_max_tree_depth=depth,
        suffix_decoding_max_cached_requests=requests,
        suffix_decoding_max_spec_factor=factor,
        suffix_decoding_min_token_prob=min_prob,
        branching=branching,
    )
    return SuffixProposer(config, kernels)


def ask(tokens: list[int], max_tokens: int = 8, request_id: str = "r") -> DraftAsk:
    return DraftAsk(request_id, np.array(tokens, np.int32), max_tokens)


def learn_all(ours: SuffixProposer) -> None:
    while ours.num_to_learn:
        ours.propose([])


def texts(max_token: int, min_size: int = 0, max_size: int = 40):
    return st.lists(st.integers(0, max_token), min_size=min_size, max_size=max_size)


@settings(deadline=None)
@given(texts(2), st.lists(st.integers(1, 9), max_size=8), rules, st.integers(1, 8))
def test_every_step_of_a_growing_text_drafts_the_counted_tree(
    text: list[int], steps: list[int], rule: Rule, max_tokens: int
) -> None:
    ours, counted = proposer(rule), proposer(rule, kernels=REFERENCE)
    length = 0
    for step in [*steps, *[1] * 5]:
        length += step
        asks = [ask(text[:length], max_tokens)]
        assert ours.propose(asks) == counted.propose(asks)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), texts(2, 0, 6), st.booleans()), max_size=16),
    rules,
)
def test_a_batch_drafts_the_better_tree_of_own_and_finished_texts(
    events: list[tuple[int, list[int], bool]], rule: Rule
) -> None:
    ours, counted = proposer(rule, 2), proposer(rule, 2, REFERENCE)
    live: dict[str, list[int]] = {}
    for request, piece, ends in events:
        name = str(request)
        live[name] = live.get(name, []) + piece
        asks = [ask(text, 5, other) for other, text in live.items()]
        assert ours.propose(asks) == counted.propose(asks)
        if ends:
            text = np.array(live.pop(name), np.int32)
            for one in (ours, counted):
                one.finish(name, text)


@settings(deadline=None)
@given(texts(2), rules)
def test_rows_are_in_the_order_of_their_probability_and_a_smaller_budget_cuts_them(
    text: list[int], rule: Rule
) -> None:
    [large] = proposer(rule).propose([ask(text, MAX_DRAFTS)])
    for num_tokens in range(len(large) + 1):
        cut = large.truncated(num_tokens)
        assert (len(cut), cut.parents) == (num_tokens, large.parents[:num_tokens])
    scores = [proposer(rule).propose([ask(text, n)])[0].score for n in range(1, 7)]
    gains = np.diff(scores)
    assert (gains >= -1e-12).all()  # more rows are never expected to bring less


def test_a_second_continuation_is_a_branch_and_a_rare_one_is_left_out() -> None:
    a, b, c = [1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 3, 9]
    text = [*a, *b, *a, *b, *a, *a, *c, *a, *b, 1, 2, 3]
    [draft] = proposer((6, 1.0, 0.2, 4)).propose([ask(text, 8)])
    # After [1, 2, 3]: [4, 5, 6] five times in ten occurrences, [7, 8] three times, [9] once.
    assert draft.token_ids == (4, 5, 6, 7, 8, 1)
    assert draft.parents == (0, 1, 2, 0, 4, 5)
    assert draft.score == pytest.approx(3 * 5 / 10 + 3 * 3 / 10)
    [chain] = proposer((6, 1.0, 0.2, 1)).propose([ask(text, 8)])
    assert chain.token_ids == (4, 5, 6)
    assert chain.is_chain


def test_finished_texts_that_part_are_branches() -> None:
    ours = proposer((24, 1.0, 0.1, 2))
    for i, text in enumerate(([1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 7, 8])):
        ours.finish(str(i), np.array(text, np.int32))
    learn_all(ours)
    [draft] = ours.propose([ask([1, 2], request_id="b")])
    assert draft.token_ids == (7, 8, 5, 6)  # the latest first, two of three
    assert draft.parents == (0, 1, 0, 3)
    assert draft.score == pytest.approx(1.0)


def test_the_largest_tree_has_the_rows_of_a_mask() -> None:
    text = [token for i in range(80) for token in (1, 2, 100 + i)]
    ours = proposer((24, 1.0, 0.0, MAX_DRAFTS))
    for name in "ab":
        [draft] = ours.propose([ask([*text, 1, 2], 1000, name)])
        assert len(draft) == MAX_DRAFTS
        assert draft.parents.count(0) > 20
        ours.finish(name, np.array(text, np.int32))
        learn_all(ours)


def test_a_long_text_of_many_tokens_drafts_the_counted_trees() -> None:
    rng = np.random.default_rng(0)
    phrases = [rng.integers(0, 50_000, 12).tolist() for _ in range(8)]
    text = [token for i in rng.integers(0, 8, 60) for token in phrases[i][: rng.integers(3, 12)]]
    rule = (24, 1.0, 0.1, 4)
    ours, counted = proposer(rule), proposer(rule, kernels=REFERENCE)
    branched = 0
    for length in range(100, len(text), 29):
        [draft] = ours.propose([ask(text[:length], 8)])
        assert [draft] == counted.propose([ask(text[:length], 8)])
        branched += not draft.is_chain
    assert branched > 2
