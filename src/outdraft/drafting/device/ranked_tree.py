"""Trees of the likeliest tokens, for requests whose drafts are deterministic.

Comparing such a tree with the target's own choices is exact, however the tree was chosen. Here it
is chosen for the largest expected number of accepted rows. A row's weight is the probability of its
path under the drafter.

Dimension key: B requests, E nodes of the level above (1: the root), F new rows, C ranks of a
node's children, P candidates, K rows of a tree, V vocabulary.
"""

import itertools

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.tree_template import TreeTemplate
from outdraft.drafting.device.tree_level import NewRows, at_places, best_places, likeliest_children

Levels = tuple[tuple[int, ...], ...]  # a number for each row of each level

_FEWEST_CANDIDATES = 8  # children of a node that are considered at all


class BestFirstTrees:
    """Keeps the K best of all candidates; EAGLE-2 (Li et al. 2024, arXiv 2406.16858).

    Every node of a level proposes its likeliest children, and the best of these become the next
    level. In the end the K candidates of the largest weight are kept, whatever their level: their
    ancestors weigh no less, and so are among them.
    """

    def __init__(self, levels: tuple[int, ...]) -> None:
        self._levels = levels
        self._token_ids: list[Tensor] = []
        self._parents: list[Tensor] = []  # candidates, counted from 1; 0: the root
        self._weights: list[Tensor] = []
        self._num_candidates = 0

    def start(self, logits_BV: Tensor) -> NewRows:
        """The first level."""
        roots_B1 = logits_BV.new_zeros(len(logits_BV), 1, dtype=torch.int64)
        self._node_BE = roots_B1
        self._weight_BE = torch.ones_like(roots_B1, dtype=torch.float32)
        return self.extend(logits_BV[:, None])

    def extend(self, logits_BEV: Tensor) -> NewRows:
        """The next level, behind the nodes that the last one chose."""
        num_rows = self._levels[len(self._token_ids)]
        children = likeliest_children(logits_BEV, max(num_rows, _FEWEST_CANDIDATES))
        weights_BP = (self._weight_BE[:, :, None] * children.probs_BEC).flatten(1)
        token_ids_BP = children.token_ids_BEC.flatten(1)
        num_ranks = children.probs_BEC.shape[2]
        self._token_ids.append(token_ids_BP)
        self._weights.append(weights_BP)
        self._parents.append(self._node_BE.repeat_interleave(num_ranks, dim=1))
        places_BF = best_places(weights_BP, num_rows)
        self._node_BE = places_BF + (1 + self._num_candidates)
        self._weight_BE = weights_BP.gather(1, places_BF)
        self._num_candidates += weights_BP.shape[1]
        return NewRows(token_ids_BP.gather(1, places_BF), places_BF // num_ranks)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Token ids and parents, int64 [B, K], the best rows first."""
        # The first of equal weights is taken: a parent stands before its children.
        kept_BK = best_places(torch.cat(self._weights, dim=1), sum(self._levels))
        parents_BK = torch.cat(self._parents, dim=1).gather(1, kept_BK)
        row_BP1 = kept_BK.new_zeros(len(kept_BK), self._num_candidates + 1)
        rows_K = torch.arange(1, kept_BK.shape[1] + 1, device=kept_BK.device)
        row_BP1.scatter_(1, kept_BK + 1, rows_K.expand_as(kept_BK))
        token_ids_BK = torch.cat(self._token_ids, dim=1).gather(1, kept_BK)
        return token_ids_BK, row_BP1.gather(1, parents_BK)


class TemplateTrees:
    """Fills a fixed shape with the tokens of each row's rank."""

    def __init__(self, template: TreeTemplate, device: torch.device) -> None:
        self._most_children = [max(ranks) + 1 for ranks in template.ranks]
        self._origins, self._ranks = level_tensors(template.origins, template.ranks, device)
        self._rows: list[NewRows] = []

    def start(self, logits_BV: Tensor) -> NewRows:
        """The first level."""
        return self.extend(logits_BV[:, None])

    def extend(self, logits_BEV: Tensor) -> NewRows:
        """The next level, behind the nodes of the last one."""
        level = len(self._rows)
        origins_BF = self._origins[level].expand(len(logits_BEV), -1)
        ranks_BF = self._ranks[level].expand(len(logits_BEV), -1)
        children = likeliest_children(logits_BEV, self._most_children[level])
        rows = NewRows(at_places(children.token_ids_BEC, origins_BF, ranks_BF), origins_BF)
        self._rows.append(rows)
        return rows

    def finish(self) -> tuple[Tensor, Tensor]:
        """Token ids and parents, int64 [B, K], level after level."""
        return join_levels(self._rows)


def level_tensors(
    origins: Levels, ranks: Levels, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """The same as int64 tensors [F], in one copy."""
    sent = to_device([np.array(level) for level in (*origins, *ranks)], device)
    return sent[: len(origins)], sent[len(origins) :]


def join_levels(levels: list[NewRows]) -> tuple[Tensor, Tensor]:
    """Token ids and parents, int64 [B, K], of rows that are numbered level after level."""
    parents: list[Tensor] = [levels[0].origins_BF]  # all of them the root, row 0
    first_above = 1
    for above, level in itertools.pairwise(levels):
        parents.append(level.origins_BF + first_above)
        first_above += above.token_ids_BF.shape[1]
    return torch.cat([level.token_ids_BF for level in levels], dim=1), torch.cat(parents, dim=1)
