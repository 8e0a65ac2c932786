"""Prompt lookup against a scan of lists."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.config.speculation import NgramConfig
from outdraft.core.draft import MAX_DRAFTS, Draft, DraftAsk, DraftSource
from outdraft.drafting.host_sources import HostProposer
from outdraft.drafting.proposers import NgramProposer
from outdraft.kernels.ops import Kernels
from outdraft.kernels.torch.table import reference_kernels
from tests.kernels.tables import cpu_kernels
from tests.reference.brute_ngram import BruteNgram, lookup

KERNELS = cpu_kernels()


def proposer(min_n: int = 1, max_n: int = 3, kernels: Kernels = KERNELS) -> NgramProposer:
    return NgramProposer(NgramConfig(prompt_lookup_min=min_n, prompt_lookup_max=max_n), kernels)


def ask(tokens: list[int], max_tokens: int = 4, request_id: str = "r") -> DraftAsk:
    return DraftAsk(request_id, np.array(tokens, np.int32), max_tokens)


def chunks(max_token: int):
    """A text in the pieces in which it grows."""
    tokens = st.integers(0, max_token)
    return st.lists(st.lists(tokens, min_size=0, max_size=7), min_size=1, max_size=12)


@pytest.mark.parametrize("kernels", [KERNELS, reference_kernels()], ids=["native", "reference"])
@settings(deadline=None)
@given(
    pieces=chunks(2),
    min_n=st.integers(1, 3),
    more_n=st.integers(0, 3),
    max_tokens=st.integers(1, 6),
)
def test_every_step_of_a_growing_text_drafts_and_scores_like_a_scan(
    kernels: Kernels, pieces: list[list[int]], min_n: int, more_n: int, max_tokens: int
) -> None:
    ours = proposer(min_n, min_n + more_n, kernels)
    brute = BruteNgram(min_n, min_n + more_n)
    text: list[int] = []
    for piece in pieces:
        text += piece
        [draft] = ours.propose([ask(text, max_tokens)])
        tokens, score = brute.propose(text, max_tokens)
        assert list(draft.token_ids) == tokens
        assert draft.is_chain
        assert draft.score == pytest.approx(score, abs=1e-12)


@settings(deadline=None)
@given(chunks(3), chunks(3))
def test_requests_in_one_batch_do_not_see_each_other(
    first: list[list[int]], second: list[list[int]]
) -> None:
    ours, alone = proposer(), {"a": proposer(), "b": proposer()}
    texts: dict[str, list[int]] = {"a": [], "b": []}
    for pieces in zip(first, second, strict=False):
        asks = []
        for name, piece in zip(texts, pieces, strict=True):
            texts[name] += piece
            asks.append(ask(texts[name], request_id=name))
        want = [alone[a.request_id].propose([a])[0] for a in asks]
        assert ours.propose(asks) == want


@settings(deadline=None)
@given(chunks(2), st.lists(st.integers(0, 2), max_size=20))
def test_a_text_that_is_no_continuation_is_looked_up_from_its_start(
    pieces: list[list[int]], other: list[int]
) -> None:
    ours = proposer()
    old: list[int] = []
    for piece in pieces:
        old += piece
        ours.propose([ask(old)])
    starts_anew = len(other) < len(old) or (old and other[len(old) - 1] != old[-1])
    [draft] = ours.propose([ask(other)])
    if starts_anew:
        assert list(draft.token_ids) == lookup(other, 1, 3, 4)[0]
    assert all(token in other for token in draft.token_ids)


def test_a_long_text_of_many_tokens_drafts_like_a_scan() -> None:
    rng = np.random.default_rng(0)
    phrases = [rng.integers(0, 50_000, 30).tolist() for _ in range(20)]
    text = [token for i in rng.integers(0, 20, 150) for token in phrases[i][: rng.integers(3, 30)]]
    ours = proposer(2, 5)
    for length in range(1000, len(text), 7):
        [draft] = ours.propose([ask(text[:length], 8)])
        assert list(draft.token_ids) == lookup(text[:length], 2, 5, 8)[0]


def test_the_newest_of_several_matches_is_copied() -> None:
    [draft] = proposer().propose([ask([1, 2, 8, 1, 2, 9, 1, 2], 2)])
    assert draft.token_ids == (9, 1)


def test_a_continuation_that_reaches_the_end_of_the_text_is_shorter() -> None:
    [draft] = proposer().propose([ask([7, 7, 7, 7], 5)])
    assert draft.token_ids == (7,)


def test_a_draft_never_exceeds_the_rows_of_a_mask() -> None:
    [draft] = proposer().propose([ask(list(range(100)) * 2, 1000)])
    assert len(draft) == MAX_DRAFTS


def test_success_raises_the_score_and_failure_lowers_it() -> None:
    right, wrong = proposer(), proposer()
    text = [*range(10), 0, 1, 2]
    [first] = right.propose([ask(text)])
    wrong.propose([ask(text)])
    [better] = right.propose([ask([*text, 3, 4])])
    [worse] = wrong.propose([ask([*text, 50, 0, 1, 2])])
    assert worse.score < first.score < better.score


def test_a_finished_request_leaves_nothing_behind() -> None:
    ours = proposer()
    text = [*range(10), 0, 1, 2]
    [fresh] = ours.propose([ask(text)])
    ours.propose([ask([*text, 3, 4])])
    ours.finish("r", np.array(text, np.int32))
    ours.finish("never seen", None)
    assert ours.propose([ask(text)]) == [fresh]
    assert ours.propose([ask([])]) == [Draft()]


def test_it_is_a_host_proposer() -> None:
    ours: HostProposer = proposer()
    assert ours.source is DraftSource.NGRAM
