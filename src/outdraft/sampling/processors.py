"""From raw logits to the processed distribution of each row, with the row's own path.

The order is vLLM's: grammar, allowed_token_ids, bad_words, min_tokens, logit_bias, penalties,
temperature, min_p, top_k, top_p. A row of a draft sees the committed text of its request and the
drafts on the path from the root to itself, exactly as if that path had been generated. Otherwise
speculation would change the output.

Every stage is pure; stages that no request of the batch needs do not run.

Dimension key: B requests, R rows, L committed tokens, K places of a path, V vocabulary,
E ids of a request's list, W bad words, or int32 words of a mask of one bit per token.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outdraft.sampling.batch import ANY_TOKEN, BadWords, SamplingBatch, TokenSets
from outdraft.sampling.processors_cpu import process_rows
from outdraft.sampling.row_kernels import is_compiled_for

_MASKED = -torch.inf


@dataclass(frozen=True, slots=True)
class Paths:
    """The text before each row: what its request committed, and the drafts on the way to it.

    Attributes:
        history_BL: int64; committed ids, prompt and output with the root, padded with -1 on the
            right; None when `SamplingBatch.needs_history` is false.
        prompt_lens_B: int64.
        num_tokens_B: int64; committed tokens, the root included.
        path_ids_RK: int64; drafted ids from the root (excluded) to the row (included), padded
            with -1; None when all rows are roots.
        grammar_RW: int32; what the row's grammar allows behind its text: bit v % 32 of word
            v // 32 stands for token v. No row is all zeros. None when no request has a grammar.
    """

    history_BL: Tensor | None
    prompt_lens_B: Tensor
    num_tokens_B: Tensor
    path_ids_RK: Tensor | None
    grammar_RW: Tensor | None = None


def process_logits(
    logits_RV: Tensor, request_R: Tensor, paths: Paths, sampling: SamplingBatch
) -> Tensor:
    """float32 [R, V]: logits of each row's processed distribution, -inf where it has no mass.

    Greedy rows keep their scale: temperature 0 divides nothing. float64 logits stay float64.
    A row whose tokens are all forbidden keeps the best of its allowed tokens; a row with a grammar
    keeps the best of those that the grammar allows. A drafter of another vocabulary may give none
    of the allowed tokens any mass; then the row keeps the best token that it has.

    Args:
        logits_RV: raw logits of any float type, -inf for tokens without mass; not written to.
        request_R: int64, the request of each row.
    """
    if logits_RV.dtype != torch.float64:
        logits_RV = logits_RV.float()
    if paths.grammar_RW is not None:
        logits_RV = apply_grammar(logits_RV, paths.grammar_RW)
    if sampling.allowed is not None:
        among_RV, logits_RV = logits_RV, apply_allowed(logits_RV, request_R, sampling.allowed)
        logits_RV = _keep_one(logits_RV, among_RV)
    allowed_RV = logits_RV
    if sampling.bad_words is not None:
        logits_RV = apply_bad_words(logits_RV, request_R, paths, sampling.bad_words)
    if sampling.stops is not None:
        logits_RV = apply_min_tokens(logits_RV, request_R, paths, sampling)
    if logits_RV is not allowed_RV:
        logits_RV = _keep_one(logits_RV, allowed_RV)
    if sampling.bias is not None:
        values_RE = sampling.bias.values_BE[request_R].to(logits_RV.dtype)
        logits_RV = logits_RV.scatter_add(1, sampling.bias.ids_BE[request_R], values_RE)
    if sampling.needs_penalties:
        logits_RV = apply_penalties(logits_RV, request_R, paths, sampling)
    if sampling.all_greedy:
        return logits_RV
    if is_compiled_for(logits_RV):
        return _scale_and_cut_cpu(logits_RV, request_R, sampling)
    return scale_and_cut(logits_RV, request_R, sampling)


def scale_and_cut(logits_RV: Tensor, request_R: Tensor, sampling: SamplingBatch) -> Tensor:
    """The stages that look at the logits alone: temperature, min_p, top_k and top_p."""
    logits_RV = apply_temperature(logits_RV, sampling.temperature_B[request_R])
    if sampling.needs_min_p:
        logits_RV = apply_min_p(logits_RV, sampling.min_p_B[request_R])
    return apply_top_k_top_p(logits_RV, request_R, sampling)


def _scale_and_cut_cpu(logits_RV: Tensor, request_R: Tensor, sampling: SamplingBatch) -> Tensor:
    """`scale_and_cut` of float32 on the CPU."""
    processed_RV = np.empty(logits_RV.shape, dtype=np.float32)
    min_p_B = sampling.min_p_B
    process_rows(
        logits_RV.contiguous().numpy(),
        request_R.numpy(),
        sampling.temperature_B.numpy(),
        (min_p_B.log() if sampling.needs_min_p else min_p_B).numpy(),
        sampling.top_k_B.numpy(),
        sampling.top_p_B.numpy(),
        sampling.needs_min_p,
        processed_RV,
    )
    return torch.from_numpy(processed_RV)


def apply_grammar(logits_RV: Tensor, grammar_RW: Tensor) -> Tensor:
    """Mask the tokens whose bits are 0."""
    size = logits_RV.shape[1]
    if logits_RV.device.type == "cpu":
        bytes_RX = grammar_RW.contiguous().numpy().view(np.uint8)  # of a little-endian machine
        is_allowed = np.unpackbits(bytes_RX, axis=1, count=size, bitorder="little")
        return logits_RV.masked_fill(torch.from_numpy(is_allowed) == 0, _MASKED)
    return apply_grammar_on_any_device(logits_RV, grammar_RW)


def apply_grammar_on_any_device(logits_RV: Tensor, grammar_RW: Tensor) -> Tensor:
    """As `apply_grammar`."""
    bits_32 = torch.arange(32, dtype=torch.int32, device=grammar_RW.device)
    is_allowed_RV = (grammar_RW[:, :, None] >> bits_32 & 1).bool().flatten(1)
    return logits_RV.masked_fill(~is_allowed_RV[:, : logits_RV.shape[1]], _MASKED)


def apply_allowed(logits_RV: Tensor, request_R: Tensor, allowed: TokenSets) -> Tensor:
    """Mask what is not in the set of a request that has one."""
    is_allowed_RV = torch.zeros_like(logits_RV, dtype=torch.bool)
    is_allowed_RV.scatter_(1, allowed.ids_BE[request_R], True)
    is_free_R = ~allowed.is_set_B[request_R]
    return logits_RV.masked_fill(~(is_allowed_RV | is_free_R[:, None]), _MASKED)


def apply_bad_words(
    logits_RV: Tensor, request_R: Tensor, paths: Paths, bad_words: BadWords
) -> Tensor:
    """Mask the last token of every bad word whose other tokens end the row's output."""
    length = bad_words.prefix_BWL.shape[2]
    tail_RL = _tail(request_R, paths, length)
    prefix_RWL = bad_words.prefix_BWL[request_R]
    same_RWL = (prefix_RWL == tail_RL[:, None, :]) | (prefix_RWL == ANY_TOKEN)
    fits_RW = bad_words.prefix_lens_BW[request_R] <= _num_output(request_R, paths)[:, None]
    penalty_RW = torch.where(same_RWL.all(2) & fits_RW, _MASKED, 0.0).to(logits_RV.dtype)
    return logits_RV.scatter_add(1, bad_words.last_BW[request_R], penalty_RW)


