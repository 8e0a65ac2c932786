"""How much of the text a draft found again, by every way to compute it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.core.draft import DraftAsk
from outdraft.kernels.ops import Kernels
from outdraft.kernels.torch.table import reference_kernels
from tests.kernels.tables import cpu_kernels

KERNELS = cpu_kernels()
both = pytest.mark.parametrize("kernels", [KERNELS, reference_kernels()], ids=["native", "slow"])
texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)


def ask(text: list[int]) -> DraftAsk:
    return DraftAsk("r", np.array(text, dtype=np.int32), 6)


def places_behind(texts: list[list[int]], end: list[int]) -> list[tuple[int, int]]:
    """Where texts go on behind an end, or end themselves: the text, and the next token's place."""
    return [
        (number, place)
        for number, text in enumerate(texts)
        for place in range(len(end), len(text) + 1)
        if text[place - len(end) : place] == end
    ]


@both
@settings(deadline=None)
@given(text=texts, max_n=st.integers(1, 5))
def test_of_prompt_lookup_it_is_the_longest_end_that_occurred(
    kernels: Kernels, text: list[int], max_n: int
):
    [draft] = kernels.ngram_texts(1, max_n, 1).draft([ask(text)])
    found = [n for n in range(1, max_n + 1) if len(places_behind([text], text[-n:])) > 1]
    assert draft.match_length == max(found, default=0)


@both
@settings(deadline=None)
@given(text=texts, finished=texts, depth=st.integers(2, 9))
def test_of_suffix_decoding_the_draft_follows_an_end_of_that_length_and_of_no_longer_one(
    kernels: Kernels, text: list[int], finished: list[int], depth: int
):
    ours = kernels.suffix_texts(depth, 4.0, 0.1, 1)
    ours.add_finished(np.array(finished, dtype=np.int32))
    ours.count_finished(len(finished))
    [draft] = ours.draft([ask(text)])
    length, known = draft.match_length, [text, finished]
    assert (length > 0) == (len(draft) > 0)
    if length == 0:
        return
    places = places_behind(known, text[-length:])
    followers = [known[n][at] for n, at in places if at < len(known[n])]
    assert draft.token_ids[0] in followers
    assert length < depth
    if length + 1 < min(depth, len(text) + 1):  # what one token more has behind it is less
        longer = places_behind(known, text[-length - 1 :])
        assert set(longer) < set(places)


def test_longer_matches_are_told_from_shorter_ones():
    texts = KERNELS.suffix_texts(24, 1.0, 0.1, 1)
    pattern = list(range(10, 18))
    lengths = [texts.draft([ask([*pattern, 5, *pattern[:n]])])[0].match_length for n in range(1, 8)]
    assert lengths == [1, 2, 3, 4, 5, 6, 7]
