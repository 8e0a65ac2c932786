"""Log-probabilities for requests that asked: of the raw logits, before any processing.

Dimension key: R rows, V vocabulary, K best tokens.
"""

from torch import Tensor


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
    rank_R = (logits_RV > chosen_R1).sum(1) + 1
    top_RK, top_ids_RK = logits_RV.topk(num_top, dim=1)
    return (chosen_R1 - total_R1)[:, 0], rank_R, top_ids_RK, top_RK - total_R1
