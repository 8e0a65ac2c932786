"""The functions that are CUDA graphs on a GPU: passes of few rows, drafts that grow, and the choice
and the verification of tokens.

Numbers of rows and requests, and lengths of texts, are rounded up, so that few graphs are made.
Rows and requests after the last one are padding: they are kept nowhere, and their results are
ignored. Rows that are padded are no other rows: the same sizes are computed alike with a graph or
without.

Dimension key: T rows of a pass, R rows with logits, B requests, P blocks, D state, K tapped layers,
V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from triton import cdiv

from outdraft.attention.base import AttentionMetadata, LayerCache
from outdraft.kernels.data.drafts import DraftBatch, Rule, Verdict
from outdraft.kernels.data.graph_sizes import (
    MOST_ROWS,
    PASS_BYTES,
    TREE_ROWS,
    rounded_len,
    rounded_requests,
    rounded_rows,
)
from outdraft.kernels.data.sampling import SamplingBatch
from outdraft.kernels.draft_ops import Capturable, Growth, TreeLevels
from outdraft.kernels.ops import Choosing, DraftGrower, Kernels, WarmUps, choose_by_parts
from outdraft.kernels.triton.graphs import CallGraphs, Capture, Padding, PerCache

# Token ids, caches, metadata, taps, states; gives states and tapped streams of all rows.
RunPass = Callable[
    [Tensor, Sequence[LayerCache], AttentionMetadata, Sequence[int], Tensor | None],
    tuple[Tensor, Tensor],
]


class GraphedPasses:
    """Runs passes of a decoder, and repeats those whose sizes it has seen."""

    def __init__(
        self,
        run: RunPass,
        few_rows: int,
        warm_ups: WarmUps,
        new_capture: Callable[[], Capture | None] = lambda: None,
    ) -> None:
        """
        Args:
            run: the launches of a pass.
            few_rows: attention is launched in one way if no request has more rows, in two if one
                has, and in three if one has more than TREE_ROWS.
            new_capture: what makes the graphs on one cache; None: that of the device.
        """
        self._run, self._few_rows = run, few_rows
        self._graphs = PerCache(
            lambda: CallGraphs[tuple[Tensor, Tensor]](warm_ups, new_capture(), PASS_BYTES)
        )

    def can_run(self, num_rows: int) -> bool:
        """The pass is one of few rows."""
        return 0 < num_rows <= MOST_ROWS

    def __call__(
        self,
        token_ids_T: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        taps: Sequence[int],
        states_TD: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The results of `run`, in tensors of their own."""

        def run(
            taps: tuple[int, ...], ids_T: Tensor, states_TD: Tensor | None, *metadata: Any
        ) -> tuple[Tensor, Tensor]:
            return self._run(ids_T, caches, AttentionMetadata(*metadata), taps, states_TD)

        num_rows, block_size = len(token_ids_T), caches[0].k_PSGC.shape[1]
        num_requests, num_blocks = metadata.block_table_BP.shape
        seq_len = rounded_len(max(metadata.max_seq_len, num_blocks * block_size))
        rows, requests = rounded_rows(num_rows), rounded_requests(num_requests)
        of_rows, of_requests = Padding((rows,)), Padding((requests,))
        out_TD, tapped_TKD = self._graphs.of(caches[0].k_PSGC).call(
            run,
            tuple(taps),
            token_ids_T,
            states_TD,
            metadata.query_start_B1,
            metadata.context_lens_B,
            metadata.num_causal_B,
            metadata.ancestors_T,
            metadata.positions_T,
            metadata.slots_T,
            metadata.block_table_BP,
            self.most_rows(metadata.max_rows),
            seq_len,
            paddings=(
                *(Padding(), of_rows, of_rows),
                *(Padding((requests + 1,), num_rows), of_requests, of_requests),
                *(of_rows, of_rows, Padding((rows,), -1)),
                Padding((requests, cdiv(seq_len, block_size))),
                *(Padding(), Padding()),
            ),
        )
        return out_TD[:num_rows].clone(), tapped_TKD[:num_rows].clone()

    def most_rows(self, max_rows: int) -> int:
        """Most rows of a request of the passes that share a graph."""
        kinds = self._few_rows, TREE_ROWS, MOST_ROWS
        return min(most for most in kinds if max_rows <= most)


class GraphedGrowth:
    """The operation `grow`, as CUDA graphs of levels that can be asked of other tensors."""

    def __init__(self, warm_ups: WarmUps) -> None:
        self._graphs = PerCache(lambda: CallGraphs[DraftBatch](warm_ups))

    def __call__(self, levels: TreeLevels, growth: Growth, by_levels: DraftGrower) -> DraftBatch:
        if not isinstance(levels, Capturable):
            return by_levels(levels, growth)

        def grow(tensors: Any, common: Any, its_growth: Growth) -> DraftBatch:
            return by_levels(levels.rebind(tensors, common), its_growth)

        graphs = self._graphs.of(levels.first_keys_PSGC)
        # Rows that some requests do not want are left out in any case: that is one kind less.
        return graphs.call(grow, *levels.static_inputs(), replace(growth, fewest=0))


class GraphedVerification:
    """The operations `verify` and `choose`.

    Requests after the last one have no drafts and one row each, after all others.
    """

    def __init__(self, others: Kernels, capture: Capture | None = None) -> None:
        """
        Args:
            others: the same, launch by launch.
            capture: what makes graphs; None: that of the device.
        """
        self._others = others
        self._verdicts = CallGraphs[Verdict](others.warm_ups, capture)
        self._choices = CallGraphs[tuple[Verdict, Tensor]](others.warm_ups, capture)
        self._is_choosing = False

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
        of_rows, of_requests = _paddings(processed_RV, drafts)
        verdict = self._verdicts.call(
            self._others.verify,
            processed_RV,
            replace(drafts, margins_BL=None),  # nothing reads them: fewer kinds of graphs
            _padded(sampling),
            num_tokens_B,
            rule,
            paddings=(of_rows, of_requests, Padding(), of_requests, Padding()),
        )
        return verdict.first(drafts.num_requests)

    def choose(
        self,
        choosing: Choosing,
        states_RD: Tensor,
        drafts: DraftBatch,
        sampling: SamplingBatch,
        num_tokens_B: Tensor,
    ) -> tuple[Verdict, Tensor]:
        of_rows, of_requests = _paddings(states_RD, drafts)
        self._is_choosing = True
        try:
            verdict, is_finite_R = self._choices.call(
                choose_by_parts,
                choosing,
                states_RD,
                replace(drafts, margins_BL=None),
                _padded(sampling),
                num_tokens_B,
                paddings=(Padding(), of_rows, of_requests, Padding(), of_requests),
            )
        finally:
            self._is_choosing = False
        return verdict.first(drafts.num_requests), is_finite_R[: len(states_RD)]


def _padded(sampling: SamplingBatch) -> SamplingBatch:
    """The requests, and copies of the last one."""
    number = sampling.num_requests
    return sampling.with_copies(number - 1, rounded_rows(number))


def _paddings(rows_RX: Tensor, drafts: DraftBatch) -> tuple[Padding, Padding]:
    """Pad rows and requests: as if each request had the most drafts, where few have fewer:
    these are few sizes."""
    number = rounded_rows(drafts.num_requests)
    most, least = number * (drafts.width + 1), len(rows_RX) + number - drafts.num_requests
    num_rows = most if least <= most <= 2 * least else rounded_rows(least)
    return Padding((num_rows,)), Padding((number,))
