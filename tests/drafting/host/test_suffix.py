"""Suffix decoding against counting by scans."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.config.speculation import SuffixConfig
from outdraft.core.draft import MAX_DRAFTS, Draft, DraftAsk, DraftSource
from outdraft.drafting.host_sources import HostProposer
from outdraft.drafting.proposers import LEARNED_PER_CALL, SuffixProposer
from outdraft.kernels.native.texts import NativeTexts
from outdraft.kernels.ops import Kernels
from outdraft.kernels.torch.table import reference_kernels
from tests.kernels.tables import cpu_kernels
from tests.reference.brute_suffix import speculate

KERNELS = cpu_kernels()
both = pytest.mark.parametrize(
    "kernels", [KERNELS, reference_kernels()], ids=["native", "reference"]
)


def proposer(
    depth: int = 24,
    factor: float = 1.0,
    min_prob: float = 0.1,
    requests: int = 3,
    kernels: Kernels = KERNELS,
) -> SuffixProposer:
    config = SuffixConfig(
        suffix_decoding_max_tree_depth=depth,
        suffix_decoding_max_cached_requests=requests,
        suffix_decoding_max_spec_factor=factor,
        suffix_decoding_min_token_prob=min_prob,
    )
    return SuffixProposer(config, kernels)


def ask(tokens: list[int], max_tokens: int = 8, request_id: str = "r") -> DraftAsk:
    return DraftAsk(request_id, np.array(tokens, np.int32), max_tokens)


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def learn_all(ours: SuffixProposer) -> None:
    while ours.num_to_learn:
        ours.propose([])


def texts(max_token: int, min_size: int = 0, max_size: int = 40):
    return st.lists(st.integers(0, max_token), min_size=min_size, max_size=max_size)


rules = st.tuples(
    st.integers(2, 9), st.sampled_from([0.0, 0.5, 1.0, 1.7, 4.0]), st.sampled_from([0, 0.1, 0.4, 1])
)


@pytest.mark.slow
@both
@settings(deadline=None)
@given(
    text=texts(2),
    steps=st.lists(st.integers(1, 9), max_size=8),
    rule=rules,
    max_tokens=st.integers(1, 6),
)
def test_every_step_of_a_growing_text_drafts_like_counting(
    kernels: Kernels,
    text: list[int],
    steps: list[int],
    rule: tuple[int, float, float],
    max_tokens: int,
) -> None:
    ours = proposer(*rule, kernels=kernels)
    length = 0
    for step in [*steps, *[1] * 10]:
        length += step
        context = text[:length]
        [draft] = ours.propose([ask(context, max_tokens)])
        tokens, score = speculate(context, [context], max_tokens, *rule)
        assert (list(draft.token_ids), draft.score) == (tokens, score)
        assert draft.is_chain


@pytest.mark.parametrize("max_token", [3, 50_000])
def test_a_text_takes_some_hundred_bytes_a_token_while_it_lives(max_token: int) -> None:
    texts = KERNELS.suffix_texts(24, 1.0, 0.1, 1)
    assert isinstance(texts, NativeTexts)
    before = texts.num_bytes
    texts.draft([ask(np.random.default_rng(0).integers(0, max_token, 20_000).tolist())])
    assert 40 * 20_000 < texts.num_bytes - before < 150 * 20_000
    texts.forget("r")
    assert texts.num_bytes == before


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [[1], [13], [300, 7], [900, 1], [*[1] * 49, 30]])
def test_a_long_text_of_few_tokens_drafts_like_counting(pieces: list[int]) -> None:
    text = np.random.default_rng(0).integers(0, 5, 1500).tolist()
    ours = proposer()
    length = 0
    for step, piece in enumerate(pieces * 1500):
        length += piece
        context = text[:length]
        [draft] = ours.propose([ask(context)])
        if step % 50 == 0 or len(pieces) > 1:
            want = speculate(context, [context], 8, 24, 1.0, 0.1)
            assert (list(draft.token_ids), draft.score) == want
        if length >= 1200:
            break


@pytest.mark.slow
def test_another_text_may_begin_at_any_length() -> None:
    rng = np.random.default_rng(0)
    for turn in (58, 200, 250):
        ours = proposer()
        for text, stop in ((rng.integers(0, 4, 300), turn), (rng.integers(0, 4, 700), 700)):
            tokens = text.tolist()
            for length in range(10, stop, 5):
                context = tokens[:length]
                [draft] = ours.propose([ask(context)])
                want = speculate(context, [context], 8, 24, 1.0, 0.1)
                assert (list(draft.token_ids), draft.score) == want


@both
@settings(deadline=None)
@given(events=st.lists(st.tuples(st.integers(0, 2), texts(2, 0, 6), st.booleans()), max_size=25))
def test_any_mixture_of_requests_drafts_the_better_of_own_and_finished_texts(
    kernels: Kernels, events: list[tuple[int, list[int], bool]]
) -> None:
    ours = proposer(depth=6, requests=2, kernels=kernels)
    live: dict[str, list[int]] = {}
    finished: list[list[int]] = []
    for request, piece, ends in events:
        name = str(request)
        live[name] = live.get(name, []) + piece
        drafts = ours.propose([ask(text, 5, other) for other, text in live.items()])
        for draft, text in zip(drafts, live.values(), strict=True):
            own = speculate(text, [text], 5, 6, 1.0, 0.1)
            other = speculate(list(text), finished, 5, 6, 1.0, 0.1)
            tokens, score = other if other[1] > own[1] else own
            assert (list(draft.token_ids), draft.score) == (tokens, score)
        if ends:
            text = live.pop(name)
            ours.finish(name, array(text))
            finished = ([*finished, text] if text else finished)[-2:]


@pytest.mark.slow
@settings(deadline=None)
@given(texts(2, 1), texts(2))
def test_a_text_that_is_no_continuation_is_read_from_its_start(
    old: list[int], other: list[int]
) -> None:
    ours = proposer()
    ours.propose([ask(old)])
    [draft] = ours.propose([ask(other)])
    if len(other) < len(old) or other[len(old) - 1] != old[-1]:
        assert list(draft.token_ids) == speculate(other, [other], 8, 24, 1.0, 0.1)[0]


def test_a_request_that_is_named_twice_in_a_batch_is_served_twice() -> None:
    ours = proposer()
    ours.propose([ask([5, 6, 5])])
    drafts = ours.propose([ask([5, 6, 5, 6]), ask([1, 2, 1]), ask([1, 2, 1])])
    for draft, text in zip(drafts, ([5, 6, 5, 6], [1, 2, 1], [1, 2, 1]), strict=True):
        assert list(draft.token_ids) == speculate(text, [text], 8, 24, 1.0, 0.1)[0] != []


def test_a_long_text_of_many_tokens_drafts_like_counting() -> None:
    rng = np.random.default_rng(0)
    phrases = [rng.integers(0, 50_000, 30).tolist() for _ in range(10)]
    text = [token for i in rng.integers(0, 10, 60) for token in phrases[i][: rng.integers(3, 30)]]
    ours, other = proposer(), proposer()
    other.finish("a", array(text[:500]))
    learn_all(other)
    for length in range(3, len(text), 23):
        context = text[:length]
        want = speculate(context, [context], 12, 24, 1.0, 0.1)
        [draft] = ours.propose([ask(context, 12)])
        assert (list(draft.token_ids), draft.score) == want
        [draft] = other.propose([ask(context, 12)])
        want = max(want, speculate(context, [text[:500]], 12, 24, 1.0, 0.1), key=lambda d: d[1])
        assert (list(draft.token_ids), draft.score) == want


def test_a_request_drafts_what_a_finished_one_said() -> None:
    ours = proposer()
    ours.finish("a", array([1, 2, 3, 4, 5, 6, 7, 8]))
    [draft] = ours.propose([ask([9, 2, 3, 4], request_id="b")])
    assert draft.token_ids == (5, 6, 7)
    assert draft.score == pytest.approx(1.5)  # seen once before: believed half


@pytest.mark.parametrize("token_ids", [None, array([])])
def test_a_request_that_is_not_to_be_shared_teaches_nothing(token_ids: np.ndarray | None) -> None:
    ours = proposer()
    ours.propose([ask([1, 2, 3, 4])])
    ours.finish("r", token_ids)
    assert ours.propose([ask([2, 3], request_id="b")]) == [Draft()]


def test_what_is_learned_of_a_text_is_drafted_from_before_the_rest_is() -> None:
    ours = proposer()
    ours.finish("a", np.arange(5000, dtype=np.int32))
    [draft] = ours.propose([ask([9, 10, 11])])
    assert draft.token_ids == (12, 13, 14)
    assert ours.propose([ask([4000, 4001], request_id="b")]) == [Draft()]
    learn_all(ours)
    [draft] = ours.propose([ask([4000, 4001], request_id="b")])
    assert draft.token_ids == (4002, 4003)


def test_room_for_a_text_is_made_a_bounded_number_of_tokens_a_call() -> None:
    ours = SuffixProposer(SuffixConfig(), KERNELS, max_cached_tokens=3000)
    for name, first in (("a", 0), ("b", 10_000)):
        ours.finish(name, np.arange(first, first + 3000, dtype=np.int32))
        calls = 0
        while ours.num_to_learn:
            ours.propose([])
            calls += 1
            assert ours.num_cached_tokens <= 3000
        assert calls >= (3000 if name == "a" else 6000) // LEARNED_PER_CALL
    drafts = ours.propose([ask([t], request_id=str(t)) for t in (2, 10_002)])
    assert [draft.token_ids for draft in drafts] == [(), (10_003,)]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 900), st.integers(0, 3)), max_size=12))
def test_of_texts_that_come_faster_than_they_are_learned_the_newest_are_kept(
    events: list[tuple[int, int]],
) -> None:
    ours = SuffixProposer(
        SuffixConfig(suffix_decoding_max_cached_requests=3), KERNELS, max_cached_tokens=1500
    )
    kept: list[list[int]] = []
    for i, (size, calls) in enumerate(events):
        text = [1000 * i + at for at in range(size)]
        ours.finish(str(i), array(text))
        kept.append(text)
        assert ours.num_to_learn <= 2 * 1500  # one in the tree, and those that wait
        for _ in range(calls):
            ours.propose([])
    learn_all(ours)
    while len(kept) > 3 or sum(map(len, kept)) > 1500:
        kept.pop(0)
    firsts = [1000 * i for i, _ in enumerate(events)]
    drafts = ours.propose([ask([first], request_id=str(first)) for first in firsts])
    newest = {text[0] for text in kept if len(text) > 1}
    known = {first for first, d in zip(firsts, drafts, strict=True) if len(d)}
    assert newest <= known  # an older one may have its place still where one between was too long
    assert len(known) <= 3
    assert sum(size for i, (size, _) in enumerate(events) if 1000 * i in known) <= 1500


def test_no_cached_requests_means_that_nothing_is_learned() -> None:
    ours = proposer(requests=0)
    ours.finish("a", array([1, 2, 3, 4]))
    assert ours.propose([ask([2, 3])]) == [Draft()]


def test_cached_tokens_are_bounded_whatever_the_number_of_requests() -> None:
    ours = SuffixProposer(SuffixConfig(), KERNELS, max_cached_tokens=10)
    ours.finish("a", array([1, 2, 3, 4, 5, 6]))
    ours.finish("b", array([11, 12, 13, 14, 15]))
    ours.finish("c", array(list(range(20, 31))))
    drafts = ours.propose([ask([t], request_id=str(t)) for t in (2, 12, 22)])
    assert [draft.token_ids for draft in drafts] == [(), (13,), ()]


def test_a_draft_never_exceeds_the_rows_of_a_mask() -> None:
    text = list(range(200)) * 2
    ours = proposer(depth=300)
    [draft] = ours.propose([ask(text, 1000)])
    assert len(draft) == MAX_DRAFTS
    ours.finish("r", array(text))
    [draft] = ours.propose([ask(text[:150], 1000)])
    assert len(draft) == MAX_DRAFTS


def test_it_is_a_host_proposer() -> None:
    ours: HostProposer = proposer()
    assert ours.source is DraftSource.SUFFIX
