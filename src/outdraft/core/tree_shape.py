"""How many drafts stand at each level of a tree."""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from outdraft.core.draft import MAX_DRAFTS
from outdraft.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Rows of each level below the root; which row continues which is decided while drafting."""

    levels: tuple[int, ...]  # at least one row each, at most MAX_DRAFTS together

    def __post_init__(self) -> None:
        if not self.levels or any(rows < 1 for rows in self.levels):
            raise ConfigError(f"tree_levels must name at least one row a level, got {self.levels}")
        if self.num_rows > MAX_DRAFTS:
            raise ConfigError(f"a tree has at most {MAX_DRAFTS} rows, got {self.num_rows}")

    @property
    def num_rows(self) -> int:
        return sum(self.levels)

    @property
    def depth(self) -> int:
        return len(self.levels)

    @property
    def is_chain(self) -> bool:
        """Every row continues the one before it."""
        return self.depth == self.num_rows

    def with_room_for(self, num_rows: int) -> "TreeShape":
        """Its first levels, as few as have so many rows; all of them if none have."""
        ends = list(accumulate(self.levels))
        depth = 1 + bisect_left(ends, num_rows)
        return self if depth >= self.depth else TreeShape(self.levels[:depth])

    @classmethod
    def chain(cls, num_rows: int) -> "TreeShape":
        """One row a level."""
        return cls((1,) * num_rows)

    @classmethod
    def of_levels(cls, levels: Any) -> "TreeShape":
        """From configuration. Raises ConfigError if it is no list of whole numbers."""
        is_list = isinstance(levels, list | tuple)
        if not is_list or any(type(number) is not int for number in levels):
            raise ConfigError(f"tree_levels must be a list of whole numbers, got {levels!r}")
        return cls(tuple(levels))
