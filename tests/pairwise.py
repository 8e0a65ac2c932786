"""Parameters of tests where many axes meet: a small cover by default, the full product on request.

Most faults need one value, or two together. A pairwise cover is a part of all combinations in which
every two values that occur together in any of them still do. The other combinations are marked
`full` and run with `make test-full`. So are cases of a slow test that differ from a chosen one in
little.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest


def _values(*row: Hashable) -> Sequence[Hashable]:
    return row


def rows(
    product: Iterable[tuple[Hashable, ...]],
    features: Callable[..., Sequence[Hashable]] = _values,
) -> list[Any]:
    """pytest's parameters for every row of `product`; those outside of the cover have the marker.

    `features` gives what has to meet, for values that have parts: the cover then has every pair of
    features instead of every pair of values.
    """
    every = list(product)
    chosen = set(cover([features(*row) for row in every]))
    return [
        pytest.param(
            *row,
            id="-".join(str(value) for value in row),
            marks=() if index in chosen else pytest.mark.full,
        )
        for index, row in enumerate(every)
    ]


def some(every: Iterable[Hashable], chosen: Collection[Hashable]) -> list[Any]:
    """pytest's parameters for `every` value or tuple; those that are not chosen have the marker.

    Raises:
        AssertionError: a chosen one is none of them.
    """
    values = list(every)
    assert set(chosen) <= set(values), set(chosen) - set(values)
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in chosen else pytest.mark.full,
        )
        for value in values
    ]


def cover(features: Sequence[Sequence[Hashable]]) -> list[int]:
    """Indices of rows that together have every pair of features that any row has, in order.

    Greedy: each choice is the row with most pairs that no earlier choice has, the first of equals.
    """
    pairs_of = [set(combinations(enumerate(row), 2)) for row in features]
    missing = set().union(*pairs_of)
    chosen = []
    while missing:
        best = max(range(len(pairs_of)), key=lambda index: len(pairs_of[index] & missing))
        chosen.append(best)
        missing -= pairs_of[best]
    return sorted(chosen)
