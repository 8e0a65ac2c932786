"""Grammars: the interface of a matcher, and the masks of a step.

The runner reports what the network drafted, which the scheduler needs for the masks of these rows.
Both cross between processes: they are numbers and arrays only.

Dimension key: B requests that sample, N drafts of one, R rows whose logits are needed, W int32
words of a mask of one bit per token, E ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class GrammarDrafts:
    """The drafts that a step verifies, as far as the plan does not have them.

    Attributes:
        num_drafts: rows of each request that samples; a live rule may have left out some.
        drafts_2BN: int64, ids and parents; a draft that a live rule ended is padded with the id -1.
            None: no grammar needs them, as the network drafted for no request with one.
    """

    num_drafts: tuple[int, ...]
    drafts_2BN: np.ndarray | None


@dataclass(frozen=True, slots=True, eq=False)
class AllowedTokens:
    """The tokens that the grammars of a step allow.

    Attributes:
        masks_RW: int32; bit v % 32 of word v // 32 stands for token v. All ones in the rows of
            requests without a grammar.
        ends_2E: int64; places (request, draft) of drafts after which nothing may be emitted, as
            no mask can say that.
    """

    masks_RW: np.ndarray
    ends_2E: np.ndarray


class GrammarMatcher(Protocol):
    """The state of one sequence in its grammar. It depends on the sequence's output alone."""

    @property
    def is_finished(self) -> bool:
        """The output is complete, and nothing can follow."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the output cannot keep to the grammar any longer: it has become too complex, takes
        too much time, or offers no token. Then no token may be added; None: it can."""
        ...

    def advance(self, token_id: int) -> None:
        """The next token of the output."""
        ...

    def fill_masks(
        self, token_ids: Sequence[int], parents: Sequence[int], masks_RW: np.ndarray
    ) -> Sequence[int]:
        """Write which tokens may follow the root and every row of a draft, int32 [1 + N, W].

        `token_ids` and `parents` are as in Draft. Bit v % 32 of word v // 32 stands for token v.
        Rows that cannot be reached hold anything but zeros.

        Returns:
            The ends, rows of 1 to N. They can be reached, but nothing is known that may follow
            them: the output is complete there, or the grammar is too complex from there on. So
            nothing may be emitted after the token of an end in this step.
        """
        ...
