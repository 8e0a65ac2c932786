"""Drafts that grow on a GPU: as a graph, where levels can be asked again of other tensors."""

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from outdraft.kernels.draft_ops import Growth, ModelDrafts, Movable, TreeLevels
from outdraft.kernels.triton.graphed_calls import CallGraphs


class GraphedGrowth:
    """As `ops.Grow`. Several ranks grow theirs launch by launch: they wait for each other."""

    def __init__(self) -> None:
        # By what levels stand on: with a cache its graphs go.
        self._graphs = WeakIdKeyDictionary()

    def __call__(
        self,
        levels: TreeLevels,
        growth: Growth,
        by_levels: Callable[[TreeLevels, Growth], ModelDrafts],
    ) -> ModelDrafts:
        if not isinstance(levels, Movable) or growth.shares.group.size > 1:
            return by_levels(levels, growth)

        def grow(tensors: Any, common: Any, its_growth: Growth) -> ModelDrafts:
            return by_levels(levels.over(tensors, common), its_growth)

        return self._graphs_on(levels.ground).call(grow, *levels.parts(), growth)

    def _graphs_on(self, ground: Tensor) -> CallGraphs[ModelDrafts]:
        if ground not in self._graphs:
            self._graphs[ground] = CallGraphs[ModelDrafts]()
        return cast(CallGraphs[ModelDrafts], self._graphs[ground])
