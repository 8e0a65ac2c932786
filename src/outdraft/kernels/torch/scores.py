"""Log-probabilities of the raw logits, before any processing.

Dimension key: R rows, A rows of logits, V vocabulary, K best tokens.
"""

import torch
from torch import Tensor

from outdraft.kernels.data.scores import (
    SCORED_LOGITS,
    SCORED_ON_DEVICE,
    Scores,
    concatenated,
)


def score_tokens(
    logits_AV: Tensor, chosen_R: Tensor, num_top: int, rows_R: Tensor | None = None
) -> Scores:
    """Log-probabilities of raw logits: of a chosen token of each row, and the best K = num_top.

    K is at most V.

    Args:
        logits_AV: of any float type.
        chosen_R: int64.
        rows_R: int64, rows of the logits; None: all, in order.
    """
    vocab_size = logits_AV.shape[1]
    most_logits = SCORED_LOGITS if logits_AV.is_cpu else SCORED_ON_DEVICE
    num_rows, num_top = max(1, most_logits // vocab_size), min(num_top, vocab_size)
    if rows_R is None:
        rows_R = torch.arange(len(logits_AV), device=logits_AV.device)
    slices = [
        _scores(logits_AV.index_select(0, some_R), chosen_R, num_top)
        for some_R, chosen_R in zip(rows_R.split(num_rows), chosen_R.split(num_rows), strict=True)
    ]
    return concatenated(slices)


def _scores(raw_logits_RV: Tensor, chosen_R: Tensor, num_top: int) -> Scores:
    logits_RV = raw_logits_RV.float()
    total_R1 = logits_RV.logsumexp(1, keepdim=True)
    chosen_R1 = logits_RV.gather(1, chosen_R[:, None])
    # Counted in int32: PyTorch widens all of a sum's terms first.
    rank_R = (logits_RV > chosen_R1).sum(1, dtype=torch.int32).long() + 1
    top_RK, top_ids_RK = _best_tokens(logits_RV, num_top)
    return Scores((chosen_R1 - total_R1)[:, 0], rank_R, top_ids_RK, top_RK - total_R1)


def _best_tokens(logits_RV: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """[R, K] logits and ids of the best K = num_top tokens; of ties the lowest ids, in order.

    Which ties topk takes hangs on how many it is asked for: the most that any request of the batch
    wants.
    """
    if num_top == 0:
        return logits_RV.topk(0, dim=1)
    further_RK, further_ids_RK = logits_RV.topk(min(num_top + 1, logits_RV.shape[1]), dim=1)
    best_RK, ids_RK = further_RK[:, :num_top], further_ids_RK[:, :num_top]
    may_tie = logits_RV.device.type != "cpu"  # elsewhere the host would have to wait to know
    may_tie = may_tie or bool((further_RK[:, 1:] == further_RK[:, :-1]).any())
    if not may_tie:
        return best_RK, ids_RK
    least_R1 = best_RK[:, -1:]
    num_tied_RV = (logits_RV == least_R1).cumsum(1, dtype=torch.int32)
    # Those above the least are all there; behind them come the first of those that tie with it.
    place_K = torch.arange(1, num_top + 1, dtype=torch.int32, device=logits_RV.device)
    nth_RK = place_K - (best_RK > least_R1).sum(1, keepdim=True, dtype=torch.int32)
    tied_ids_RK = torch.searchsorted(num_tied_RV, nth_RK.clamp(min=1))
    tied_ids_RK = tied_ids_RK.clamp(max=logits_RV.shape[1] - 1)  # of a row of NaN
    ids_RK = torch.where(nth_RK > 0, tied_ids_RK, ids_RK).sort(1).values
    best_RK, order_RK = logits_RV.gather(1, ids_RK).sort(dim=1, descending=True, stable=True)
    return best_RK, ids_RK.gather(1, order_RK)
