"""Acceptance that a benchmark decides, not the target. The texts mean nothing.

Speculation's gain hangs on how often drafts are right, which random weights cannot show. So the
target and the drafter compute all that they always compute, and then coins say what is kept.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outdraft.config.speculation import RejectionMethod
from outdraft.kernels.data.drafts import DraftBatch, Verdict
from outdraft.kernels.data.sampling import Paths, SamplingBatch
from outdraft.kernels.ops import Kernels
from outdraft.verification.verifier import Verifier


class SyntheticVerifier(Verifier):
    """Verifies as another verifier does, for its cost, then keeps what coins say.

    The chance of each token of a draft, given those before it, is one of `chances`; which of them
    hangs on the request alone. Drafts must be chains, requests must not all be greedy: greedy
    batches are matched without a verifier.
    """

    def __init__(self, kernels: Kernels, method: RejectionMethod, chances: Sequence[float]) -> None:
        super().__init__(kernels, method)
        self._chances = torch.tensor(chances)
        self._coins = torch.Generator().manual_seed(0)

    @property
    def rule(self) -> None:
        """No operation keeps what coins say."""

    def verify(
        self, logits_RV: Tensor, drafts: DraftBatch, sampling: SamplingBatch, committed: Paths
    ) -> Verdict:
        verdict = super().verify(logits_RV, drafts, sampling, committed)
        if not drafts.is_chain:
            raise ValueError("synthetic acceptance is of chains")
        device = logits_RV.device
        chance_B1 = self._chances[sampling.seeds_B.cpu() % len(self._chances)][:, None].to(device)
        coins_BN = torch.rand(drafts.token_ids_BN.shape, generator=self._coins).to(device)
        is_kept_BN = ((coins_BN < chance_B1) & drafts.is_draft_BN).long().cumprod(1).bool()
        num_kept_B1 = is_kept_BN.sum(1, keepdim=True)
        ids_BN1 = torch.cat([drafts.token_ids_BN, torch.full_like(num_kept_B1, -1)], 1)
        place_N1 = torch.arange(ids_BN1.shape[1], device=device)
        ids_BN1 = ids_BN1.masked_fill(place_N1 >= num_kept_B1, -1)
        ids_BN1 = ids_BN1.scatter(1, num_kept_B1, verdict.token_ids_BN1[:, :1])
        rows_BN = place_N1[:-1].expand_as(is_kept_BN).masked_fill(~is_kept_BN, -1)
        return Verdict(ids_BN1, num_kept_B1[:, 0] + 1, rows_BN)
