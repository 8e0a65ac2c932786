"""Block hashes name exactly the prefixes that end with a block."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outdraft.kv.block_pool import extend_hashes

texts = st.lists(st.integers(0, 2), max_size=24)
sizes = st.integers(1, 5)


def hashes_of(text: list[int], size: int, num_tokens: int | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    length = len(text) if num_tokens is None else num_tokens
    extend_hashes(hashes, np.array(text, np.int32), size, length)
    return hashes


@given(texts, texts, sizes)
def test_two_blocks_have_one_name_exactly_if_all_tokens_up_to_them_agree(first, second, size):
    for i, one in enumerate(hashes_of(first, size)):
        for j, other in enumerate(hashes_of(second, size)):
            same = first[: (i + 1) * size] == second[: (j + 1) * size]
            assert (one == other) == same


@given(texts, sizes, st.data())
def test_hashing_as_the_text_grows_gives_the_hashes_of_the_whole(text, size, data):
    grown: list[bytes] = []
    length = 0
    while length < len(text):
        length = data.draw(st.integers(length + 1, len(text)))
        extend_hashes(grown, np.array(text[:length], np.int32), size, length)
    assert grown == hashes_of(text, size)


@given(texts, sizes, st.data())
def test_only_full_blocks_within_the_limit_are_hashed(text, size, data):
    limit = data.draw(st.integers(0, len(text)))
    assert hashes_of(text, size, limit) == hashes_of(text, size)[: limit // size]


@given(texts, texts, sizes)
def test_two_blocks_have_one_name_exactly_if_the_texts_up_to_their_ends_are_one(
    first, second, size
):
    for i, one in enumerate(hashes_of(first, size)):
        for j, other in enumerate(hashes_of(second, size)):
            assert (one == other) == (first[: (i + 1) * size] == second[: (j + 1) * size])


@given(texts, texts, sizes, st.sampled_from([b"a" * 32, b"b" * 32]))
def test_texts_of_different_salts_share_no_name(first, second, size, salt):
    salted: list[bytes] = []
    extend_hashes(salted, np.array(first, np.int32), size, len(first), salt=salt)
    assert len(salted) == len(first) // size
    others: list[bytes] = []
    extend_hashes(others, np.array(second, np.int32), size, len(second), salt=b"c" * 32)
    assert not set(salted) & {*others, *hashes_of(second, size)}


def test_more_hashes_than_the_limit_covers_are_kept():
    hashes = hashes_of([1] * 8, 2)
    kept = list(hashes)
    extend_hashes(hashes, np.ones(8, np.int32), 2, 4)
    assert hashes == kept


def test_large_token_ids_are_told_apart():
    assert hashes_of([100_000], 1) != hashes_of([100_000 + 2**16], 1)
