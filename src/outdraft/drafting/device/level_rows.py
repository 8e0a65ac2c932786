"""The rows that are chosen for a level of growing trees.

Dimension key: B requests, F new rows, K rows of a tree.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NewRows:
    """One level.

    Attributes:
        token_ids_BF: int64; any valid id where a request has no such row.
        origins_BF: int64, place of each row's parent in the level above.
    """

    token_ids_BF: Tensor
    origins_BF: Tensor

    def replaced_where(self, is_other_B1: Tensor, other: "NewRows") -> "NewRows":
        """The rows of `other` for the requests that are marked."""
        return NewRows(
            torch.where(is_other_B1, other.token_ids_BF, self.token_ids_BF),
            torch.where(is_other_B1, other.origins_BF, self.origins_BF),
        )


def join_levels(levels: Sequence[NewRows]) -> tuple[Tensor, Tensor]:
    """Token ids and parents, int64 [B, K], of rows that are numbered level after level."""
    parents: list[Tensor] = [levels[0].origins_BF]  # all of them the root, row 0
    first_above = 1
    for above, level in itertools.pairwise(levels):
        parents.append(level.origins_BF + first_above)
        first_above += above.token_ids_BF.shape[1]
    return torch.cat([level.token_ids_BF for level in levels], dim=1), torch.cat(parents, dim=1)
