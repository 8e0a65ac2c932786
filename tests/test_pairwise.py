"""A cover has every pair that the product has, in few rows."""

from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pairwise import cover, rows, some


def pairs(table: list[tuple[Any, ...]]) -> set[tuple[int, Any, int, Any]]:
    """Which value stands beside which, by places."""
    places = range(len(table[0]))
    return {(i, row[i], j, row[j]) for row in table for i, j in combinations(places, 2)}


@given(sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4), removed=st.sets(st.integers(0)))
def test_every_pair_that_occurs_is_covered(sizes: list[int], removed: set[int]):
    """Some combinations are impossible: the pairs that only they have are not asked for."""
    every = list(product(*(range(size) for size in sizes)))
    possible = [row for index, row in enumerate(every) if index not in removed] or every[:1]
    chosen = [possible[index] for index in cover(possible)]
    assert pairs(chosen) == pairs(possible)
    assert len(set(chosen)) == len(chosen)


@pytest.mark.parametrize(
    ("sizes", "most"), [((3, 3, 3), 12), ((2, 2, 2, 2), 7), ((10, 4, 3), 44), ((13, 10, 4, 3), 160)]
)
def test_a_cover_is_small(sizes: tuple[int, ...], most: int):
    """The product of the two longest axes is the least that there can be."""
    every = list(product(*(range(size) for size in sizes)))
    longest = sorted(sizes)[-2:]
    assert longest[0] * longest[1] <= len(cover(every)) <= most < len(every)


def test_parameters_are_the_whole_product_and_what_the_cover_leaves_out_is_marked():
    every = list(product(["one", "two"], "abc", [True, False]))
    found = rows(every)
    assert [one.values for one in found] == every
    assert [one.id for one in found][:2] == ["one-a-True", "one-a-False"]
    by_default = [one.values for one in found if not one.marks]
    assert pairs(by_default) == pairs(every)
    assert len(by_default) < len(every)
    assert {mark.name for one in found for mark in one.marks} == {"full"}


def test_features_let_the_parts_of_a_value_meet_instead_of_the_value():
    methods = ["one-tree", "one-chain", "two-tree", "two-chain"]
    found = rows(product(methods, "xyz"), lambda method, other: (*method.split("-"), other))
    kept = [one.values for one in found if not one.marks]
    assert {method for method, _ in kept} == set(methods)
    assert len(kept) == 6
    assert not any(one.marks for one in rows(product(methods, "xyz")))


def test_what_is_not_chosen_has_the_marker():
    pairs, single = some([("a", 1), ("b", None)], [("b", None)]), some(["a", "b"], ["a"])
    assert [param.values for param in pairs + single] == [("a", 1), ("b", None), ("a",), ("b",)]
    assert [bool(param.marks) for param in pairs + single] == [True, False, False, True]
    with pytest.raises(AssertionError, match="c"):
        some(["a", "b"], ["c"])
