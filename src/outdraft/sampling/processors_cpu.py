# numba infers the types of these functions and specialises on them.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# ruff: noqa: ANN001, ANN202
"""The fast twin of the last stages of `processors`: temperature, min_p, top_k and top_p.

One pass over a row does the temperature. Nothing is sorted but one bucket of a histogram: the
one in which the k-th logit, or the border of the nucleus, lies.

Dimension key: B requests, R rows, V vocabulary, H buckets of a histogram.
"""

import numpy as np

from outdraft.core.jit import njit
from outdraft.sampling.row_kernels import divide, exp_below, maximum, total

_MASKED = np.float32(-np.inf)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
# A scaled logit x <= 0 falls into a bucket by the leading bits of |x|: 32 buckets for every
# doubling from 2**-8 to 2**16. Smaller ones share the first bucket, larger ones the last.
_BUCKET_SHIFT, _FIRST_BUCKET, _NUM_BUCKETS = 18, (127 - 8) << 5, 24 << 5


@njit(cache=True, nogil=True)
def process_rows(
    logits_RV, request_R, temperature_B, least_B, top_k_B, top_p_B, needs_min_p, processed_RV
) -> None:
    """Write the processed rows; float32, but request_R and top_k_B int64.

    The parameters are those of `SamplingBatch`; `least_B` is the logarithm of min_p, and is not
    read unless `needs_min_p`.
    """
    size = logits_RV.shape[1]
    buffer_V = np.empty(size, dtype=np.float32)
    for row in range(logits_RV.shape[0]):
        b = request_R[row]
        x_V = processed_RV[row]
        least = least_B[b] if needs_min_p else _MASKED
        _scale(logits_RV[row], temperature_B[b], least, x_V)
        if top_k_B[b] < size:
            kth = _kth_largest(x_V, top_k_B[b], buffer_V)
            for at in range(size):
                x_V[at] = _MASKED if x_V[at] < kth else x_V[at]
        if top_p_B[b] < _ONE:
            _mask_outside_nucleus(x_V, top_p_B[b], buffer_V)


@njit(cache=True, nogil=True)
def _scale(logits_V, temperature, least, x_V) -> None:
    """Temperature, with the best logit moved to 0, then min_p: mask what is below `least`."""
    best = maximum(logits_V)
    for at in range(logits_V.shape[0]):
        x = (logits_V[at] - best) / temperature
        x_V[at] = _MASKED if x < least else x


@njit(cache=True, nogil=True)
def _bucket(bits):
    """The bucket of the number with these bits; later buckets hold smaller numbers."""
    return min(max(((bits & 0x7FFFFFFF) >> _BUCKET_SHIFT) - _FIRST_BUCKET, 0), _NUM_BUCKETS - 1)


@njit(cache=True, nogil=True)
def _sorted_bucket(x_V, wanted, buffer_V):
    """The numbers of one bucket, ascending."""
    bits_V = x_V.view(np.int32)
    count = 0
    for at in range(x_V.shape[0]):
        if _bucket(bits_V[at]) == wanted:
            buffer_V[count] = x_V[at]
            count += 1
    return np.sort(buffer_V[:count])


@njit(cache=True, nogil=True)
def _kth_largest(x_V, k, buffer_V):
    """The k-th largest number; -inf where fewer than k are left."""
    bits_V = x_V.view(np.int32)
    counts_H = np.zeros(_NUM_BUCKETS, dtype=np.int64)
    for at in range(x_V.shape[0]):
        if x_V[at] > _MASKED:
            counts_H[_bucket(bits_V[at])] += 1
    bucket, before = 0, 0
    while before + counts_H[bucket] < k:
        before += counts_H[bucket]
        bucket += 1
        if bucket == _NUM_BUCKETS:
            return _MASKED
    ascending = _sorted_bucket(x_V, bucket, buffer_V)
    return ascending[len(ascending) - (k - before)]


@njit(cache=True, nogil=True)
def _mask_outside_nucleus(x_V, top_p, buffer_V) -> None:
    """Mask the smallest logits whose mass together is at most 1 - top_p.

    Walks down from the best one and stops where what is left is small enough. Masses are float32,
    their sums float64, rounded before they are compared: as torch's cumsum does it.
    """
    rest = _ONE - top_p
    bits_V = x_V.view(np.int32)
    exp_below(x_V, _ZERO, buffer_V)
    whole = np.float32(total(buffer_V))
    divide(buffer_V, whole)
    masses_H = np.zeros(_NUM_BUCKETS)
    for at in range(x_V.shape[0]):
        if buffer_V[at] > _ZERO:
            masses_H[_bucket(bits_V[at])] += buffer_V[at]
    left, bucket = total(masses_H), 0
    while np.float32(left - masses_H[bucket]) > rest:
        left -= masses_H[bucket]
        bucket += 1

    ascending = _sorted_bucket(x_V, bucket, buffer_V)
    if len(ascending) == 0:  # a row of NaN
        return
    exp_below(ascending, _ZERO, buffer_V)
    place = len(ascending) - 1
    left -= buffer_V[place] / whole
    while place > 0 and np.float32(left) > rest:
        place -= 1
        left -= buffer_V[place] / whole
    _mask_below(x_V, ascending, place)


@njit(cache=True, nogil=True)
def _mask_below(x_V, ascending, place) -> None:
    """Mask what is below ascending[place], and of its ties the last as many as are before it."""
    border, surplus, kept = ascending[place], 0, 1
    while surplus < place and ascending[place - surplus - 1] == border:
        surplus += 1
    while place + kept < len(ascending) and ascending[place + kept] == border:
        kept += 1
    for at in range(x_V.shape[0]):
        x_V[at] = _MASKED if x_V[at] < border else x_V[at]
    for at in range(x_V.shape[0] if surplus > 0 else 0):
        if x_V[at] == border:
            kept -= 1
            x_V[at] = _MASKED if kept < 0 else border
