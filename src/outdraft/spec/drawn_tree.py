"""Trees for requests whose drafts are drawn: at every node one child is, the others are not.

The other children T of a node are the likeliest tokens of the drafter's distribution q, and the
drawn one comes from q' = q outside T, renormalised: top-(n-1)+1 of Hu et al., ICLR 2025, arXiv
2502.18779. Its verification is exact as long as nobody, to decide whether a row is verified, looks
at that row's own token or at what is below it. Hence:

- Which rows a level has, and so T of every node, depends on the distributions behind the nodes
  above it and on the tokens of the levels above it: never on what is drawn at this level or below.
- Afterwards no row is left out. A request that wants fewer rows than others gets the first ones,
  level after level, in the order of an expectation that was there before the level was drawn; how
  many is known before anything is. T is what is left of it then.
- The walk that verifies a tree comes to a node of a level by looking at this level and those above
  it. So what is drawn below the node is fresh when its turn comes, although rows of other branches
  had a say in whether it was drawn at all.

The last of these does not hold for block verification, which looks further down before it stops:
these trees are verified by the walk even where one comes out as a chain. The draws of one level
have different noise: its key names the parent.

Dimension key: B requests, E nodes of the level above (1: the root), F new rows, K rows of a tree,
V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from outdraft.core.tree_template import TreeTemplate
from outdraft.sampling.batch import SamplingBatch
from outdraft.sampling.row_kernels import is_compiled_for
from outdraft.spec.drawn_level import DrawnLevel, LevelTask, draw_level
from outdraft.spec.drawn_level_cpu import draw_level_cpu
from outdraft.spec.ranked_tree import Levels, join_levels, level_tensors
from outdraft.spec.tree_level import NewRows


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """All rows of the drawn trees.

    Attributes:
        token_ids_BK, parents_BK: int64, level after level; parents as in `DraftBatch`.
        is_drawn_BK: bool.
        probs_BKV: float32, q' of the drawn ones.
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
        """`template`: where the rows stand; None: where the most is expected of them.
        `num_rows_B`: how many of them each request wants; None: all do. `num_tokens_B`: committed
        tokens."""
        self._levels = levels
        self._num_rows_B = num_rows_B
        self._num_tokens_B = num_tokens_B
        self._sampling = sampling
        self._templates: list[Tensor] | None = None
        if template is not None:
            pairs = level_tensors(
                template.origins, _ranks_with_draws(template), num_tokens_B.device
            )
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


def _ranks_with_draws(template: TreeTemplate) -> Levels:
    """The ranks of a template's rows, where the last of siblings is 0, the others 1, 2, ..."""
    return tuple(
        tuple(
            rank + 1 if (origin, rank + 1) in set(zip(origins, ranks, strict=True)) else 0
            for origin, rank in zip(origins, ranks, strict=True)
        )
        for origins, ranks in zip(template.origins, template.ranks, strict=True)
    )