def apply_min_tokens(
    logits_RV: Tensor, request_R: Tensor, paths: Paths, sampling: SamplingBatch
) -> Tensor:
    """Mask the stop tokens of rows whose output is still shorter than min_tokens."""
    assert sampling.stops is not None
    is_short_R = _num_output(request_R, paths) < sampling.min_tokens_B[request_R]
    is_masked_R = is_short_R & sampling.stops.is_set_B[request_R]
    ids_RE = sampling.stops.ids_BE[request_R]
    penalty_R1 = torch.where(is_masked_R, _MASKED, 0.0).to(logits_RV.dtype)[:, None]
    return logits_RV.scatter_add(1, ids_RE, penalty_R1.expand_as(ids_RE))


def apply_penalties(
    logits_RV: Tensor, request_R: Tensor, paths: Paths, sampling: SamplingBatch
) -> Tensor:
    """Repetition penalty over prompt and output, frequency and presence over the output."""
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


def apply_temperature(logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
    """Divide by the temperature, with the best logit moved to 0 so that nothing overflows."""
    best_R1 = logits_RV.amax(1, keepdim=True)
    return (logits_RV - best_R1) / temperature_R[:, None].to(logits_RV.dtype)


def apply_min_p(logits_RV: Tensor, min_p_R: Tensor) -> Tensor:
    """Mask tokens with less than min_p times the probability of the best one."""
    least_R1 = logits_RV.amax(1, keepdim=True) + min_p_R[:, None].to(logits_RV.dtype).log()
    return logits_RV.masked_fill(logits_RV < least_R1, _MASKED)


def apply_top_k_top_p(logits_RV: Tensor, request_R: Tensor, sampling: SamplingBatch) -> Tensor:
    """Mask what is below the k-th logit, then what is outside the nucleus of mass top_p.

    Ties with the k-th logit stay. Among ties at the border of the nucleus the lowest ids stay.
    """
    if not sampling.needs_top_p:
        if sampling.max_top_k == 0:
            return logits_RV
        # No sort: the k-th largest is among the max_top_k largest. A k above them is switched off.
        best_RK = logits_RV.topk(sampling.max_top_k, dim=1).values
        return _mask_below_kth(logits_RV, best_RK, sampling.top_k_B[request_R])
    ascending_RV = _ascending(logits_RV)
    if sampling.max_top_k > 0:
        place_R1 = logits_RV.shape[1] - sampling.top_k_B[request_R, None]
        kth_R1 = ascending_RV.gather(1, place_R1)
        ascending_RV = ascending_RV.masked_fill(ascending_RV < kth_R1, _MASKED)
        logits_RV = logits_RV.masked_fill(logits_RV < kth_R1, _MASKED)
    return _mask_outside_nucleus(logits_RV, ascending_RV, sampling.top_p_B[request_R])


def _ascending(logits_RV: Tensor) -> Tensor:
    """Every row's values from the smallest up."""
    if logits_RV.device.type == "cpu":  # ten times faster than torch's there
        return torch.from_numpy(np.sort(logits_RV.numpy(), axis=1))
    return logits_RV.sort(dim=1).values


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


def _mask_below_kth(logits_RV: Tensor, best_RK: Tensor, top_k_R: Tensor) -> Tensor:
    """Mask logits below the top_k-th of the descending `best_RK`; a k past its end: nothing."""
    width = best_RK.shape[1]
    kth_R1 = best_RK.gather(1, (top_k_R.clamp(max=width) - 1)[:, None])
    kth_R1 = kth_R1.masked_fill((top_k_R > width)[:, None], _MASKED)
    return logits_RV.masked_fill(logits_RV < kth_R1, _MASKED)


def _keep_one(logits_RV: Tensor, allowed_RV: Tensor) -> Tensor:
    """Rows where nothing is left get the best token of `allowed_RV` back, and only that."""
    is_empty_R1 = logits_RV.amax(1, keepdim=True) == _MASKED
    best_R1 = allowed_RV.argmax(1, keepdim=True)
    kept_R1 = torch.where(is_empty_R1, allowed_RV.gather(1, best_R1), logits_RV.gather(1, best_R1))
    return logits_RV.scatter(1, best_R1, kept_R1)


def _depth(request_R: Tensor, paths: Paths) -> Tensor:
    if paths.path_ids_RK is None:
        return torch.zeros_like(request_R)
    return (paths.path_ids_RK >= 0).sum(1)


def _num_output(request_R: Tensor, paths: Paths) -> Tensor:
    """int64 [R]: tokens of output before each row, its path included."""
    committed_B = paths.num_tokens_B - paths.prompt_lens_B
    return committed_B[request_R] + _depth(request_R, paths)


def _tail(request_R: Tensor, paths: Paths, length: int) -> Tensor:
    """int64 [R, length]: the last ids of each row's text with its path; -1 before its start."""
    assert paths.history_BL is not None
    history_BL = paths.history_BL
    depth_R1 = _depth(request_R, paths)[:, None]
    # Counted back from the row: 0 is its own token, the path ends where back == depth.
    back_L = torch.arange(length - 1, -1, -1, device=request_R.device)
    place_RL = paths.num_tokens_B[request_R, None] - 1 + depth_R1 - back_L
    at_RL = place_RL.clamp(0, max(history_BL.shape[1] - 1, 0))
    tail_RL = torch.where(place_RL < 0, -1, history_BL[request_R[:, None], at_RL])
    if paths.path_ids_RK is None or paths.path_ids_RK.shape[1] == 0:
        return tail_RL
    path_at_RL = (depth_R1 - 1 - back_L).clamp(0, paths.path_ids_RK.shape[1] - 1)
    return torch.where(back_L < depth_R1, paths.path_ids_RK.gather(1, path_at_RL), tail_RL)


def _counts(ids_BL: Tensor, is_counted_BL: Tensor, like_RV: Tensor) -> Tensor:
    """[B, V] of `like_RV`'s type: how often each token stands in the counted places."""
    counts_BV = like_RV.new_zeros(ids_BL.shape[0], like_RV.shape[1])
    return counts_BV.scatter_add_(1, ids_BL.clamp(min=0), is_counted_BL.to(like_RV.dtype))
