"""Trees for requests whose drafts are drawn. A chain is one of them.

The children of a node are drawn one after the other from the drafter's distribution q, without
replacement (Jeon et al. 2024, arXiv 2402.14160). The child of rank r is the token with the
(r + 1)-th largest log q + Gumbel noise of the node. It was drawn from q without the tokens of the
ranks before it, renormalised. Where q has no more tokens, children are deterministic.

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

Dimension key: B requests, E nodes of the level above (1: the root), F new rows, K rows of a tree,
V vocabulary.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from outdraft.kernels.draft_ops import DrawnLevel, Growth, LevelTask, ModelDrafts


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

    def finish(self) -> ModelDrafts:
        """The whole trees."""
        return ModelDrafts(
            torch.cat([level.token_ids_BF for level in self._drawn], dim=1),
            _parents(self._drawn),
            self._growth.num_drafts_B,
            torch.cat([level.probs_BFV for level in self._drawn], dim=1),
            torch.cat([level.is_drawn_BF for level in self._drawn], dim=1),
            is_chain=self._growth.shape.is_chain,
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
