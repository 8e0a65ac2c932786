# numba infers the types of these functions and specialises on them.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# ruff: noqa: ANN001, ANN202
"""The fast twin of `verify` for tensors on the CPU: one walk instead of many operators.

A walk looks at a row of the target only when it comes to it, and chooses nothing elsewhere.

Dimension key: R flat rows, B requests, N most drafts of any request, N1 = N + 1, V vocabulary.
"""

from enum import IntEnum

import numpy as np
import torch
from numba import njit
from torch import Tensor

from outdraft.sampling.batch import SamplingBatch
from outdraft.sampling.noise import Purpose
from outdraft.sampling.noise_cpu import sample_logits, sample_weights, uniform_scalar
from outdraft.sampling.row_kernels import maximum, softmax
from outdraft.sampling.sampler_cpu import choose_row
from outdraft.spec.draft_batch import DraftBatch
from outdraft.spec.verify import Verdict

_ACCEPT, _RECOVER = int(Purpose.ACCEPT), int(Purpose.RECOVER)
_SAMPLE = int(Purpose.SAMPLE)
_NO_PROBS = np.empty((0, 0, 0), dtype=np.float32)
_TINY = 2.0**-1022  # the least normal float64


class Rule(IntEnum):
    """How sampled chains of sampled requests are verified; everything else is matched."""

    MATCH = 0
    TOKEN = 1
    BLOCK = 2


_MATCH, _TOKEN = int(Rule.MATCH), int(Rule.TOKEN)


def request_R_cpu(drafts: DraftBatch, num_rows: int) -> Tensor:
    """As `draft_batch.request_R`."""
    request_R = np.empty(num_rows, dtype=np.int64)
    _fill_requests(drafts.num_drafts_B.numpy(), request_R)
    return torch.from_numpy(request_R)


def verify_cpu(
    processed_RV: Tensor,
    drafts: DraftBatch,
    sampling: SamplingBatch,
    num_tokens_B: Tensor,
    rule: Rule,
) -> Verdict:
    """The verdict on processed logits, float32 on the CPU, of a batch of any mixture.

    As matching with `sampler.choose`, `verify.rejection_sample` or `verify.block_verify`, with
    the noise of the same keys.
    """
    num_requests, width = drafts.num_requests, drafts.width
    token_ids_BN1 = np.empty((num_requests, width + 1), dtype=np.int64)
    rows_BN = np.empty((num_requests, width), dtype=np.int64)
    num_emitted_B = np.empty(num_requests, dtype=np.int64)
    probs_BNV = _NO_PROBS if drafts.probs_BNV is None else drafts.probs_BNV.numpy()
    _verify(
        processed_RV.contiguous().numpy(),
        np.ascontiguousarray(drafts.token_ids_BN.numpy()),
        np.ascontiguousarray(drafts.parents_BN.numpy()),
        np.ascontiguousarray(drafts.num_drafts_B.numpy()),
        np.ascontiguousarray(probs_BNV),
        np.ascontiguousarray(drafts.is_sampled_B.numpy()),
        np.ascontiguousarray(sampling.is_greedy_B.numpy()),
        np.ascontiguousarray(sampling.seeds_B.numpy()),
        np.ascontiguousarray(num_tokens_B.numpy()),
        int(rule),
        token_ids_BN1,
        rows_BN,
        num_emitted_B,
    )
    return Verdict(
        torch.from_numpy(token_ids_BN1), torch.from_numpy(num_emitted_B), torch.from_numpy(rows_BN)
    )


def match_draft_cpu(choices_R: Tensor, drafts: DraftBatch) -> Verdict:
    """As `match_draft(choices_R[row_index_BN1(drafts)], drafts)`; all tensors int64 on the CPU."""
    num_requests, width = drafts.num_requests, drafts.width
    token_ids_BN1 = np.empty((num_requests, width + 1), dtype=np.int64)
    rows_BN = np.empty((num_requests, width), dtype=np.int64)
    num_emitted_B = np.empty(num_requests, dtype=np.int64)
    _walk(
        choices_R.numpy(),
        drafts.token_ids_BN.numpy(),
        drafts.parents_BN.numpy(),
        drafts.num_drafts_B.numpy(),
        token_ids_BN1,
        rows_BN,
        num_emitted_B,
    )
    return Verdict(
        torch.from_numpy(token_ids_BN1), torch.from_numpy(num_emitted_B), torch.from_numpy(rows_BN)
    )


@njit(cache=True)
def _child(drafted_N, parents_N, num_drafts, row, choice):
    """The draft after `row` that is the choice, -1 if there is none."""
    # A parent precedes its children; of siblings with the same token the first is taken.
    for draft in range(row, num_drafts):
        if parents_N[draft] == row and drafted_N[draft] == choice:
            return draft
    return -1


@njit(cache=True)
def _walk(
    choices_R, drafted_BN, parents_BN, num_drafts_B, token_ids_BN1, rows_BN, num_emitted_B
) -> None:
    token_ids_BN1[:] = -1
    rows_BN[:] = -1
    root = 0
    for b in range(len(num_drafts_B)):
        row, emitted = 0, 0
        while True:
            choice = choices_R[root + row]
            token_ids_BN1[b, emitted] = choice
            emitted += 1
            child = _child(drafted_BN[b], parents_BN[b], num_drafts_B[b], row, choice)
            if child < 0:
                break
            rows_BN[b, emitted - 1] = child
            row = child + 1
        num_emitted_B[b] = emitted
        root += num_drafts_B[b] + 1


@njit(cache=True)
def _fill_requests(num_drafts_B, request_R) -> None:
    start = 0
    for b in range(len(num_drafts_B)):
        end = min(start + num_drafts_B[b] + 1, len(request_R))
        request_R[start:end] = b
        start = end
    request_R[start:] = len(num_drafts_B) - 1  # the padding counts as the last request's


