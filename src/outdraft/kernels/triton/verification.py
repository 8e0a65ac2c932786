"""Verification on a GPU, as graphs.

Dimension key: B requests, R flat rows, V vocabulary.
"""

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import pad

from outdraft.kernels.data.drafts import DraftBatch, Rule, Verdict
from outdraft.kernels.data.graph_sizes import rounded_rows
from outdraft.kernels.ops import Kernels
from outdraft.kernels.triton.graphed_calls import CallGraphs

if TYPE_CHECKING:
    from outdraft.sampling.batch import SamplingBatch


class GraphedVerification:
    """As `ops.Match` and `ops.Verify`."""

    def __init__(self, others: Kernels) -> None:
        """`others`: the same, launch by launch."""
        self._others = others
        self._matches = CallGraphs[Verdict](others.first_times)
        self._verdicts = CallGraphs[Verdict](others.first_times)

    def match(self, choices_R: Tensor, drafts: DraftBatch) -> Verdict:
        """As `ops.Match`."""
        return self._matches.call(self._others.match, _rounded(choices_R), drafts)

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
            self._others.verify, _rounded(processed_RV), drafts, sampling, num_tokens_B, rule
        )


def _rounded(rows: Tensor) -> Tensor:
    """With some rows behind the last request's, which count for nothing: kinds of calls are few."""
    num_more = rounded_rows(len(rows)) - len(rows)
    return pad(rows, (0, 0) * (rows.dim() - 1) + (0, num_more)) if num_more else rows
