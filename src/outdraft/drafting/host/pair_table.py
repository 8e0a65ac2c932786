# pyright: reportReturnType=false
# numba makes Python's numbers of what the stubs call arrays.
"""Finds the record with a given pair of numbers: an open-addressing hash table for numba kernels.

Records are rows of an array that the caller owns; columns 0 and 1 of a row are its key. The
table itself holds row numbers only, 4 bytes a place, with linear probing. Removal leaves no
tombstones, so the table stays as fast after a million removals as it was.

Dimension key: S places, a power of two; R records.
"""

import numpy as np

from outdraft.core.jit import njit

EMPTY = -1


def table_for(num_records: int) -> np.ndarray:
    """An empty table, int32 [S], at most two thirds full with this many records."""
    places = 16
    while places * 2 < num_records * 3:
        places *= 2
    return np.full(places, EMPTY, np.int32)


@njit(cache=True)
def home(first: int, second: int, num_places: int) -> int:
    """Where a pair should stand; both numbers mix into all bits by wrapping products."""
    mixed = first * 0x1E3779B97F4A7C15 + second * 0x3F58476D1CE4E5B9
    mixed ^= mixed >> 29
    mixed *= 0x14D049BB133111EB
    mixed ^= mixed >> 32
    return mixed & (num_places - 1)


@njit(cache=True)
def place_of(table_S: np.ndarray, records: np.ndarray, first: int, second: int) -> int:
    """The place that holds the record with this pair, or -1."""
    place = home(first, second, len(table_S))
    while table_S[place] != EMPTY:
        row = table_S[place]
        if records[row, 0] == first and records[row, 1] == second:
            return place
        place = (place + 1) & (len(table_S) - 1)
    return -1


@njit(cache=True)
def find(table_S: np.ndarray, records: np.ndarray, first: int, second: int) -> int:
    """The row of the record with this pair, or -1."""
    place = place_of(table_S, records, first, second)
    return -1 if place < 0 else table_S[place]


@njit(cache=True)
def put(table_S: np.ndarray, records: np.ndarray, row: int) -> None:
    """Add a record whose pair is not in the table yet; the caller sees to it that there is room."""
    place = home(records[row, 0], records[row, 1], len(table_S))
    while table_S[place] != EMPTY:
        place = (place + 1) & (len(table_S) - 1)
    table_S[place] = row


@njit(cache=True)
def remove(table_S: np.ndarray, records: np.ndarray, place: int) -> None:
    """Empty a place, and move up the records behind it that may now stand nearer to home."""
    mask = len(table_S) - 1
    hole = place
    after = (place + 1) & mask
    while table_S[after] != EMPTY:
        row = table_S[after]
        wanted = home(records[row, 0], records[row, 1], len(table_S))
        if (after - wanted) & mask >= (after - hole) & mask:
            table_S[hole] = row
            hole = after
        after = (after + 1) & mask
    table_S[hole] = EMPTY


@njit(cache=True)
def put_all(table_S: np.ndarray, records: np.ndarray, start: int, stop: int) -> None:
    """Add the records of rows [start, stop) that are in use: those whose first number is >= 0."""
    for row in range(start, stop):
        if records[row, 0] >= 0:
            put(table_S, records, row)
