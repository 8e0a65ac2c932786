"""Typical acceptance: LOSSY, for users who ask for speed at the price of the model's distribution.

Dimension key: B requests, N most drafts of any request, N1 = N + 1 rows with the root, R flat
rows, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from outdraft.config.speculation import POSTERIOR_ALPHA, POSTERIOR_THRESHOLD
from outdraft.kernels.data.drafts import DraftBatch, Verdict, ancestors_BN1N, row_index_BN1
from outdraft.kernels.torch.verification import Draw, verdict_of_path


@dataclass(frozen=True, slots=True)
class TypicalAcceptance:
    """Typical acceptance of Medusa (Cai et al. 2024, arXiv 2401.10774, section 2.3.1). LOSSY.

    A draft x is kept where p(x) > min(posterior_threshold, posterior_alpha * exp(-H(p))). H is the
    entropy of the target's distribution p. So a draft is kept if the target finds it plausible,
    even where the target would mostly have chosen another token. THE OUTPUT IS NOT DISTRIBUTED AS
    THE TARGET'S: it is shifted towards the proposer, and no test of exactness holds for it. It is
    for users who ask for speed at the price of the model's own distribution.
    """

    posterior_threshold: float = POSTERIOR_THRESHOLD
    posterior_alpha: float = POSTERIOR_ALPHA

    def least_log_prob(self, log_p_RV: Tensor) -> Tensor:
        """[R]: the log-probability that a draft behind each row must exceed."""
        # Masked tokens: 0 * -inf would be NaN.
        entropy_R = -(log_p_RV.exp() * log_p_RV.clamp(min=-1e30)).sum(1)
        return (math.log(self.posterior_alpha) - entropy_R).clamp(
            max=math.log(self.posterior_threshold)
        )


def verify_typical(
    logits_RV: Tensor, drafts: DraftBatch, typical: TypicalAcceptance, draw: Draw
) -> Verdict:
    """Keep the longest typical path of each tree. NOT exact: see `TypicalAcceptance`.

    If several paths have that length, the likeliest is kept, by the sum of log p, and the first of
    equals. The token after the path is drawn from p.

    Args:
        logits_RV: processed logits of the target, flat rows.
        drafts: any trees, N at least 1; what they were drawn from does not matter.
        draw: draws the last token.
    """
    index_BN1 = row_index_BN1(drafts)
    log_p_RV = logits_RV.log_softmax(1)
    least_R = typical.least_log_prob(log_p_RV)
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
