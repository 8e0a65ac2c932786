# pyright: reportCallIssue=false, reportArgumentType=false
# A launch takes more than the parameters of the kernel.
"""Verification of drawn chains on a GPU, by the kernels of traverse_kernels.py.

Dimension key: B requests, N most drafts of one, R flat rows, Q splits of a vocabulary, V
vocabulary.
"""

import torch
import triton
from torch import Tensor

from outdraft.kernels.data.drafts import DraftBatch, Rule, Verdict
from outdraft.kernels.data.noise import Purpose
from outdraft.kernels.data.sampling import SamplingBatch
from outdraft.kernels.torch import verification
from outdraft.kernels.torch.noise import ROUNDS
from outdraft.kernels.triton import noise
from outdraft.kernels.triton import traverse_kernels as kernels

_TILE = 1024  # ids


def verify(
    processed_RV: Tensor,
    drafts: DraftBatch,
    sampling: SamplingBatch,
    num_tokens_B: Tensor,
    rule: Rule,
) -> Verdict:
    """Verify drawn chains by kernels of their own, everything else as the reference."""
    draws = drafts.any_sampled and sampling.any_draws and drafts.width > 0
    is_plain = rule == Rule.TRAVERSAL and drafts.is_chain and processed_RV.dtype == torch.float32
    if not (draws and is_plain):
        return verification.verify(processed_RV, drafts, sampling, num_tokens_B, rule, source=noise)
    judged = traverse_chains(processed_RV, drafts, sampling.seeds_B, num_tokens_B)
    step = verification.VerificationStep(processed_RV, drafts, sampling, num_tokens_B, noise)
    return step.beside_matched(judged)


def traverse_chains(
    logits_RV: Tensor, drafts: DraftBatch, seeds_B: Tensor, num_tokens_B: Tensor
) -> Verdict:
    """Traversal verification of chains; the verdicts of `verification.traverse`.

    Args:
        logits_RV: float32, processed.
        drafts: one request at least, and one draft of it.
        seeds_B: int64, the requests' noise.
    """
    assert drafts.probs_BNV is not None
    (num_rows, size), device = logits_RV.shape, logits_RV.device
    number, width = drafts.num_requests, drafts.width
    num_splits = triton.cdiv(size, _TILE)
    splits = triton.next_power_of_2(num_splits)
    logits_RV = logits_RV.contiguous()
    given = [
        drafts.probs_BNV.contiguous(),
        drafts.token_ids_BN.contiguous(),
        drafts.is_sampled_BN.contiguous().view(torch.uint8),
        drafts.num_drafts_B.contiguous(),
    ]
    ids_BN, num_drafts_B = given[1], given[3]
    seeds_B, num_tokens_B = seeds_B.contiguous(), num_tokens_B.contiguous()
    tops_RQ, totals_RQ = (torch.empty(num_rows, num_splits, device=device) for _ in range(2))
    bases_R, sums_R = (torch.empty(num_rows, device=device) for _ in range(2))
    weights_BN1 = torch.empty(number, width + 1, dtype=torch.float64, device=device)
    left_BNQ = torch.empty(number, width, num_splits, device=device)
    accepted_B, left_B = torch.empty_like(num_tokens_B), torch.empty(number, device=device)
    values_BQ = torch.empty(number, num_splits, device=device)
    best_BQ = torch.empty(number, num_splits, dtype=torch.int64, device=device)
    in_splits = {"NUM_SPLITS": num_splits, "SPLITS": splits}
    of_rows = bases_R, sums_R, weights_BN1
    kernels.split_softmax[(num_rows, num_splits)](logits_RV, tops_RQ, totals_RQ, size, TILE=_TILE)
    kernels.weigh_rows[(number,)](
        logits_RV,
        tops_RQ,
        totals_RQ,
        *given,
        *of_rows,
        size,
        width,
        **in_splits,
    )
    kernels.sum_left[(number, width, num_splits)](
        logits_RV,
        *given,
        *of_rows,
        left_BNQ,
        size,
        width,
        TILE=_TILE,
        enable_fp_fusion=False,  # what is summed here is drawn from below
    )
    kernels.stop_paths[(number,)](
        weights_BN1,
        left_BNQ,
        num_drafts_B,
        num_tokens_B,
        seeds_B,
        accepted_B,
        left_B,
        width,
        int(Purpose.ACCEPT),
        ROUNDS=ROUNDS,
        **in_splits,
    )
    kernels.draw_last[(number, num_splits)](
        logits_RV,
        *given,
        num_tokens_B,
        seeds_B,
        *of_rows,
        accepted_B,
        left_B,
        values_BQ,
        best_BQ,
        size,
        width,
        int(Purpose.RECOVER),
        int(Purpose.SAMPLE),
        TILE=_TILE // 4,
        **noise.GUMBEL,
    )
    verdict = Verdict(
        ids_BN.new_empty(number, width + 1), ids_BN.new_empty(number), torch.empty_like(ids_BN)
    )
    kernels.write_verdicts[(number,)](
        ids_BN,
        accepted_B,
        values_BQ,
        best_BQ,
        verdict.token_ids_BN1,
        verdict.num_emitted_B,
        verdict.rows_BN,
        width,
        WIDTH=triton.next_power_of_2(width + 1),
        **in_splits,
    )
    return verdict
