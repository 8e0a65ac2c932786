"""Drafts trees with any proposer that can say what follows each node of a level.

Dimension key: B requests that draft, F nodes of a level, V vocabulary, R = B * F rows.
"""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.plan import ModelDrafting
from outdraft.core.tree_shape import TreeShape
from outdraft.core.tree_template import TreeTemplate
from outdraft.drafting.device.draft_sampling import drafting_parameters
from outdraft.drafting.device.draft_tree import Frontier, TreeBuilder
from outdraft.drafting.device.model_drafts import DraftModelAsk, ModelDrafts
from outdraft.drafting.device.target_states import TargetStates
from outdraft.sampling.batch import SamplingBatch
from outdraft.sampling.processors import Paths, process_logits


class TreeLevels(Protocol):
    """Logits of what may follow the newest token of each text, and then each node of a level."""

    def first_logits(self) -> Tensor:
        """[B, V]."""
        ...

    def next_logits(self, frontier: Frontier) -> Tensor:
        """[B, F, V]; levels come in order, each once."""
        ...


@runtime_checkable
class TreeDrawer(Protocol):
    """Levels that can be drawn all at once."""

    def draw_trees(
        self, shape: TreeShape | TreeTemplate, num_tokens_B: Tensor, sampling: SamplingBatch
    ) -> ModelDrafts | None:
        """What TreeBuilder would make when it samples; None: it cannot be done for such a batch.

        Args:
            num_tokens_B: int64, committed tokens.
            sampling: as `drafting_parameters` leaves it.
        """
        ...


class LevelProposer(Protocol):
    """A proposer of chains that can also draft level by level: a DeviceProposer with `levels`."""

    drafting: ModelDrafting
    reads_states: bool

    @property
    def taps(self) -> tuple[int, ...]: ...

    def keep(self, states: TargetStates) -> None: ...

    def levels(self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor) -> TreeLevels: ...


class TreeProposer:
    """Makes trees of one shape with a proposer of chains."""

    def __init__(
        self,
        chains: LevelProposer,
        shape: TreeShape | TreeTemplate,
        *,
        samples: bool,
    ) -> None:
        """`samples`: as in TreeBuilder."""
        self._chains = chains
        self._shape = shape
        self._samples = samples
        # A network reads the accepted branch again, as it reads any token that it has not seen:
        # in the pass that it makes for the newest one anyway.
        kept = chains.drafting.max_kept
        self.drafting = replace(
            chains.drafting, levels=shape.levels, max_kept=0 if kept is None else kept
        )
        self.reads_states = chains.reads_states
        self.max_drafts = shape.num_rows
        self.max_passes = shape.depth

    @property
    def taps(self) -> tuple[int, ...]:
        """Residual streams of the target that `keep` needs."""
        return self._chains.taps

    def keep(self, states: TargetStates) -> None:
        """The target has computed these."""
        self._chains.keep(states)

    def propose(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, sampling: SamplingBatch
    ) -> ModelDrafts:
        """Draft for all asks; `sampling` has their requests in the same order."""
        device = token_ids_SL.device
        (num_tokens_B,) = to_device([np.array([ask.num_tokens for ask in asks])], device)
        sampling = drafting_parameters(sampling)
        num_drafts = [ask.num_drafts for ask in asks]
        # No request wants a row of the levels below the last one that is wanted.
        ends = list(itertools.accumulate(self._shape.levels))
        shape = self._shape.with_depth(1 + bisect.bisect_left(ends, max(num_drafts)))
        levels = self._chains.levels(asks, token_ids_SL)
        if self._samples and isinstance(levels, TreeDrawer):
            drafts = levels.draw_trees(shape, num_tokens_B, sampling)
            if drafts is not None:
                return drafts
        builder = TreeBuilder(
            shape,
            num_drafts,
            num_tokens_B,
            sampling,
            samples=self._samples,
        )
        builder.start(_processed(levels.first_logits()[:, None], sampling)[:, 0])
        for _ in range(shape.depth - 1):
            builder.extend(_processed(levels.next_logits(builder.frontier), sampling))
        return builder.finish()


def _processed(logits_BFV: Tensor, sampling: SamplingBatch) -> Tensor:
    """[B, F, V]: as the drafts of each request are drawn."""
    num_requests, width = logits_BFV.shape[:2]
    request_R = torch.arange(num_requests, device=logits_BFV.device).repeat_interleave(width)
    nothing_B = torch.zeros_like(sampling.seeds_B)  # no stage that is left looks at the text
    paths = Paths(None, nothing_B, nothing_B, None)
    processed_RV = process_logits(logits_BFV.flatten(0, 1), request_R, paths, sampling)
    return processed_RV.view(logits_BFV.shape)
