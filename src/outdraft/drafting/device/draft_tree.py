"""How a network drafts a tree: level by level, for a batch of any mixture of requests.

The builder knows no network. Its caller reads the frontier, the newest level, and hands over the
logits behind it:

    builder.start(logits_BV)                # behind the newest token of the text
    for _ in range(builder.depth - 1):
        builder.extend(logits behind builder.frontier)
    drafts = builder.finish()

Nothing comes back to the host. It knows beforehand how many rows each level has, but not which
tokens they hold and which rows they continue.

Dimension key: B requests, E nodes of the level above, F rows of the newest level, K rows of a
tree, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.tree_shape import TreeShape
from outdraft.core.tree_template import TreeTemplate
from outdraft.drafting.device.drawn_tree import DrawnRows, DrawnTrees
from outdraft.drafting.device.model_drafts import ModelDrafts
from outdraft.drafting.device.ranked_tree import BestFirstTrees, TemplateTrees
from outdraft.drafting.device.tree_level import NewRows
from outdraft.sampling import noise
from outdraft.sampling.batch import SamplingBatch
from outdraft.sampling.noise import Purpose


@dataclass(frozen=True, slots=True)
class Frontier:
    """The newest level: rows that the network reads next.

    Attributes:
        token_ids_BF: int64; every one a token, also where a request has no such row.
        origins_BF: int64, place of each row's parent in the level above; 0 at the first level.
        ancestors_BF: int64; bit j: the row continues drafted row j, or is it. Rows are numbered
            from 0, level after level; `finish` may number them otherwise.
        depth: all rows have the same; the root's children have 1.
        first_row: number of the first row; the others follow it.
    """

    token_ids_BF: Tensor
    origins_BF: Tensor
    ancestors_BF: Tensor
    depth: int
    first_row: int


class TreeBuilder:
    """Grows one tree for every request.

    Requests of temperature 0 get the likeliest tokens, others get draws without replacement (see
    `drawn_tree`). Requests that share their noise get the tokens that the target would most likely
    choose with that noise if it had the drafter's logits. These are matched with the target's own
    choices, so the output does not depend on them.
    """

    def __init__(
        self,
        shape: TreeShape | TreeTemplate,
        num_rows: Sequence[int],
        num_tokens_B: Tensor,
        sampling: SamplingBatch,
        *,
        samples: bool,
    ) -> None:
        """
        Args:
            num_rows: how many rows each request wants; at most the shape's.
            num_tokens_B: int64, committed tokens.
            sampling: the requests' parameters; the logits are processed with them already.
            samples: draw drafts from the network's distribution; False: all requests get the
                likeliest tokens.
        """
        self.depth = shape.depth
        self._levels = shape.levels
        self._num_tokens_B = num_tokens_B
        self._sampling = sampling
        self._shares_noise = samples and sampling.any_shares_noise
        self._is_ranked_B1 = ~sampling.draws_B[:, None]
        self._num_rows_B = None
        if min(num_rows) < shape.num_rows:
            (self._num_rows_B,) = to_device([np.array(num_rows)], num_tokens_B.device)
        draws = samples and sampling.any_draws
        template = shape if isinstance(shape, TreeTemplate) else None
        self._drawn: DrawnTrees | None = None
        self._ranked: BestFirstTrees | TemplateTrees | None = None
        if draws:
            self._drawn = DrawnTrees(
                shape.levels, template, self._num_rows_B, num_tokens_B, sampling
            )
        if not draws or not sampling.all_draw:
            if template is None:
                self._ranked = BestFirstTrees(shape.levels)
            else:
                self._ranked = TemplateTrees(template, num_tokens_B.device)
        self._frontier: Frontier | None = None

    def start(self, logits_BV: Tensor) -> None:
        """Choose the first level, from the processed logits behind the root."""
        self._add(logits_BV[:, None])

    def extend(self, logits_BFV: Tensor) -> None:
        """Choose the next level, from the processed logits behind the frontier."""
        self._add(logits_BFV)

    @property
    def frontier(self) -> Frontier:
        """The newest level."""
        assert self._frontier is not None
        return self._frontier

    def finish(self) -> ModelDrafts:
        """The trees; what is past a request's number of rows is -1."""
        drawn = self._drawn.finish() if self._drawn is not None else None
        ranked = self._ranked.finish() if self._ranked is not None else None
        drafts = _merged(drawn, ranked, self._is_ranked_B1)
        if self._num_rows_B is None:
            return drafts
        places_K = torch.arange(drafts.token_ids_BK.shape[1], device=self._num_rows_B.device)
        is_row_BK = places_K < self._num_rows_B[:, None]
        return replace(drafts, token_ids_BK=torch.where(is_row_BK, drafts.token_ids_BK, -1))

    def _add(self, logits_BEV: Tensor) -> None:
        above = self._frontier
        depth = 1 if above is None else above.depth + 1
        ranked_BEV = self._with_noise(logits_BEV, depth) if self._shares_noise else logits_BEV
        chosen = [
            trees.start(values_BEV[:, 0]) if above is None else trees.extend(values_BEV)
            for trees, values_BEV in ((self._drawn, logits_BEV), (self._ranked, ranked_BEV))
            if trees is not None
        ]
        rows = chosen[0]
        if len(chosen) == 2:
            rows = _chosen_by(self._is_ranked_B1, chosen[1], rows)
        first_row = 0 if above is None else above.first_row + self._levels[depth - 2]
        places_F = torch.arange(self._levels[depth - 1], device=logits_BEV.device)
        own_BF = (1 << (places_F + first_row)).expand_as(rows.origins_BF)
        if above is not None:
            own_BF = own_BF | above.ancestors_BF.gather(1, rows.origins_BF)
        self._frontier = Frontier(rows.token_ids_BF, rows.origins_BF, own_BF, depth, first_row)

    def _with_noise(self, logits_BEV: Tensor, depth: int) -> Tensor:
        """Logits plus the noise of the target's choice at this depth, the same behind all nodes,
        where a request shares its noise."""
        sampling = self._sampling
        noise_BV = noise.gumbel(
            sampling.seeds_B,
            self._num_tokens_B + (depth - 1),
            Purpose.SAMPLE,
            logits_BEV.shape[2],
        )
        shares_B11 = sampling.shares_noise_B[:, None, None]
        return torch.where(shares_B11, logits_BEV + noise_BV[:, None], logits_BEV)


def _chosen_by(takes_first_B1: Tensor, first: NewRows, second: NewRows) -> NewRows:
    return NewRows(
        torch.where(takes_first_B1, first.token_ids_BF, second.token_ids_BF),
        torch.where(takes_first_B1, first.origins_BF, second.origins_BF),
    )


def _merged(
    drawn: DrawnRows | None, ranked: tuple[Tensor, Tensor] | None, is_ranked_B1: Tensor
) -> ModelDrafts:
    """The drafts of both kinds of requests."""
    if drawn is None:
        assert ranked is not None
        return ModelDrafts(*ranked)
    token_ids_BK, parents_BK, is_drawn_BK = drawn.token_ids_BK, drawn.parents_BK, drawn.is_drawn_BK
    if ranked is not None:
        token_ids_BK = torch.where(is_ranked_B1, ranked[0], token_ids_BK)
        parents_BK = torch.where(is_ranked_B1, ranked[1], parents_BK)
        is_drawn_BK = is_drawn_BK & ~is_ranked_B1
    return ModelDrafts(
        token_ids_BK,
        parents_BK,
        drawn.probs_BKV,
        is_drawn_BK,
        all_sampled=ranked is None,  # the first row of every request, if not every row
    )
