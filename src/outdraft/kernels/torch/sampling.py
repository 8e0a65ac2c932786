"""Tokens from rows of logits: penalties, temperature, min_p, top_k and top_p, and the choice.

Also the log-probabilities of raw logits, before any processing.

argmax(logits + Gumbel noise) is a sample of softmax(logits), and a pure function of the noise's
key: the same token in any batch.

Dimension key: B requests, R rows, V vocabulary, L committed tokens, K largest, or places of a path,
W words of a mask of one bit per token, A rows of logits of which R are scored.
"""

import torch
from torch import Tensor

from outdraft.kernels.data.logits import SCORED_LOGITS, SCORED_ON_DEVICE, Scores, concatenated
from outdraft.kernels.data.noise import Gumbel, NoiseKeys
from outdraft.kernels.data.sampling import Paths, SamplingBatch
from outdraft.kernels.torch import noise

_MASKED = -torch.inf


def mask_forbidden(logits_RV: Tensor, grammar_RW: Tensor) -> Tensor:
    """The logits, -inf where a grammar forbids the token: bit v % 32 of word v // 32 is 0.

    Args:
        grammar_RW: int32.
    """
    bits_32 = torch.arange(32, dtype=torch.int32, device=grammar_RW.device)
    is_allowed_RV = (grammar_RW[:, :, None] >> bits_32 & 1).bool().flatten(1)
    return logits_RV.masked_fill(~is_allowed_RV[:, : logits_RV.shape[1]], _MASKED)


def finite_rows(logits_RV: Tensor) -> Tensor:
    """bool [R]: rows of logits with a best one: no NaN or inf among them, not all -inf."""
    return logits_RV.amax(1).abs() < torch.inf  # the largest is NaN where any is


def penalize(logits_RV: Tensor, request_R: Tensor, paths: Paths, sampling: SamplingBatch) -> Tensor:
    """Penalties on the tokens of a row's text: [R, V] of the logits' dtype, new.

    For repetition of prompt and output (Keskar et al. 2019, arXiv 1909.05858), for frequency and
    presence in the output as OpenAI's API defines them.

    Args:
        logits_RV: float32 or float64; not written to.
        request_R: int64, the request of each row.
        paths: with the committed texts.
    """
    assert paths.history_BL is not None
    history_BL = paths.history_BL
    place_L = torch.arange(history_BL.shape[1], device=history_BL.device)
    is_token_BL = (history_BL >= 0) & (place_L < paths.num_tokens_B[:, None])
    is_output_BL = is_token_BL & (place_L >= paths.prompt_lens_B[:, None])
    prompt_BV = _counts(history_BL, is_token_BL & ~is_output_BL, logits_RV)
    output_RV = _counts(history_BL, is_output_BL, logits_RV)[request_R]
    if paths.path_ids_RK is not None:
        path_RK = paths.path_ids_RK
        is_drafted_RK = (path_RK >= 0).to(logits_RV.dtype)
        output_RV.scatter_add_(1, path_RK.clamp(min=0), is_drafted_RK)
    was_output_RV = output_RV > 0
    was_seen_RV = (prompt_BV > 0)[request_R] | was_output_RV

    def per_row(penalty_B: Tensor) -> Tensor:
        return penalty_B[request_R, None].to(logits_RV.dtype)

    repetition_R1 = per_row(sampling.repetition_B)
    repeated_RV = torch.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    logits_RV = torch.where(was_seen_RV, repeated_RV, logits_RV)
    logits_RV = logits_RV - per_row(sampling.frequency_B) * output_RV
    return logits_RV - per_row(sampling.presence_B) * was_output_RV


def scale_and_cut(logits_RV: Tensor, request_R: Tensor, sampling: SamplingBatch) -> Tensor:
    """Process each row's logits alone: [R, V] of their dtype, -inf where a token has no mass.

    Temperature, with the best logit moved to 0, so that nothing overflows; min_p, a share of the
    best token's probability; top_k, where ties with the k-th logit stay; top_p, where the lowest
    ids stay of ties at the border of the nucleus.

    Args:
        logits_RV: float32 or float64; not written to.
        request_R: int64, the request of each row.
    """
    temperature_R1 = sampling.temperature_B[request_R, None].to(logits_RV.dtype)
    logits_RV = (logits_RV - logits_RV.amax(1, keepdim=True)) / temperature_R1
    if sampling.needs_min_p:
        min_p_R1 = sampling.min_p_B[request_R, None].to(logits_RV.dtype)
        least_R1 = logits_RV.amax(1, keepdim=True) + min_p_R1.log()
        logits_RV = logits_RV.masked_fill(logits_RV < least_R1, _MASKED)
    return apply_top_k_top_p(logits_RV, request_R, sampling)


