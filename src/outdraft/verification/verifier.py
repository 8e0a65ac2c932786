"""Verification of a batch: greedy and sampled requests, deterministic and sampled drafts mixed.

The verifier processes the target's logits and says which rule judges which drafts. The rules are
those of `kernels.torch.verification`, which says when they are exact.

Dimension key: R flat rows, V vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from outdraft.config.speculation import RejectionMethod
from outdraft.kernels.data.drafts import DraftBatch, Rule, Verdict, path_ids_BN1K, place_R
from outdraft.kernels.data.logit_parts import most_logit_rows
from outdraft.kernels.ops import Kernels
from outdraft.kernels.torch.verification import Step
from outdraft.sampling.batch import SamplingBatch
from outdraft.sampling.processors import Paths, process_logits
from outdraft.verification.typical import TypicalAcceptance, verify_typical

_RULES: dict[RejectionMethod, Rule] = {
    "block": Rule.TRAVERSAL,
    "token": Rule.TOKEN,
    "drafter_invariant": Rule.MATCH,
    "lossy_typical": Rule.MATCH,  # of a step that draws nothing
}


class Verifier:
    """Verifies the drafts of a step. Stateless: the same arguments give the same verdict.

    Matched with the target's own choices are greedy requests, deterministic drafts, and requests
    that share their noise (`SamplingBatch.shares_noise_B`), whatever `method` says: their ids
    depend on no draft. The other drafts with sampled rows are verified by `method`: "block"
    (traversal, which accepts more) and "token" are rejection sampling, exact in distribution;
    trees are verified as "block" says, whatever the method. "drafter_invariant" matches everything.

    "lossy_typical" is NOT exact: it keeps what the target finds plausible, in all requests but
    those that are greedy or share their noise; see `TypicalAcceptance`.
    """

    def __init__(
        self, kernels: Kernels, method: RejectionMethod, typical: TypicalAcceptance | None = None
    ) -> None:
        """`typical`: the bounds of "lossy_typical"; None: the paper's."""
        self.method: RejectionMethod = method
        self._kernels = kernels
        self._typical = typical or TypicalAcceptance()

    def __eq__(self, other: object) -> bool:
        """Whether the other one gives the same verdicts: graphs of a GPU serve both."""
        return (
            isinstance(other, Verifier)
            and self._kernels is other._kernels
            and (self.method, self._typical) == (other.method, other._typical)
        )

    def __hash__(self) -> int:
        return hash((id(self._kernels), self.method))

    @property
    def rule(self) -> Rule | None:
        """What judges drawn drafts; None: a method of its own, which is no operation."""
        return None if self.method == "lossy_typical" else _RULES[self.method]

    def verify(
        self, logits_RV: Tensor, drafts: DraftBatch, sampling: SamplingBatch, committed: Paths
    ) -> Verdict:
        """What each request keeps, and its next token.

        Sampled drafts must have been drawn with anchors equal to `committed.num_tokens_B`; in trees
        the row of the parent << 24 is added to them.

        Args:
            logits_RV: raw logits of the target, flat rows as in `data.drafts.row_start_B`; rows
                past the last request are ignored.
            committed: the committed text; its `path_ids_RK` is ignored, paths come from `drafts`.
        """
        if sampling.is_plain_greedy:
            return self._kernels.match(logits_RV.argmax(1), drafts)
        request_R = self._kernels.requests_of_rows(drafts, logits_RV.shape[0])
        paths = _with_paths(committed, drafts, request_R, sampling)
        processed_RV = self._processed(logits_RV, request_R, paths, sampling)
        if self.method == "lossy_typical" and sampling.any_draws and drafts.width > 0:
            step = Step(processed_RV, drafts, sampling, committed.num_tokens_B)
            kept = verify_typical(processed_RV, drafts, self._typical, step.draw)
            return step.merged(sampling.draws_B, kept)
        rule = _RULES[self.method]
        return self._kernels.verify(processed_RV, drafts, sampling, committed.num_tokens_B, rule)

    def _processed(
        self, logits_RV: Tensor, request_R: Tensor, paths: Paths, sampling: SamplingBatch
    ) -> Tensor:
        """As `process_logits`, of some rows after the other where a request has many."""
        num_rows, vocab_size = logits_RV.shape
        most = most_logit_rows(vocab_size, logits_RV.dtype, logits_RV.device)
        if num_rows <= most:
            return process_logits(self._kernels, logits_RV, request_R, paths, sampling)
        dtype = torch.promote_types(logits_RV.dtype, torch.float32)
        processed_RV = torch.empty_like(logits_RV, dtype=dtype)
        for first in range(0, num_rows, most):
            rows = slice(first, first + most)
            some = paths.of_rows(rows), sampling
            processed_RV[rows] = process_logits(
                self._kernels, logits_RV[rows], request_R[rows], *some
            )
        return processed_RV


def _with_paths(
    committed: Paths, drafts: DraftBatch, request_R: Tensor, sampling: SamplingBatch
) -> Paths:
    if drafts.width == 0 or not sampling.needs_paths:
        return replace(committed, path_ids_RK=None)
    path_RK = path_ids_BN1K(drafts)[request_R, place_R(drafts, request_R)]
    return replace(committed, path_ids_RK=path_RK)
