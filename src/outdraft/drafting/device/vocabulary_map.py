"""Which ids of a target's and of a drafter's vocabulary are the same token.

Dimension key: V the target's vocabulary, U the drafter's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class VocabularyMap:
    """The tokens that two vocabularies share, one to one, and how to read those they do not.

    Both sizes are those of the networks, which may have more ids than there are tokens.

    Attributes:
        target_to_draft_V: int64; the same token where it is shared, else a token that the drafter
            reads in place of it.
        draft_to_target_U: int64; -1: the target has no such token.
        num_target_tokens, num_draft_tokens: ids that stand for something.
    """

    target_to_draft_V: Tensor
    draft_to_target_U: Tensor
    num_target_tokens: int
    num_draft_tokens: int

    @property
    def is_shared_V(self) -> Tensor:
        """bool; the drafter can draft these of the target's ids."""
        ids_V = torch.arange(len(self.target_to_draft_V), device=self.target_to_draft_V.device)
        return self.draft_to_target_U[self.target_to_draft_V] == ids_V

    @property
    def num_shared(self) -> int:
        return int((self.draft_to_target_U >= 0).sum())

    @property
    def target_share(self) -> float:
        """Share of the target's tokens that the drafter knows."""
        return self.num_shared / max(1, self.num_target_tokens)

    @property
    def draft_share(self) -> float:
        """Share of the drafter's tokens that the target knows."""
        return self.num_shared / max(1, self.num_draft_tokens)

    def __str__(self) -> str:
        return (
            f"{self.num_shared:,} of {self.num_target_tokens:,} ids ({self.target_share:.1%}) of "
            f"the target's vocabulary, {self.draft_share:.1%} of its own"
        )
