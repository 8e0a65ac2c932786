"""Which graphs are made, and how long they are kept."""

from collections.abc import Callable
from typing import Generic, TypeVar, cast

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from outdraft.kernels.data.first_times import FirstTimes
from outdraft.kernels.data.graph_sizes import MOST_GRAPHS

Made = TypeVar("Made")
Kept = TypeVar("Kept")


class SecondTimes(Generic[Made]):
    """Things that are made when their kind comes again: what comes once costs nothing more."""

    def __init__(self, first_times: FirstTimes) -> None:
        """`first_times`: counts kinds that are new, and things that are made."""
        self._first_times = first_times
        self._made: dict[object, Made | None] = {}  # None: it came once

    @property
    def num_made(self) -> int:
        return sum(made is not None for made in self._made.values())

    def find(self, kind: object, make: Callable[[], Made]) -> Made | None:
        """That of a kind, which `make` makes the second time; None: the kind is new, or was when
        there were too many."""
        if kind not in self._made:
            if len(self._made) < MOST_GRAPHS:
                self._made[kind] = None
                self._first_times.number += 1
            return None
        made = self._made[kind]
        if made is None:
            made = self._made[kind] = make()
            self._first_times.number += 1
        return made


class OfCaches(Generic[Kept]):
    """Something for each cache that lives: graphs hold the addresses of the one they read."""

    def __init__(self, make: Callable[[], Kept]) -> None:
        self._make, self._by_keys = make, WeakIdKeyDictionary()

    def __len__(self) -> int:
        return len(self._by_keys)

    def of(self, keys_PSGC: Tensor) -> Kept:
        """`keys_PSGC`: of the cache's first layer."""
        if keys_PSGC not in self._by_keys:
            self._by_keys[keys_PSGC] = self._make()
        return cast(Kept, self._by_keys[keys_PSGC])
