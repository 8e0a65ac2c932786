"""Log-probabilities for requests that asked: of the raw logits, before any processing.

Dimension key: R rows, V vocabulary, K best tokens.
"""

import torch
from torch import Tensor

# That are scored at the same time: half a megabyte in each temporary tensor.
SCORED_LOGITS = 1 << 17


def gather_logprobs(
    raw_logits_RV: Tensor, chosen_R: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logprob_R, rank_R, top_ids_RK, top_logprobs_RK) of chosen ids and of the best K = num_top.

    The rank is 1 for the best token; ties share the better rank. Log-probabilities are float32,
    ids and ranks int64. num_top is at most V.
    """
    logits_RV = raw_logits_RV.float()
    total_R1 = logits_RV.logsumexp(1, keepdim=True)
    chosen_R1 = logits_RV.gather(1, chosen_R[:, None])
    # Counted in int32: PyTorch widens all of a sum's terms first.
    rank_R = (logits_RV > chosen_R1).sum(1, dtype=torch.int32).long() + 1
    top_RK, top_ids_RK = logits_RV.topk(num_top, dim=1)
    return (chosen_R1 - total_R1)[:, 0], rank_R, top_ids_RK, top_RK - total_R1


def gather_in_slices(
    raw_logits_RV: Tensor, chosen_R: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `gather_logprobs`, of few rows at a time: temporary tensors as large as all logits would
    take several times their memory, since C libraries reuse aligned memory badly."""
    num_rows = max(1, SCORED_LOGITS // raw_logits_RV.shape[1])
    slices = zip(raw_logits_RV.split(num_rows), chosen_R.split(num_rows), strict=True)
    scores = [gather_logprobs(logits_RV, some_R, num_top) for logits_RV, some_R in slices]
    logprob_R, rank_R, top_ids_RK, top_RK = map(torch.cat, zip(*scores, strict=True))
    return logprob_R, rank_R, top_ids_RK, top_RK
