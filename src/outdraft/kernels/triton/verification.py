"""The choice of tokens and the verification of drafts on a GPU, as CUDA graphs.

Numbers of requests and rows are rounded up, so that few graphs are made. Requests after the last
one have no drafts and one row each, after all others; their results are ignored.

Dimension key: B requests, R flat rows, V vocabulary.
"""

from dataclasses import replace

from torch import Tensor

from outdraft.kernels.data.drafts import DraftBatch, Rule, Verdict
from outdraft.kernels.data.graph_sizes import rounded_rows
from outdraft.kernels.data.sampling import SamplingBatch
from outdraft.kernels.ops import Choosing, Kernels, choose_by_parts
from outdraft.kernels.triton.graphed_calls import CallGraphs
from outdraft.kernels.triton.graphs import Capture


class GraphedVerification:
    """The operations `match`, `verify` and `choose`, each as CUDA graphs."""

    def __init__(self, others: Kernels, capture: Capture | None = None) -> None:
        """
        Args:
            others: the same, launch by launch.
            capture: what makes graphs; None: that of the device.
        """
        self._others = others
        self._matches = CallGraphs[Verdict](others.warm_ups, capture)
        self._verdicts = CallGraphs[Verdict](others.warm_ups, capture)
        self._choices = CallGraphs[tuple[Verdict, Tensor]](others.warm_ups, capture)
        self._is_choosing = False

    def match(self, choices_R: Tensor, drafts: DraftBatch) -> Verdict:
        if self._is_choosing:
            return self._others.match(choices_R, drafts)
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
        sampling: SamplingBatch,
        num_tokens_B: Tensor,
        rule: Rule,
    ) -> Verdict:
        if self._is_choosing:
            return self._others.verify(processed_RV, drafts, sampling, num_tokens_B, rule)
        number, num_requests = rounded_rows(drafts.num_requests), drafts.num_requests
        verdict = self._verdicts.call(
            self._others.verify,
            processed_RV,
            _bare(drafts),
            sampling.with_copies(num_requests - 1, number),
            num_tokens_B,
            rule,
            lengths=(_num_rows(processed_RV, drafts), number, None, number, None),
        )
        return _first(verdict, num_requests)

    def choose(
        self,
        choosing: Choosing,
        states_RD: Tensor,
        drafts: DraftBatch,
        sampling: SamplingBatch,
        num_tokens_B: Tensor,
    ) -> tuple[Verdict, Tensor]:
        number, num_requests = rounded_rows(drafts.num_requests), drafts.num_requests
        self._is_choosing = True
        try:
            verdict, is_finite_R = self._choices.call(
                choose_by_parts,
                choosing,
                states_RD,
                _bare(drafts),
                sampling.with_copies(num_requests - 1, number),
                num_tokens_B,
                lengths=(None, _num_rows(states_RD, drafts), number, None, number),
            )
        finally:
            self._is_choosing = False
        return _first(verdict, num_requests), is_finite_R[: len(states_RD)]


def _num_rows(rows_RX: Tensor, drafts: DraftBatch) -> int:
    """The number of rows to pad to: as if each request had the most drafts, where few have fewer.
    These are few sizes."""
    number = rounded_rows(drafts.num_requests)
    most, least = number * (drafts.width + 1), len(rows_RX) + number - drafts.num_requests
    return most if least <= most <= 2 * least else rounded_rows(least)


def _bare(drafts: DraftBatch) -> DraftBatch:
    """The drafts without fields that verification ignores: fewer kinds of graphs."""
    return replace(drafts, margins_BL=None)


def _first(verdict: Verdict, num_requests: int) -> Verdict:
    """The verdict about the first requests."""
    return Verdict(
        verdict.token_ids_BN1[:num_requests],
        verdict.num_emitted_B[:num_requests],
        verdict.rows_BN[:num_requests],
    )
