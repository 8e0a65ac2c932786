"""Which graphs are made, and how long they are kept."""

import logging
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from outdraft.kernels.data.first_times import FirstTimes
from outdraft.kernels.data.graph_sizes import MOST_GRAPHS

Made = TypeVar("Made")
Kept = TypeVar("Kept")
_logger = logging.getLogger(__name__)


class MadeGraphs(Generic[Made]):
    """Graphs by what they launch and for which sizes.

    What is launched for the first time compiles kernels and allocates what libraries need, and so
    becomes no graph. Later each new size of it becomes one at once: to make it takes about as long
    as its launches would.
    """

    def __init__(self, first_times: FirstTimes) -> None:
        """`first_times`: counts first launches, and graphs that are made."""
        self._first_times = first_times
        self._launched = set[object]()
        self._made: dict[object, Made] = {}
        self._is_full = False  # and that was said

    def find(self, launches: object, sizes: object, make: Callable[[], Made]) -> Made | None:
        """The graph, which `make` makes; None: the launches are new, or there are too many graphs.

        Args:
            launches: what is the same if the same kernels are launched.
            sizes: what all calls of a graph have in common besides.
        """
        if launches not in self._launched:
            self._launched.add(launches)
            self._first_times.number += 1
            return None
        kind = launches, sizes
        if kind not in self._made:
            if len(self._made) >= MOST_GRAPHS:
                if not self._is_full:
                    self._is_full = True
                    _logger.warning(
                        "%d graphs are made: steps of other sizes launch kernel by kernel from now "
                        "on, which takes longer",
                        MOST_GRAPHS,
                    )
                return None
            self._made[kind] = make()
            self._first_times.number += 1
        return self._made[kind]


class OfCaches(Generic[Kept]):
    """Something for each cache that lives: graphs hold the addresses of the one they read."""

    def __init__(self, make: Callable[[], Kept]) -> None:
        self._make, self._by_keys = make, WeakIdKeyDictionary()

    def of(self, keys_PSGC: Tensor) -> Kept:
        """`keys_PSGC`: of the cache's first layer."""
        if keys_PSGC not in self._by_keys:
            self._by_keys[keys_PSGC] = self._make()
        return cast(Kept, self._by_keys[keys_PSGC])