@njit(cache=True, nogil=True)
def _verify(
    logits_RV,
    drafted_BN,
    parents_BN,
    num_drafts_B,
    probs_BNV,
    is_sampled_B,
    is_greedy_B,
    seeds_B,
    num_tokens_B,
    rule,
    token_ids_BN1,
    rows_BN,
    num_emitted_B,
) -> None:
    token_ids_BN1[:] = -1
    rows_BN[:] = -1
    buffer_V = np.empty(logits_RV.shape[1], dtype=np.float32)
    root = 0
    for b in range(len(num_drafts_B)):
        num_drafts, seed, num_tokens = num_drafts_B[b], seeds_B[b], num_tokens_B[b]
        rows_NV = logits_RV[root : root + num_drafts + 1]
        root += num_drafts + 1
        if rule == _MATCH or not is_sampled_B[b] or is_greedy_B[b]:
            num_emitted_B[b] = _match(
                rows_NV,
                drafted_BN[b],
                parents_BN[b],
                seed,
                num_tokens,
                is_greedy_B[b],
                token_ids_BN1[b],
                rows_BN[b],
            )
            continue
        drafted_N, probs_NV = drafted_BN[b, :num_drafts], probs_BNV[b]
        if rule == _TOKEN:
            accepted = _accept_tokens(rows_NV, drafted_N, probs_NV, seed, num_tokens, buffer_V)
            weight = 1.0
        else:
            accepted, weight = _accept_block(
                rows_NV, drafted_N, probs_NV, seed, num_tokens, buffer_V
            )
        for place in range(accepted):
            token_ids_BN1[b, place] = drafted_N[place]
            rows_BN[b, place] = place
        token_ids_BN1[b, accepted] = _last(
            rows_NV, probs_NV, accepted, weight, seed, num_tokens, buffer_V
        )
        num_emitted_B[b] = accepted + 1


@njit(cache=True, nogil=True)
def _match(rows_NV, drafted_N, parents_N, seed, num_tokens, is_greedy, token_ids_N1, rows_N):
    """Write the path of the target's own choices through one draft; how many they are."""
    row, emitted = 0, 0
    while True:
        position = num_tokens + emitted
        choice = choose_row(rows_NV[row], seed, position, 0, is_greedy, _SAMPLE)
        token_ids_N1[emitted] = choice
        emitted += 1
        child = _child(drafted_N, parents_N, len(rows_NV) - 1, row, choice)
        if child < 0:
            return emitted
        rows_N[emitted - 1] = child
        row = child + 1


@njit(cache=True, nogil=True)
def _coin(seed, num_tokens, place):
    return uniform_scalar(seed, num_tokens + place, num_tokens, _ACCEPT)


@njit(cache=True, nogil=True)
def _accept_tokens(rows_NV, drafted_N, probs_NV, seed, num_tokens, p_V):
    """How many drafts of one chain `verify.accept_tokens` accepts; `p_V` is scratch."""
    for place in range(len(drafted_N)):
        softmax(rows_NV[place], p_V)
        token = drafted_N[place]
        if not _coin(seed, num_tokens, place) * probs_NV[place, token] < p_V[token]:
            return place
    return len(drafted_N)


@njit(cache=True, nogil=True)
def _accept_block(rows_NV, drafted_N, probs_NV, seed, num_tokens, p_V):
    """(accepted drafts, weight) of one chain, as `verify.accept_block`; `p_V` is scratch."""
    log_weight, weight = 0.0, 1.0
    accepted, accepted_weight = 0, 1.0
    for place in range(len(drafted_N)):
        softmax(rows_NV[place], p_V)
        if place > 0:
            left = _residual_mass(p_V, probs_NV[place], weight)
            whole = left + (1.0 - weight)
            threshold = left / whole if whole > 0 else 0.0
            if _coin(seed, num_tokens, place - 1) < threshold:
                accepted, accepted_weight = place, weight
        p, q = np.float64(p_V[drafted_N[place]]), np.float64(probs_NV[place, drafted_N[place]])
        if p == 0:  # the target never says this: the weight is 0 from here on
            return accepted, accepted_weight
        log_weight = min(0.0, log_weight + np.log(p) - np.log(max(q, _TINY)))
        weight = np.exp(log_weight)
    if len(drafted_N) > 0 and _coin(seed, num_tokens, len(drafted_N) - 1) < weight:
        accepted, accepted_weight = len(drafted_N), weight
    return accepted, accepted_weight


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def _residual_mass(p_V, q_V, weight):
    """The sum of max(weight * p - q, 0), in float64."""
    result = 0.0
    for at in range(p_V.shape[0]):
        residual = weight * p_V[at] - q_V[at]
        result += residual if residual > 0 else 0.0
    return result


@njit(cache=True, nogil=True)
def _last(rows_NV, probs_NV, accepted, weight, seed, num_tokens, buffer_V):
    """The token after the accepted ones: bonus or recovered, as `verify.last_weights` has it."""
    position = num_tokens + accepted
    if accepted == len(rows_NV) - 1:
        return sample_logits(rows_NV[accepted], seed, position, 0, _SAMPLE)
    softmax(rows_NV[accepted], buffer_V)
    narrow = np.float32(weight)
    for at in range(buffer_V.shape[0]):
        residual = narrow * buffer_V[at] - probs_NV[accepted, at]
        buffer_V[at] = residual if residual > 0 else np.float32(0)
    if maximum(buffer_V) > 0:
        return sample_weights(buffer_V, seed, position, 0, _RECOVER)
    return sample_logits(rows_NV[accepted], seed, position, 0, _RECOVER)
