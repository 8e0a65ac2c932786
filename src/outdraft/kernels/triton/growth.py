"""Drafts that grow on a GPU: as a graph, where levels can be asked again of other tensors."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outdraft.kernels.data.first_times import FirstTimes
from outdraft.kernels.draft_ops import Growth, ModelDrafts, Movable, TreeLevels
from outdraft.kernels.triton.graphed_calls import CallGraphs
from outdraft.kernels.triton.kept_graphs import OfCaches


class GraphedGrowth:
    """The operation `grow`, as CUDA graphs of levels that can be asked of other tensors."""

    def __init__(self, first_times: FirstTimes) -> None:
        """`first_times`: counts kinds of growth that are new, and graphs."""
        self._graphs = OfCaches(lambda: CallGraphs[ModelDrafts](first_times))

    def __call__(
        self,
        levels: TreeLevels,
        growth: Growth,
        by_levels: Callable[[TreeLevels, Growth], ModelDrafts],
    ) -> ModelDrafts:
        if not isinstance(levels, Movable):
            return by_levels(levels, growth)

        def grow(tensors: Any, common: Any, its_growth: Growth) -> ModelDrafts:
            return by_levels(levels.over(tensors, common), its_growth)

        graphs = self._graphs.of(levels.ground)
        # Rows that some requests do not want are left out in any case: that is one kind less.
        return graphs.call(grow, *levels.parts(), replace(growth, fewest=0))
