"""Verification on a GPU, as graphs.

Dimension key: B requests, R flat rows, V vocabulary.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from outdraft.kernels.data.drafts import DraftBatch, Rule, Verdict
from outdraft.kernels.ops import Kernels
from outdraft.kernels.triton.graphed_calls import CallGraphs

if TYPE_CHECKING:
    from outdraft.sampling.batch import SamplingBatch


class GraphedVerification:
    """As `ops.Match` and `ops.Verify`."""

    def __init__(self, others: Kernels) -> None:
        """`others`: the same, launch by launch."""
        self._others = others
        self._matches, self._verdicts = CallGraphs[Verdict](), CallGraphs[Verdict]()

    def match(self, choices_R: Tensor, drafts: DraftBatch) -> Verdict:
        """As `ops.Match`."""
        return self._matches.call(self._others.match, choices_R, drafts)

    def verify(
        self,
        processed_RV: Tensor,
        drafts: DraftBatch,
        sampling: "SamplingBatch",
        num_tokens_B: Tensor,
        rule: Rule,
    ) -> Verdict:
        """As `ops.Verify`."""
        return self._verdicts.call(
            self._others.verify, processed_RV, drafts, sampling, num_tokens_B, rule
        )
