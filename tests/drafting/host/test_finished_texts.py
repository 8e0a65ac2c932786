"""Finished texts against counting by scans, while they come and go."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from outdraft.config.speculation import SuffixConfig
from outdraft.core.draft import Draft, DraftAsk
from outdraft.drafting.proposers import LEARNED_PER_CALL, LEARNED_SHARE, SuffixProposer
from outdraft.kernels.native.texts import NativeSuffixTexts
from outdraft.kernels.ops import SuffixTexts
from outdraft.kernels.torch.table import reference_kernels
from tests.kernels.tables import cpu_kernels
from tests.reference.brute_suffix import speculate

KERNELS, REFERENCE = cpu_kernels(), reference_kernels()


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def add(one: SuffixTexts, tokens: list[int]) -> None:
    one.add_finished(array(tokens))
    assert one.count_finished(len(tokens)) == len(tokens)


def drafts(one: SuffixTexts, contexts: list[list[int]], max_tokens: int = 8) -> list[Draft]:
    asks = [DraftAsk(str(i), array(c), max_tokens) for i, c in enumerate(contexts)]
    made = one.draft(asks)
    for ask in asks:
        one.forget(ask.request_id)
    return made


def every_end(added: list[list[int]]) -> list[list[int]]:
    """What a text may end with that is in one of these."""
    return [text[max(0, end - 7) : end] for text in added for end in range(1, len(text) + 1)]


def texts(max_token: int, min_size: int = 0, max_size: int = 40):
    return st.lists(st.integers(0, max_token), min_size=min_size, max_size=max_size)


rules = st.tuples(
    st.integers(2, 9), st.sampled_from([0.0, 0.5, 1.0, 1.7, 4.0]), st.sampled_from([0, 0.1, 0.4, 1])
)


@settings(deadline=None, max_examples=150)
@given(st.lists(texts(2, 1, 12), min_size=1, max_size=5), texts(2), rules, st.integers(1, 6))
def test_finished_texts_draft_like_counting_in_those_that_are_kept(
    finished: list[list[int]], context: list[int], rule: tuple[int, float, float], max_tokens: int
) -> None:
    ours = KERNELS.suffix_texts(*rule, 1)
    kept: list[list[int]] = []
    for text in finished:
        if len(kept) == 3:
            assert ours.remove_finished(10**9) == len(kept.pop(0))
        add(ours, text)
        kept.append(text)
        [draft] = drafts(ours, [context], max_tokens)
        own = speculate(context, [context], max_tokens, *rule)
        other = speculate(list(context), kept, max_tokens, *rule)
        want = other if other[1] > own[1] else own
        assert (list(draft.token_ids), draft.score) == want


@settings(deadline=None)
@given(
    st.lists(texts(3, 1, 25), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(2, 7),
    st.integers(1, 3),
    st.booleans(),
)
def test_removing_a_text_leaves_what_the_others_alone_teach(
    added: list[list[int]], capacity: int, depth: int, branching: int, look: bool
) -> None:
    rule = depth, 2.0, 0.0, branching
    ours = KERNELS.suffix_texts(*rule)
    contexts = every_end(added)
    for i in range(len(added)):
        if i >= capacity:
            ours.remove_finished(10**9)
        add(ours, added[i])
        if look or i == len(added) - 1:  # what is found again after a removal has to last, too
            fresh = KERNELS.suffix_texts(*rule)
            for other in added[max(0, i + 1 - capacity) : i + 1]:
                add(fresh, other)
            assert drafts(ours, contexts) == drafts(fresh, contexts)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(texts(2, 1, 15), min_size=1, max_size=5),
    st.integers(2, 6),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
def test_texts_that_come_and_go_in_pieces_are_counted_like_whole_ones(
    added: list[list[int]], depth: int, pieces: list[int]
) -> None:
    both = [k.suffix_texts(depth, 2.0, 0.0, 2) for k in (KERNELS, REFERENCE)]
    sizes = iter(pieces * 100)
    contexts = every_end(added)[:10]
    for number, text in enumerate(added):
        for one in both:
            one.add_finished(array(text))
        coming = len(text)
        while coming:
            size = next(sizes)
            assert [one.count_finished(size) for one in both] == [min(size, coming)] * 2
            coming -= min(size, coming)
            found = [drafts(one, contexts) for one in both]
            if coming:  # it is not said which of the ends at the same places is told
                assert all(
                    one.match_length <= other.match_length
                    for one, other in zip(*found, strict=True)
                )
                found = [[structs.replace(one, match_length=0) for one in made] for made in found]
            assert found[0] == found[1]
        assert both[0].count_finished(9) == 0
        left = len(added[number - 1]) if number else 0
        while left:
            size = next(sizes)
            assert [one.remove_finished(size) for one in both] == [min(size, left)] * 2
            left -= min(size, left)
            assert drafts(both[0], contexts) == drafts(both[1], contexts)


def test_memory_stays_bounded_while_texts_come_and_go() -> None:
    rng = np.random.default_rng(0)
    ours = KERNELS.suffix_texts(12, 1.0, 0.1, 1)
    assert isinstance(ours, NativeSuffixTexts)
    for i in range(60):
        if i >= 4:
            ours.remove_finished(10**9)
        add(ours, rng.integers(0, 1 + i % 7 * 30, 700).tolist())
        if i == 30:
            num_bytes = ours.num_bytes
    assert ours.num_bytes <= num_bytes


def test_a_long_text_is_learned_a_bounded_number_of_tokens_a_call_and_whole() -> None:
    text = np.random.default_rng(0).integers(0, 30, 20_000).astype(np.int32)
    ours = SuffixProposer(SuffixConfig(), KERNELS)
    ours.finish("a", text)
    assert ours.num_to_learn == 20_000
    text_before = text.copy()
    text[:] = 0  # the caller's own array
    calls = 0
    while (left := ours.num_to_learn) > 0:
        ours.propose([])
        calls += 1
        assert 0 < left - ours.num_to_learn <= max(LEARNED_PER_CALL, left // LEARNED_SHARE)
    assert 20_000 / LEARNED_PER_CALL / 2 < calls <= 20_000 / LEARNED_PER_CALL + 1
    at_once = KERNELS.suffix_texts(24, 1.0, 0.1, 1)
    add(at_once, text_before.tolist())
    contexts = [text_before[end - 9 : end] for end in range(9, 20_000, 100)]
    asks = [DraftAsk(str(i), context, 8) for i, context in enumerate(contexts)]
    assert ours.propose(asks) == at_once.draft(asks)
    assert sum(map(len, at_once.draft(asks))) > 200
