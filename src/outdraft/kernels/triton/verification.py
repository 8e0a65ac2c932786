"""Verification on a GPU, as graphs.

Numbers of requests and rows are rounded up, so that few graphs are made. Requests behind the last
one have no drafts and one row each, behind all others; nobody looks at what comes of them.

Dimension key: B requests, R flat rows, V vocabulary.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from outdraft.kernels.data.drafts import DraftBatch, Rule, Verdict
from outdraft.kernels.data.graph_sizes import rounded_rows
from outdraft.kernels.ops import Kernels
from outdraft.kernels.triton.graphed_calls import CallGraphs
from outdraft.kernels.triton.graphs import Capture

if TYPE_CHECKING:
    from outdraft.sampling.batch import SamplingBatch


class GraphedVerification:
    """As `ops.Match` and `ops.Verify`."""

    def __init__(self, others: Kernels, capture: Capture | None = None) -> None:
        """
        Args:
            others: the same, launch by launch.
            capture: what makes graphs; None: that of the device.
        """
        self._others = others
        self._matches = CallGraphs[Verdict](others.first_times, capture)
        self._verdicts = CallGraphs[Verdict](others.first_times, capture)

    def match(self, choices_R: Tensor, drafts: DraftBatch) -> Verdict:
        """As `ops.Match`."""
        number = rounded_rows(drafts.num_requests)
        num_rows = max(number * (drafts.width + 1), rounded_rows(len(choices_R)))
        verdict = self._matches.call(
            self._others.match, choices_R, _bare(drafts), lengths=(num_rows, number)
        )
        return _first(verdict, drafts.num_requests)

    def verify(
        self,
        processed_RV: Tensor,
        drafts: DraftBatch,
        sampling: "SamplingBatch",
        num_tokens_B: Tensor,
        rule: Rule,
    ) -> Verdict:
        """As `ops.Verify`."""
        number, num_requests = rounded_rows(drafts.num_requests), drafts.num_requests
        num_rows = _rounded_rows(len(processed_RV) + number - num_requests, number, drafts.width)
        verdict = self._verdicts.call(
            self._others.verify,
            processed_RV,
            _bare(drafts),
            sampling.with_copies(num_requests - 1, number),
            num_tokens_B,
            rule,
            lengths=(num_rows, number, None, number, None),
        )
        return _first(verdict, num_requests)


def _rounded_rows(num_rows: int, num_requests: int, width: int) -> int:
    """As if each request had the most drafts, where few have fewer: these are few sizes."""
    most = num_requests * (width + 1)
    return most if num_rows <= most <= 2 * num_rows else rounded_rows(num_rows)


def _bare(drafts: DraftBatch) -> DraftBatch:
    """The same without what verification does not look at."""
    return replace(drafts, margins_BL=None, taught_B2=None)


def _first(verdict: Verdict, num_requests: int) -> Verdict:
    """The verdict about the first requests."""
    return Verdict(
        verdict.token_ids_BN1[:num_requests],
        verdict.num_emitted_B[:num_requests],
        verdict.rows_BN[:num_requests],
    )