def choose(
    logits_RV: Tensor, keys: NoiseKeys, is_greedy_R: Tensor, gumbel: Gumbel = noise.gumbel
) -> Tensor:
    """int64 [R]: the argmax of greedy rows, the lowest id of a tie; samples of others."""
    sampled_R = noise.sample_gumbel(logits_RV, keys, gumbel)
    return torch.where(is_greedy_R, logits_RV.argmax(1), sampled_R)


def apply_top_k_top_p(logits_RV: Tensor, request_R: Tensor, sampling: SamplingBatch) -> Tensor:
    """Mask what is below the k-th logit, then what is outside the nucleus of mass top_p.

    Ties with the k-th logit stay. Among ties at the border of the nucleus the lowest ids stay.
    """
    if not sampling.needs_top_p:
        if sampling.max_top_k == 0:
            return logits_RV
        # No sort: the k-th largest is among the max_top_k largest. A k above them is switched off.
        best_RK = logits_RV.topk(sampling.max_top_k, dim=1).values
        top_k_R1, width = sampling.top_k_B[request_R, None], best_RK.shape[1]
        kth_R1 = best_RK.gather(1, top_k_R1.clamp(max=width) - 1)
        kth_R1 = kth_R1.masked_fill(top_k_R1 > width, _MASKED)
        return logits_RV.masked_fill(logits_RV < kth_R1, _MASKED)
    ascending_RV = logits_RV.sort(dim=1).values
    if sampling.max_top_k > 0:
        place_R1 = logits_RV.shape[1] - sampling.top_k_B[request_R, None]
        kth_R1 = ascending_RV.gather(1, place_R1)
        ascending_RV = ascending_RV.masked_fill(ascending_RV < kth_R1, _MASKED)
        logits_RV = logits_RV.masked_fill(logits_RV < kth_R1, _MASKED)
    return _mask_outside_nucleus(logits_RV, ascending_RV, sampling.top_p_B[request_R])


def _counts(ids_BL: Tensor, is_counted_BL: Tensor, like_RV: Tensor) -> Tensor:
    """[B, V] of `like_RV`'s type: how often each token stands in the counted places."""
    counts_BV = like_RV.new_zeros(ids_BL.shape[0], like_RV.shape[1])
    return counts_BV.scatter_add_(1, ids_BL.clamp(min=0), is_counted_BL.to(like_RV.dtype))


def _mask_outside_nucleus(logits_RV: Tensor, ascending_RV: Tensor, top_p_R: Tensor) -> Tensor:
    """Mask the smallest logits whose mass together is at most 1 - top_p."""
    top_p_R1 = top_p_R[:, None].to(logits_RV.dtype)
    mass_RV = ascending_RV.softmax(1).cumsum(1)
    is_out_RV = (mass_RV <= 1 - top_p_R1) & (top_p_R1 < 1)
    is_out_RV[:, -1] = False
    num_out_R1 = is_out_RV.sum(1, keepdim=True)
    border_R1 = ascending_RV.gather(1, num_out_R1)
    is_tie_RV = logits_RV == border_R1
    num_below_R1 = (ascending_RV < border_R1).sum(1, keepdim=True)
    num_kept_R1 = is_tie_RV.sum(1, keepdim=True) - (num_out_R1 - num_below_R1)
    is_late_tie_RV = is_tie_RV & (is_tie_RV.cumsum(1, dtype=torch.int32) > num_kept_R1)
    return logits_RV.masked_fill((logits_RV < border_R1) | is_late_tie_RV, _MASKED)


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
    # All above the least are there; after them come the first of those that tie with it.
    place_K = torch.arange(1, num_top + 1, dtype=torch.int32, device=logits_RV.device)
    nth_RK = place_K - (best_RK > least_R1).sum(1, keepdim=True, dtype=torch.int32)
    tied_ids_RK = torch.searchsorted(num_tied_RV, nth_RK.clamp(min=1))
    tied_ids_RK = tied_ids_RK.clamp(max=logits_RV.shape[1] - 1)  # of a row of NaN
    ids_RK = torch.where(nth_RK > 0, tied_ids_RK, ids_RK).sort(1).values
    best_RK, order_RK = logits_RV.gather(1, ids_RK).sort(dim=1, descending=True, stable=True)
    return best_RK, ids_RK.gather(1, order_RK)
