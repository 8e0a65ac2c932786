# numba infers the types of these functions and specialises on them.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# ruff: noqa: ANN001, ANN201
"""Token-level verification of sampled chains, one request at a time, for `verify_cpu`.

A row of the target is looked at only when the walk comes to it. Rows that were not sampled have a
one-hot q, which is nowhere written down.

Dimension key: N drafts of the request, V vocabulary.
"""

import numpy as np

from outdraft.core.jit import njit
from outdraft.sampling.noise import Purpose
from outdraft.sampling.noise_cpu import sample_logits, sample_weights, uniform_scalar
from outdraft.sampling.row_kernels import maximum, softmax

_ACCEPT, _RECOVER = int(Purpose.ACCEPT), int(Purpose.RECOVER)
_SAMPLE = int(Purpose.SAMPLE)
_ONE, _ZERO = np.float32(1), np.float32(0)
TINY = 2.0**-1022  # the least normal float64


@njit(cache=True, nogil=True)
def coin(seed, num_tokens, place):
    """The coin of a draft."""
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
def last_token(rows_NV, drafted_N, is_sampled_N, probs_NV, accepted, seed, num_tokens, buffer_V):
    """The token after those that `accept_tokens` accepted, as `verify.last_weights` has it."""
    position = num_tokens + accepted
    if accepted == len(drafted_N):
        return sample_logits(rows_NV[accepted], seed, position, 0, _SAMPLE)
    softmax(rows_NV[accepted], buffer_V)
    if is_sampled_N[accepted]:
        subtract(buffer_V, probs_NV[accepted], _ONE)
    else:
        buffer_V[drafted_N[accepted]] = _ZERO
    return recovered_token(rows_NV[accepted], buffer_V, seed, position)


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def subtract(p_V, q_V, weight):
    """p = max(weight * p - q, 0); its sum, in float64."""
    left = 0.0
    for at in range(p_V.shape[0]):
        rest = weight * p_V[at] - q_V[at]
        p_V[at] = rest if rest > 0 else _ZERO
        left += p_V[at]
    return left


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def subtract_one(p_V, token, weight):
    """The same where q has the one token only."""
    p_V[token] = _ZERO
    left = 0.0
    for at in range(p_V.shape[0]):
        p_V[at] *= weight
        left += p_V[at]
    return left


@njit(cache=True, nogil=True)
def recovered_token(logits_V, residual_V, seed, position):
    """A token of the residual; of the target itself where nothing is left."""
    if maximum(residual_V) > 0:
        return sample_weights(residual_V, seed, position, 0, _RECOVER)
    return sample_logits(logits_V, seed, position, 0, _RECOVER)
