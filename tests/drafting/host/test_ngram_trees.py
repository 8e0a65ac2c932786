"""Prompt lookup with branches against merged scans."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.config.speculation import NgramConfig
from outdraft.core.draft import MAX_DRAFTS, DraftAsk
from outdraft.drafting.proposers import NgramProposer
from outdraft.kernels.native.texts import NativeTexts
from outdraft.kernels.ops import Kernels
from outdraft.kernels.torch.table import reference_kernels
from tests.kernels.tables import cpu_kernels

KERNELS, REFERENCE = cpu_kernels(), reference_kernels()


def proposer(
    branching: int, min_n: int = 1, max_n: int = 3, kernels: Kernels = KERNELS
) -> NgramProposer:
    config = NgramConfig(prompt_lookup_min=min_n, prompt_lookup_max=max_n, branching=branching)
    return NgramProposer(config, kernels)


def ask(tokens: list[int], max_tokens: int = 4, request_id: str = "r") -> DraftAsk:
    return DraftAsk(request_id, np.array(tokens, np.int32), max_tokens)


def chunks(max_token: int):
    """A text in the pieces in which it grows."""
    tokens = st.integers(0, max_token)
    return st.lists(st.lists(tokens, min_size=0, max_size=7), min_size=1, max_size=12)


@settings(deadline=None)
@given(chunks(2), st.integers(1, 3), st.integers(0, 3), st.integers(1, 7), st.integers(1, 6))
def test_every_step_of_a_growing_text_drafts_the_merged_scans(
    pieces: list[list[int]], min_n: int, more_n: int, branching: int, max_tokens: int
) -> None:
    ours = proposer(branching, min_n, min_n + more_n)
    scan = proposer(branching, min_n, min_n + more_n, REFERENCE)
    text: list[int] = []
    for piece in pieces:
        text += piece
        assert ours.propose([ask(text, max_tokens)]) == scan.propose([ask(text, max_tokens)])


@settings(deadline=None)
@given(chunks(2), st.integers(1, 7))
def test_a_smaller_budget_drafts_the_first_rows_of_a_larger_one(
    pieces: list[list[int]], branching: int
) -> None:
    text = [token for piece in pieces for token in piece]
    [large] = proposer(branching).propose([ask(text, MAX_DRAFTS)])
    for max_tokens in range(1, 9):
        [small] = proposer(branching).propose([ask(text, max_tokens)])
        cut = large.truncated(max_tokens)
        assert (small.token_ids, small.parents) == (cut.token_ids, cut.parents)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), chunks(2), st.booleans()), max_size=12))
def test_a_batch_drafts_what_each_request_drafts_alone(
    events: list[tuple[int, list[list[int]], bool]],
) -> None:
    ours = proposer(3)
    texts: dict[str, list[int]] = {}
    alone: dict[str, NgramProposer] = {}
    for request, pieces, ends in events:
        name = str(request)
        texts.setdefault(name, []).extend(token for piece in pieces for token in piece)
        alone.setdefault(name, proposer(3))
        asks = [ask(text, 1 + int(other), other) for other, text in texts.items()]
        want = [alone[a.request_id].propose([a])[0] for a in asks]
        assert ours.propose(asks) == want
        if ends:
            ours.finish(name, None)
            del texts[name], alone[name]


def test_three_continuations_become_a_tree_with_the_most_frequent_first() -> None:
    to_be = [1, 2, 3]
    text = [*to_be, 7, 8, *to_be, 5, 6, *to_be, 7, 8, *to_be, 9, *to_be]
    [draft] = proposer(4).propose([ask(text, 6)])
    # [7, 8] twice, [9, 1] and [5, 6] once; half of the guesses are believed at first.
    assert draft.token_ids[:3] == (7, 8, 9)
    assert draft.parents[:3] == (0, 1, 0)
    assert draft.token_ids[3] == 5
    assert draft.score == pytest.approx(
        sum([1 / 4, 1 / 8, 1 / 8, 1 / 8, 1 / 16, 1 / 16]), abs=1e-12
    )


def test_a_single_continuation_is_a_chain_whatever_the_branching() -> None:
    [draft] = proposer(4).propose([ask([1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5, 8, 1, 2], 3)])
    assert draft.token_ids == (3, 4, 5)
    assert draft.is_chain


def test_a_branch_that_came_true_raises_the_score() -> None:
    text = [1, 2, 7, 1, 2, 8, 1, 2]
    for token, is_better in ((7, True), (8, True), (9, False)):
        ours = proposer(2, 2, 2)
        [first] = ours.propose([ask(text, 2)])
        assert set(first.token_ids) == {7, 8}
        [second] = ours.propose([ask([*text, token, 1, 2], 2)])
        assert (second.score > first.score) == is_better


def test_the_widest_and_longest_drafts_have_the_rows_of_a_mask() -> None:
    text = [token for i in range(80) for token in (1, 2, 100 + i)]
    [wide] = proposer(MAX_DRAFTS).propose([ask([*text, 1, 2], 1000)])
    assert len(wide) == MAX_DRAFTS
    assert wide.parents == (0,) * MAX_DRAFTS
    [deep] = proposer(MAX_DRAFTS).propose([ask(list(range(100)) * 3, 1000)])
    assert len(deep) == MAX_DRAFTS
    assert deep.is_chain


def test_a_long_text_of_many_tokens_drafts_the_merged_scans() -> None:
    rng = np.random.default_rng(0)
    phrases = [rng.integers(0, 50_000, 12).tolist() for _ in range(20)]
    text = [token for i in rng.integers(0, 20, 300) for token in phrases[i][: rng.integers(3, 12)]]
    ours, scan = proposer(4, 2, 5), proposer(4, 2, 5, REFERENCE)
    branched = 0
    for length in range(500, len(text), 31):
        [draft] = ours.propose([ask(text[:length], 8)])
        assert [draft] == scan.propose([ask(text[:length], 8)])
        branched += not draft.is_chain
    assert branched > 5


def test_a_request_that_is_named_twice_in_a_batch_is_served_twice() -> None:
    ours = proposer(1)
    ours.propose([ask([5, 6, 5])])
    drafts = ours.propose([ask([5, 6, 5, 6]), ask([1, 2, 1]), ask([1, 2, 1])])
    assert [draft.token_ids for draft in drafts] == [(5, 6), (2, 1), (2, 1)]


def test_a_finished_request_gives_its_memory_back() -> None:
    texts = KERNELS.ngram_texts(2, 5, 1)
    assert isinstance(texts, NativeTexts)
    for i in range(50):
        texts.draft([ask(list(range(1000)), request_id=str(i))])
        assert 1000 * 40 < texts.num_bytes < 1000 * 150
        texts.forget(str(i))
        assert texts.num_bytes == 0
    assert texts.draft([]) == []


@pytest.mark.parametrize("branching", [1, 3])
@pytest.mark.parametrize("pieces", [[13], [300, 7], [900, 1]])
def test_a_text_that_grows_by_leaps_drafts_the_merged_scans(
    branching: int, pieces: list[int]
) -> None:
    text = np.random.default_rng(0).integers(0, 40, 3000).tolist()
    ours, scan = proposer(branching, 2, 3), proposer(branching, 2, 3, REFERENCE)
    length = 0
    for piece in pieces * 300:
        length += piece
        assert ours.propose([ask(text[:length])]) == scan.propose([ask(text[:length])])
        if length >= len(text):
            break
