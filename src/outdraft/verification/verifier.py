"""Verification of a batch: greedy and sampled requests, deterministic and sampled drafts mixed.

The verifier processes the target's logits and says which rule judges which drafts. The rules are
those of `kernels.torch.verification`, which says when they are exact.

Typical acceptance is the exception: it is LOSSY, for users who ask for speed at the price of the
model's distribution.

Dimension key: B requests, N most drafts of any request, N1 = N + 1 rows with the root, R flat
rows, V vocabulary.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from outdraft.config.speculation import POSTERIOR_ALPHA, POSTERIOR_THRESHOLD, RejectionMethod
from outdraft.kernels.data.drafts import (
    DraftBatch,
    Rule,
    Verdict,
    ancestors_BN1N,
    path_ids_BN1K,
    place_R,
    row_index_BN1,
)
from outdraft.kernels.data.logits import most_logit_rows
from outdraft.kernels.data.sampling import Paths, SamplingBatch
from outdraft.kernels.ops import Kernels
from outdraft.kernels.torch.verification import (
    Draw,
    VerificationStep,
    requests_of_rows,
    verdict_of_path,
)
from outdraft.sampling.processors import process_logits

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
    those that are greedy or share their noise; see `verify_typical`.
    """

    def __init__(
        self,
        kernels: Kernels,
        method: RejectionMethod,
        posterior_threshold: float = POSTERIOR_THRESHOLD,
        posterior_alpha: float = POSTERIOR_ALPHA,
    ) -> None:
        """The bounds are those of "lossy_typical", by default the paper's."""
        self.method: RejectionMethod = method
        self._kernels, self._bounds = kernels, (posterior_threshold, posterior_alpha)

    def __eq__(self, other: object) -> bool:
        """True if the other one gives the same verdicts: CUDA graphs serve both."""
        return (
            isinstance(other, Verifier)
            and self._kernels is other._kernels
            and (self.method, self._bounds) == (other.method, other._bounds)
        )

    def __hash__(self) -> int:
        return hash((id(self._kernels), self.method))

    @property
    def rule(self) -> Rule | None:
        """The rule that judges drawn drafts; None: a method that is no operation."""
        return None if self.method == "lossy_typical" else _RULES[self.method]

    def verify(
        self, logits_RV: Tensor, drafts: DraftBatch, sampling: SamplingBatch, committed: Paths
    ) -> Verdict:
        """Decide which drafts each request keeps, and its next token.

        Sampled drafts must have been drawn with anchors equal to `committed.num_tokens_B`; in trees
        the row of the parent << 24 is added to them.

        Args:
            logits_RV: raw logits of the target, flat rows as in `data.drafts.row_start_B`; rows
                past the last request are ignored.
            committed: the committed text; its `path_ids_RK` is ignored, paths come from `drafts`.
        """
        if sampling.is_plain_greedy:
            return self._kernels.match(logits_RV.argmax(1), drafts)
        request_R = requests_of_rows(drafts, logits_RV.shape[0])
        paths = _with_paths(committed, drafts, request_R, sampling)
        processed_RV = self._processed(logits_RV, request_R, paths, sampling)
        if self.method == "lossy_typical" and sampling.any_draws and drafts.width > 0:
            step = VerificationStep(processed_RV, drafts, sampling, committed.num_tokens_B)
            kept = verify_typical(processed_RV, drafts, step.draw, *self._bounds)
            return step.merged(sampling.draws_B, kept)
        rule = _RULES[self.method]
        return self._kernels.verify(processed_RV, drafts, sampling, committed.num_tokens_B, rule)

    def _processed(
        self, logits_RV: Tensor, request_R: Tensor, paths: Paths, sampling: SamplingBatch
    ) -> Tensor:
        """The processed logits, computed by parts where a request has many rows."""
        num_rows, vocab_size = logits_RV.shape
        most = most_logit_rows(vocab_size, logits_RV.dtype, logits_RV.device)
        if num_rows <= most:
            return process_logits(self._kernels, logits_RV, request_R, paths, sampling)
        dtype = torch.promote_types(logits_RV.dtype, torch.float32)
        processed_RV = torch.empty_like(logits_RV, dtype=dtype)
        for first in range(0, num_rows, most):
            rows = slice(first, first + most)
            processed_RV[rows] = process_logits(
                self._kernels, logits_RV[rows], request_R[rows], paths.of_rows(rows), sampling
            )
        return processed_RV


