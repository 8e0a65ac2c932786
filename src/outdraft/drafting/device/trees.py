"""Trees of drafts, level by level; a chain is one of them.

**Trees of the likeliest tokens**, for requests whose drafts are deterministic. Comparing such a
tree with the target's own choices is exact, however the tree was chosen. Here it is chosen for the
largest expected number of accepted rows: EAGLE-2 (Li et al. 2024, arXiv 2406.16858). A row's weight
is the probability of its path under the drafter. Every node of a level proposes its likeliest
children, and the best of these become the next level. In the end the K candidates of the largest
weight are kept, whatever their level: their ancestors weigh no less, and so are among them. In a
chain every node proposes one child, and all candidates are kept, whatever they weigh.

**Trees for requests whose drafts are drawn.** The children of a node are drawn one after the other
from the drafter's distribution q, without replacement (Jeon et al. 2024, arXiv 2402.14160). The
child of rank r is the token with the (r + 1)-th largest log q + Gumbel noise of the node. It was
drawn from q without the tokens of the ranks before it, renormalised. Where q has no more tokens,
children are deterministic.

Traversal verification (arXiv 2505.12398) gives every node a weight. It accepts the node's subtree
with exactly this probability, whatever is drawn below and however the shape goes on. It has one
condition: every token comes from its own row of probabilities, given all that was drawn before it.
Then the weights of all branches are martingales and orthogonal to each other, and one branch may
influence where another one goes on. Hence:

- It is decided whether a row exists before its token is drawn. Which rows a level has depends on
  the distributions after the nodes above it and on the tokens of the levels above it, those of
  other branches included. It never depends on what is drawn at this level or below.
- Afterwards no row is left out. A request that wants fewer rows than others gets the first ones,
  level after level. Their order comes from an expectation that was made before the level was drawn,
  and their number is known before anything is drawn.
- Each node draws with noise of its own: the key of the noise names the node.

Siblings are tested in the order in which they were drawn. Their rows have the same order.

Dimension key: B requests, E nodes of the level above (1: the root), F new rows, C children of a
node, P candidates, K rows of a tree, V vocabulary.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from outdraft.core.draft import TreeShape
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.draft_ops import DrawnLevel, Growth, LevelTask, best_places

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
            token_ids_BN = torch.cat(self._token_ids, dim=1)
            rows_K = torch.arange(token_ids_BN.shape[1], device=token_ids_BN.device)
            return token_ids_BN, rows_K.repeat(len(token_ids_BN), 1)
        # The first of equal weights is taken: a parent stands before its children.
        num_rows = sum(self._shape.levels[: len(self._token_ids)])
        kept_BK = best_places(torch.cat(self._weights, dim=1), num_rows)
        parents_BN = torch.cat(self._parents, dim=1).gather(1, kept_BK)
        row_BP1 = kept_BK.new_zeros(len(kept_BK), self._num_candidates + 1)
        rows_K = torch.arange(1, kept_BK.shape[1] + 1, device=kept_BK.device)
        row_BP1.scatter_(1, kept_BK + 1, rows_K.expand_as(kept_BK))
        token_ids_BN = torch.cat(self._token_ids, dim=1).gather(1, kept_BK)
        return token_ids_BN, row_BP1.gather(1, parents_BN)

    def _children(self, logits_BEV: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens after every node, the best first, and their shares: int64 and
        float32 [B, E, C]."""
        most = min(max(num_rows, _FEWEST_CANDIDATES), logits_BEV.shape[2])
        best = logits_BEV.topk(most, dim=2)
        total_BE1 = logits_BEV.logsumexp(2, keepdim=True)
        return best.indices, (best.values - total_BE1).exp().float()


class DrawnTrees:
    """Grows the trees of a batch, level by level."""

    def __init__(self, growth: Growth) -> None:
        self._growth = growth
        self._drawn: list[DrawnLevel] = []
        self._weight_BE = torch.ones_like(growth.num_tokens_B, dtype=torch.float32)[:, None]

    def extend(self, logits_BEV: Tensor) -> tuple[Tensor, Tensor]:
        """The next level, after the nodes of the last one; the root at first.

        Returns token ids and the places of their parents in the level above, int64 [B, F].
        """
        growth, depth = self._growth, len(self._drawn)
        levels = growth.shape.levels
        task = LevelTask(
            num_rows=levels[depth],
            num_kept_B=growth.num_drafts_B - sum(levels[:depth]),
            first_above=sum(levels[: depth - 1]) + 1 if depth else 0,
            positions_B=growth.num_tokens_B + depth,
            num_tokens_B=growth.num_tokens_B,
            seeds_B=growth.sampling.seeds_B,
            draws_B=growth.sampling.draws_B,
        )
        level = growth.kernels.draw_level(logits_BEV, self._weight_BE, task)
        self._weight_BE = level.weight_BF
        self._drawn.append(level)
        return level.token_ids_BF, level.origins_BF

    def finish(self) -> DraftBatch:
        """The whole trees."""
        return DraftBatch(
            torch.cat([level.token_ids_BF for level in self._drawn], dim=1),
            _parents(self._drawn),
            self._growth.num_drafts_B,
            torch.cat([level.probs_BFV for level in self._drawn], dim=1),
            torch.cat([level.is_drawn_BF for level in self._drawn], dim=1),
            is_chain=self._growth.shape.is_chain,
            sampled_trees=not self._growth.shape.is_chain,
            all_sampled=True,  # the first row of every request, if not every row
        )


def _parents(levels: Sequence[DrawnLevel]) -> Tensor:
    """int64 [B, K], of rows that are numbered level after level."""
    parents: list[Tensor] = [levels[0].origins_BF]  # all of them the root, row 0
    first_above = 1
    for above, level in itertools.pairwise(levels):
        parents.append(level.origins_BF + first_above)
        first_above += above.token_ids_BF.shape[1]
    return torch.cat(parents, dim=1)
