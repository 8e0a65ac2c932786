"""A tree whose shape is fixed: which child of which row stands where, whatever the tokens are.

The notation is that of Medusa's `medusa_choices` and vLLM's `speculative_token_tree`: a list of
paths from the root, one per row. A path names the rank of a child at every level, 0 for the
likeliest: "[(0,), (1,), (0, 0), (0, 1)]".
"""

import ast
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeGuard

from outdraft.core.draft import MAX_DRAFTS
from outdraft.core.errors import ConfigError

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TreeTemplate:
    """The rows of a tree, level after level.

    Where drafts are drawn, the ranks of a row's children are the order in which they are drawn,
    without replacement.

    Attributes:
        paths: distinct, sorted by level, then by rank. All prefixes of a path are paths too, and
            so are all smaller ranks.

    Raises:
        ConfigError: they are not, or there are more than MAX_DRAFTS.
    """

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        known = set(self.paths)
        if not 1 <= len(self.paths) <= MAX_DRAFTS:
            raise ConfigError(
                f"speculative_token_tree must have 1 to {MAX_DRAFTS} paths, got {len(self.paths)}"
            )
        if len(known) < len(self.paths):
            twice = next(path for path, times in Counter(self.paths).items() if times > 1)
            raise ConfigError(f"speculative_token_tree names {twice} twice")
        for path in self.paths:
            _check_path(path, known)
        in_order = tuple(sorted(self.paths, key=lambda path: (len(path), path)))
        object.__setattr__(self, "paths", in_order)

    def with_depth(self, depth: int) -> "TreeTemplate":
        """Its first levels."""
        if depth == self.depth:
            return self
        return TreeTemplate(tuple(path for path in self.paths if len(path) <= depth))

    @classmethod
    def parse(cls, given: object) -> "TreeTemplate":
        """From configuration: a list of paths, or that as text.

        Raises:
            ConfigError: it is no list of lists of whole numbers, or no tree.
        """
        paths = given
        if isinstance(given, str):
            with suppress(ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
                paths = ast.literal_eval(given)
        if not _is_list(paths) or not all(map(_is_path, paths)):
            raise ConfigError(
                "speculative_token_tree must be a list of paths like "
                f"'[(0,), (1,), (0, 0)]', got {given!r}"
            )
        return cls(tuple(tuple(path) for path in paths))

    @property
    def num_rows(self) -> int:
        return len(self.paths)

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    @property
    def levels(self) -> tuple[int, ...]:
        """Rows of each level below the root."""
        sizes = Counter(map(len, self.paths))
        return tuple(sizes[level] for level in range(1, self.depth + 1))

    @property
    def origins(self) -> tuple[tuple[int, ...], ...]:
        """Per level, which row of the level above each row continues, counted from 0."""
        above: list[Path] = [()]
        origins: list[tuple[int, ...]] = []
        for level in range(1, self.depth + 1):
            rows = [path for path in self.paths if len(path) == level]
            origins.append(tuple(above.index(path[:-1]) for path in rows))
            above = rows
        return tuple(origins)

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Per level, the rank of each row among its siblings."""
        return tuple(
            tuple(path[-1] for path in self.paths if len(path) == level)
            for level in range(1, self.depth + 1)
        )


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)


def _is_path(value: object) -> bool:
    return _is_list(value) and all(type(rank) is int for rank in value)


def _check_path(path: Path, known: set[Path]) -> None:
    if not path:
        raise ConfigError("speculative_token_tree must not name the root, which has the path ()")
    *above, rank = path
    if rank < 0:
        raise ConfigError(f"ranks of speculative_token_tree start at 0, got {path}")
    if above and tuple(above) not in known:
        raise ConfigError(f"speculative_token_tree has {path} but not {tuple(above)} above it")
    if rank > 0 and (before := (*above, rank - 1)) not in known:
        raise ConfigError(f"speculative_token_tree has {path} but not {before} before it")
