"""Trees for requests whose drafts are drawn.

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
  the distributions behind the nodes above it and on the tokens of the levels above it, those of
  other branches included. It never depends on what is drawn at this level or below.
- Afterwards no row is left out. A request that wants fewer rows than others gets the first ones,
  level after level. Their order comes from an expectation that was made before the level was drawn,
  and their number is known before anything is drawn.
- Each node draws with noise of its own: the key of the noise names the node.

Siblings are tested in the order in which they were drawn. Their rows have the same order.

Dimension key: B requests, E nodes of the level above (1: the root), F new rows, K rows of a tree,
V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from outdraft.core.tree_template import TreeTemplate
from outdraft.drafting.device.drawn_level import DrawnLevel, LevelTask, draw_level
from outdraft.drafting.device.drawn_level_cpu import draw_level_cpu
from outdraft.drafting.device.ranked_tree import join_levels, level_tensors
from outdraft.drafting.device.tree_level import NewRows
from outdraft.sampling.batch import SamplingBatch
from outdraft.sampling.row_kernels import is_compiled_for


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """All rows of the drawn trees.

    Attributes:
        token_ids_BK, parents_BK: int64, level after level; parents as in `DraftBatch`.
        is_drawn_BK: bool.
        probs_BKV: float32, what the drawn ones were drawn from.
    """

    token_ids_BK: Tensor
    parents_BK: Tensor
    is_drawn_BK: Tensor
    probs_BKV: Tensor


class DrawnTrees:
    """Grows the trees of a batch, level by level."""

    def __init__(
        self,
        levels: tuple[int, ...],
        template: TreeTemplate | None,
        num_rows_B: Tensor | None,
        num_tokens_B: Tensor,
        sampling: SamplingBatch,
    ) -> None:
        """
        Args:
            template: where the rows stand, ranks in the order of draws. None: the rows go where the
                most accepted tokens are expected.
            num_rows_B: how many rows each request wants. None: every request wants all.
            num_tokens_B: committed tokens.
        """
        self._levels = levels
        self._num_rows_B = num_rows_B
        self._num_tokens_B = num_tokens_B
        self._sampling = sampling
        self._templates: list[Tensor] | None = None
        if template is not None:
            pairs = level_tensors(template.origins, template.ranks, num_tokens_B.device)
            self._templates = [torch.stack(pair) for pair in zip(*pairs, strict=True)]
        self._drawn: list[DrawnLevel] = []
        self._weight_BE = torch.ones_like(num_tokens_B, dtype=torch.float32)[:, None]

    def start(self, logits_BV: Tensor) -> NewRows:
        """The first level."""
        return self.extend(logits_BV[:, None])

    def extend(self, logits_BEV: Tensor) -> NewRows:
        """The next level, behind the nodes of the last one."""
        depth = len(self._drawn)
        num_before = sum(self._levels[:depth])
        task = LevelTask(
            num_rows=self._levels[depth],
            template_2F=None if self._templates is None else self._templates[depth],
            num_kept_B=None if self._num_rows_B is None else self._num_rows_B - num_before,
            depth=depth,
            first_above=sum(self._levels[: depth - 1]) + 1 if depth else 0,
            num_tokens_B=self._num_tokens_B,
            sampling=self._sampling,
        )
        draw = draw_level_cpu if is_compiled_for(logits_BEV) else draw_level
        level = draw(logits_BEV, self._weight_BE, task)
        self._weight_BE = level.weight_BF
        self._drawn.append(level)
        return level.rows

    def finish(self) -> DrawnRows:
        """The whole trees."""
        token_ids_BK, parents_BK = join_levels([level.rows for level in self._drawn])
        return DrawnRows(
            token_ids_BK,
            parents_BK,
            torch.cat([level.is_drawn_BF for level in self._drawn], dim=1),
            torch.cat([level.probs_BFV for level in self._drawn], dim=1),
        )
