"""Trees of the likeliest tokens, for requests whose drafts are deterministic.

Comparing such a tree with the target's own choices is exact, however the tree was chosen. Here it
is chosen for the largest expected number of accepted rows: EAGLE-2 (Li et al. 2024, arXiv
2406.16858). A row's weight is the probability of its path under the drafter. Every node of a level
proposes its likeliest children, and the best of these become the next level. In the end the K
candidates of the largest weight are kept, whatever their level: their ancestors weigh no less, and
so are among them. In a chain every node proposes one child, and all candidates are kept, whatever
they weigh.

Dimension key: B requests, E nodes of the level above (1: the root), F new rows, C children of a
node, P candidates, K rows of a tree, V vocabulary.
"""

import torch
from torch import Tensor

from outdraft.core.draft import TreeShape
from outdraft.kernels.draft_ops import best_places

_FEWEST_CANDIDATES = 8  # children of a node that are considered at all


class RankedTrees:
    """Grows the trees of a batch, level by level, and keeps the best of all candidates."""

    def __init__(self, shape: TreeShape) -> None:
        self._shape = shape
        self._token_ids: list[Tensor] = []
        self._parents: list[Tensor] = []  # candidates, counted from 1; 0: the root
        self._weights: list[Tensor] = []
        self._num_candidates = 0
        self._node_BE = self._weight_BE = torch.empty(0)

    def extend(self, logits_BEV: Tensor) -> tuple[Tensor, Tensor]:
        """The next level, after the last one's nodes: token ids and parents' places, [B, F]."""
        if self._shape.is_chain:
            best_B1 = logits_BEV.argmax(2)
            self._token_ids.append(best_B1)
            return best_B1, torch.zeros_like(best_B1)
        if not self._token_ids:
            self._node_BE = logits_BEV.new_zeros(len(logits_BEV), 1, dtype=torch.int64)
            self._weight_BE = torch.ones_like(self._node_BE, dtype=torch.float32)
        num_rows = self._shape.levels[len(self._token_ids)]
        token_ids_BEC, probs_BEC = self._children(logits_BEV, num_rows)
        weights_BP = (self._weight_BE[:, :, None] * probs_BEC).flatten(1)
        token_ids_BP = token_ids_BEC.flatten(1)
        num_children = token_ids_BEC.shape[2]
        self._token_ids.append(token_ids_BP)
        self._weights.append(weights_BP)
        self._parents.append(self._node_BE.repeat_interleave(num_children, dim=1))
        places_BF = best_places(weights_BP, num_rows)
        self._node_BE = places_BF + (1 + self._num_candidates)
        self._weight_BE = weights_BP.gather(1, places_BF)
        self._num_candidates += weights_BP.shape[1]
        return token_ids_BP.gather(1, places_BF), places_BF // num_children

    def finish(self) -> tuple[Tensor, Tensor]:
        """Token ids and parents, int64 [B, K], the best rows first."""
        if self._shape.is_chain:
            token_ids_BK = torch.cat(self._token_ids, dim=1)
            rows_K = torch.arange(token_ids_BK.shape[1], device=token_ids_BK.device)
            return token_ids_BK, rows_K.repeat(len(token_ids_BK), 1)
        # The first of equal weights is taken: a parent stands before its children.
        num_rows = sum(self._shape.levels[: len(self._token_ids)])
        kept_BK = best_places(torch.cat(self._weights, dim=1), num_rows)
        parents_BK = torch.cat(self._parents, dim=1).gather(1, kept_BK)
        row_BP1 = kept_BK.new_zeros(len(kept_BK), self._num_candidates + 1)
        rows_K = torch.arange(1, kept_BK.shape[1] + 1, device=kept_BK.device)
        row_BP1.scatter_(1, kept_BK + 1, rows_K.expand_as(kept_BK))
        token_ids_BK = torch.cat(self._token_ids, dim=1).gather(1, kept_BK)
        return token_ids_BK, row_BP1.gather(1, parents_BK)

    def _children(self, logits_BEV: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens after every node, the best first, and their shares: int64 and
        float32 [B, E, C]."""
        most = min(max(num_rows, _FEWEST_CANDIDATES), logits_BEV.shape[2])
        best = logits_BEV.topk(most, dim=2)
        total_BE1 = logits_BEV.logsumexp(2, keepdim=True)
        return best.indices, (best.values - total_BE1).exp().float()