def _with_paths(
    committed: Paths, drafts: DraftBatch, request_R: Tensor, sampling: SamplingBatch
) -> Paths:
    if drafts.width == 0 or not sampling.needs_paths:
        return replace(committed, path_ids_RK=None)
    path_RK = path_ids_BN1K(drafts)[request_R, place_R(drafts, request_R)]
    return replace(committed, path_ids_RK=path_RK)


def verify_typical(
    logits_RV: Tensor,
    drafts: DraftBatch,
    draw: Draw,
    posterior_threshold: float,
    posterior_alpha: float,
) -> Verdict:
    """Keep the longest typical path of each tree (Medusa, Cai et al. 2024, arXiv 2401.10774,
    section 2.3.1). LOSSY.

    A draft x is kept where p(x) > min(posterior_threshold, posterior_alpha * exp(-H(p))). H is the
    entropy of the target's distribution p. So a draft is kept if the target finds it plausible,
    even where the target would mostly have chosen another token. THE OUTPUT IS NOT DISTRIBUTED AS
    THE TARGET'S: it is shifted towards the proposer, and no test of exactness holds for it. It is
    for users who ask for speed at the price of the model's own distribution.

    If several paths have that length, the likeliest is kept, by the sum of log p, and the first of
    equals. The token after the path is drawn from p.

    Args:
        logits_RV: processed logits of the target, flat rows.
        drafts: any trees, N at least 1; what they were drawn from does not matter.
        draw: draws the last token.
    """
    index_BN1 = row_index_BN1(drafts)
    log_p_RV = logits_RV.log_softmax(1)
    # Masked tokens: 0 * -inf would be NaN.
    entropy_R = -(log_p_RV.exp() * log_p_RV.clamp(min=-1e30)).sum(1)
    least_R = (math.log(posterior_alpha) - entropy_R).clamp(max=math.log(posterior_threshold))
    # Padding is evaluated too: at the root, whatever its parents are.
    parents_BN = torch.where(drafts.is_draft_BN, drafts.parents_BN, 0)
    parent_BN = index_BN1.gather(1, parents_BN)
    log_p_BN = log_p_RV[parent_BN, drafts.token_ids_BN.clamp(min=0)]
    is_typical_BN = (log_p_BN > least_R[parent_BN]) & drafts.is_draft_BN

    seen_BN1N = ancestors_BN1N(drafts)
    is_reached_BN1 = (is_typical_BN[:, None, :] | ~seen_BN1N).all(2)
    is_reached_BN1 &= pad(drafts.is_draft_BN, (1, 0), value=True)
    length_BN1 = torch.where(is_reached_BN1, seen_BN1N.sum(2), -1)
    is_longest_BN1 = length_BN1 == length_BN1.amax(1, keepdim=True)
    # Each path is summed from the root on, so that equal paths have equal sums.
    likelihood_BN1 = log_p_BN.new_zeros(length_BN1.shape)
    for row in range(drafts.width):
        above_B = likelihood_BN1.gather(1, parents_BN[:, row, None])[:, 0]
        likelihood_BN1[:, row + 1] = above_B + log_p_BN[:, row]
    last_row_B = torch.where(is_longest_BN1, likelihood_BN1, -torch.inf).argmax(1)

    requests_B = torch.arange(drafts.num_requests, device=drafts.device)
    is_on_path_BN = seen_BN1N[requests_B, last_row_B]
    last_logits_BV = logits_RV[index_BN1[requests_B, last_row_B]]
    none_refused_B = torch.zeros_like(last_row_B, dtype=torch.bool)
    last_B = draw(last_logits_BV, is_on_path_BN.sum(1), none_refused_B)
    return verdict_of_path(drafts, is_on_path_BN, last_B)
