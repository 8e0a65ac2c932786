"""A draft: a tree of tokens that the target may go on with, and its shape.

Dimension key: K drafted tokens of one request.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from operator import gt
from typing import Any

import numpy as np
from msgspec import Struct

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
        """Its fewest first levels with at least num_rows rows; all levels if it has fewer rows."""
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


MAX_DRAFTS = 63  # rows of a draft fit in the bits of one int64 ancestor mask
MAX_MARGIN = 10.0  # between two logits; wider ones count as this

# Newest tokens of a text whose states of the target are kept for a network that reads them. A step
# settles MAX_DRAFTS + 1 of a text at most, and all of them must find room; a window of two such
# steps always holds more than one. With 16 states EAGLE-3 accepts 90 % of what it accepts
# with the whole text (docs/log/2026-11.md).
STATE_WINDOW = 2 * (MAX_DRAFTS + 1)

HEAD_WINDOW = 1  # states of a text that heads draft with: the newest one


class DraftSource(StrEnum):
    """The source of a drafted token."""

    PREDICTION = "prediction"
    SUFFIX = "suffix"
    NGRAM = "ngram"
    MODEL = "draft_model"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MEDUSA = "medusa"
    MLP = "mlp_speculator"
    DFLASH = "dflash"
    DSPARK = "dspark"
    MTP = "mtp"
    SELF = "self"


class Draft(Struct, array_like=True, frozen=True):
    """A token tree in topological order.

    Row 0 is the last committed token; row i + 1 is token_ids[i]. parents[i] is the row that
    token_ids[i] continues, so a chain has parents (0, 1, 2, ...) and no draft at all is Draft().
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    score: float = 0.0  # expected number of accepted tokens, as estimated by the proposer
    match_length: int = 0  # tokens of the text that the proposer found again

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.parents):
            raise ValueError(f"{len(self.token_ids)} tokens but {len(self.parents)} parents")
        if len(self.token_ids) > MAX_DRAFTS:
            raise ValueError(f"a draft has at most {MAX_DRAFTS} rows, got {len(self.token_ids)}")
        parents = self.parents
        if parents and (min(parents) < 0 or any(map(gt, parents, range(len(parents))))):
            raise ValueError(f"parents must point to an earlier row, got {self.parents}")

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def chain(cls, token_ids: Iterable[int], score: float = 0.0) -> "Draft":
        """A tree without branches."""
        ids = tuple(int(token) for token in token_ids)
        return cls(ids, tuple(range(len(ids))), score)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(len(self.parents)))

    def truncated(self, num_tokens: int) -> "Draft":
        """The first rows; a prefix of a topological order is a tree again."""
        if len(self) <= num_tokens:
            return self
        score = min(self.score, num_tokens)  # what is cut off cannot be accepted
        token_ids, parents = self.token_ids[:num_tokens], self.parents[:num_tokens]
        return Draft(token_ids, parents, score, self.match_length)

    def level_sizes(self) -> tuple[int, ...]:
        """Rows of each level."""
        depths = depths_of(self.parents)
        return tuple(depths.count(level) for level in range(1, max(depths, default=0) + 1))

    def first_levels(self, num_levels: int) -> "Draft":
        """The rows that are no deeper."""
        if self.is_chain:
            return self.truncated(num_levels)
        kept = [row for row, depth in enumerate(depths_of(self.parents), 1) if depth <= num_levels]
        if len(kept) == len(self):
            return self
        places = {0: 0, **{row: place for place, row in enumerate(kept, 1)}}
        return Draft(
            tuple(self.token_ids[row - 1] for row in kept),
            tuple(places[self.parents[row - 1]] for row in kept),
            min(self.score, num_levels),
            self.match_length,
        )


def depths_of(parents: Iterable[int]) -> list[int]:
    """The level of each row; 1: it continues the text."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths[1:]


class DraftAsk(Struct, frozen=True):
    """One request that would like a draft. Read-only: proposers change no state but their own.

    Attributes:
        request_id: stable while the request lives.
        token_ids: int32 [num_tokens], prompt and output so far, newest last; a view, not to be
            kept across calls.
        max_tokens: rows that the scheduler can afford, at least 1.
        num_prompt: number of prompt tokens.
        prediction: int32 [num_tokens], the output that the client expects; None: unknown.
    """

    request_id: str
    token_ids: np.ndarray
    max_tokens: int
    num_prompt: int = 0
    prediction: np.ndarray | None = None
