"""From raw logits to the processed distribution of each row, with the row's own path.

The order is vLLM's: grammar, allowed_token_ids, bad_words, min_tokens, logit_bias, penalties,
temperature, min_p, top_k, top_p. A row of a draft sees the committed text of its request and the
drafts on the path from the root to itself, exactly as if that path had been generated. Otherwise
speculation would change the output.

Every stage is pure; stages that no request of the batch needs do not run. Penalties are an
operation of the table of kernels; so is all that looks at the logits alone, from temperature on.

Dimension key: B requests, R rows, L committed tokens, K places of a path, V vocabulary,
E ids of a request's list, W bad words, or int32 words of a mask of one bit per token.
"""

import torch
from torch import Tensor

from outdraft.kernels.data.sampling import ANY_TOKEN, BadWords, Paths, SamplingBatch, TokenSets
from outdraft.kernels.ops import Kernels

_MASKED = -torch.inf


def process_logits(
    kernels: Kernels, logits_RV: Tensor, request_R: Tensor, paths: Paths, sampling: SamplingBatch
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
        logits_RV = kernels.mask_forbidden(logits_RV, paths.grammar_RW)
    if sampling.allowed is not None:
        among_RV, logits_RV = logits_RV, apply_allowed(logits_RV, request_R, sampling.allowed)
        logits_RV = _keep_one(logits_RV, among_RV)
        del among_RV  # whose rows are large
    allowed_RV = logits_RV
    if sampling.bad_words is not None:
        logits_RV = apply_bad_words(logits_RV, request_R, paths, sampling.bad_words)
    if sampling.stops is not None:
        logits_RV = apply_min_tokens(logits_RV, request_R, paths, sampling)
    if logits_RV is not allowed_RV:
        logits_RV = _keep_one(logits_RV, allowed_RV)
    del allowed_RV
    if sampling.bias is not None:
        values_RE = sampling.bias.values_BE[request_R].to(logits_RV.dtype)
        logits_RV = logits_RV.scatter_add(1, sampling.bias.ids_BE[request_R], values_RE)
    if sampling.needs_penalties:
        logits_RV = kernels.penalize(logits_RV, request_R, paths, sampling)
    if sampling.all_greedy:
        return logits_RV
    return kernels.scale_and_cut(logits_RV, request_R, sampling)


def process_drafts(
    kernels: Kernels, logits_RV: Tensor, request_R: Tensor, sampling: SamplingBatch
) -> Tensor:
    """[R, V]: a drafter's logits, as the drafts of each row's request are chosen.

    Args:
        request_R: int64, the request of each row.
        sampling: `of_drafts`: nothing in it looks back at the text.
    """
    if sampling.is_plain_greedy:
        return logits_RV
    nothing_B = torch.zeros_like(sampling.seeds_B)
    paths = Paths(None, nothing_B, nothing_B, None)
    return process_logits(kernels, logits_RV, request_R, paths, sampling)


def apply_allowed(logits_RV: Tensor, request_R: Tensor, allowed: TokenSets) -> Tensor:
    """Mask what is not in the set of a request that has one."""
    is_allowed_RV = torch.zeros_like(logits_RV, dtype=torch.bool)
    is_allowed_RV.scatter_(1, allowed.ids_BE[request_R], True)
    is_free_R1 = ~allowed.is_set_B[request_R, None]
    return logits_RV.masked_fill(~(is_allowed_RV | is_free_R1), _MASKED)


def apply_bad_words(
    logits_RV: Tensor, request_R: Tensor, paths: Paths, bad_words: BadWords
) -> Tensor:
    """Mask the last token of every bad word whose other tokens end the row's output."""
    tail_RL = _tail(request_R, paths, bad_words.prefix_BWL.shape[2])
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
    return (paths.num_tokens_B - paths.prompt_lens_B)[request_R] + _depth(request_R, paths)


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
