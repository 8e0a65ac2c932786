# numba infers the types of these functions and specialises on them.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# ruff: noqa: ANN001, ANN201, ANN202
"""The rules of sampled chains, one request at a time, for `verify_cpu`.

A row of the target is looked at only when the walk comes to it. Rows that were not sampled have a
one-hot q, which is nowhere written down.

NOTE: numba's cache looks at the file of the calling kernel only: after a change here, touch the
files that import it too.

Dimension key: N drafts of the request, V vocabulary.
"""

import numpy as np
from numba import njit

from outdraft.sampling.noise import Purpose
from outdraft.sampling.noise_cpu import sample_logits, sample_weights, uniform_scalar
from outdraft.sampling.row_kernels import maximum, softmax

_ACCEPT, _RECOVER = int(Purpose.ACCEPT), int(Purpose.RECOVER)
_SAMPLE = int(Purpose.SAMPLE)
_ONE, _ZERO = np.float32(1), np.float32(0)
_TINY = 2.0**-1022  # the least normal float64


@njit(cache=True, nogil=True)
def coin(seed, num_tokens, place):
    """The coin of a depth."""
    return uniform_scalar(seed, num_tokens + place, num_tokens, _ACCEPT)


@njit(cache=True, nogil=True)
def accept_tokens(rows_NV, drafted_N, is_sampled_N, probs_NV, seed, num_tokens, p_V):
    """How many drafts of one chain `verify.accept_tokens` accepts; `p_V` is scratch."""
    for place in range(len(drafted_N)):
        softmax(rows_NV[place], p_V)
        token = drafted_N[place]
        q = probs_NV[place, token] if is_sampled_N[place] else _ONE
        if not coin(seed, num_tokens, place) * q < p_V[token]:
            return place
    return len(drafted_N)


@njit(cache=True, nogil=True)
def accept_block(rows_NV, drafted_N, is_sampled_N, probs_NV, seed, num_tokens, p_V):
    """(accepted drafts, weight) of one chain, as `verify.accept_block`; `p_V` is scratch."""
    log_weight, weight = 0.0, 1.0
    accepted, accepted_weight = 0, 1.0
    for place in range(len(drafted_N)):
        softmax(rows_NV[place], p_V)
        token = drafted_N[place]
        p, q = np.float64(p_V[token]), 1.0
        if is_sampled_N[place]:
            q = max(np.float64(probs_NV[place, token]), _TINY)
        if place > 0:
            if is_sampled_N[place]:
                left = _residual_mass(p_V, probs_NV[place], weight)
            else:
                left = weight * (1.0 - p)
            whole = left + (1.0 - weight)
            threshold = left / whole if whole > 0 else 0.0
            if coin(seed, num_tokens, place - 1) < threshold:
                accepted, accepted_weight = place, weight
        if p == 0:  # the target never says this: the weight is 0 from here on
            return accepted, accepted_weight
        log_weight = min(0.0, log_weight + np.log(p) - np.log(q))
        weight = np.exp(log_weight)
    if len(drafted_N) > 0 and coin(seed, num_tokens, len(drafted_N) - 1) < weight:
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
def last_token(
    rows_NV, drafted_N, is_sampled_N, probs_NV, accepted, weight, seed, num_tokens, buffer_V
):
    """The token after the accepted ones: bonus or recovered, as `verify.last_weights` has it."""
    position = num_tokens + accepted
    if accepted == len(drafted_N):
        return sample_logits(rows_NV[accepted], seed, position, 0, _SAMPLE)
    softmax(rows_NV[accepted], buffer_V)
    if is_sampled_N[accepted]:
        subtract(buffer_V, probs_NV[accepted], np.float32(weight))
    else:
        buffer_V[drafted_N[accepted]] = _ZERO
    return recovered_token(rows_NV[accepted], buffer_V, seed, position)


@njit(cache=True, nogil=True)
def subtract(p_V, q_V, weight) -> None:
    """p = max(weight * p - q, 0)."""
    for at in range(p_V.shape[0]):
        residual = weight * p_V[at] - q_V[at]
        p_V[at] = residual if residual > 0 else _ZERO


@njit(cache=True, nogil=True)
def recovered_token(logits_V, residual_V, seed, position):
    """A token of the residual; of the target itself where nothing is left."""
    if maximum(residual_V) > 0:
        return sample_weights(residual_V, seed, position, 0, _RECOVER)
    return sample_logits(logits_V, seed, position, 0, _RECOVER)
