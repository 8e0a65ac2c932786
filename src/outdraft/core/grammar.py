"""What the engine asks of the grammar that a request's output follows.

Dimension key: R rows of a draft with its root, W int32 words of a mask of one bit per token.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class GrammarMatcher(Protocol):
    """Where one sequence stands in its grammar. It depends on the sequence's output alone."""

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
            nothing may be emitted behind the token of an end in this step.
        """
        ...
