"""The fast twin of `noise` for the CPU: the same bits, one pass per row.

Compiled without fast-math and without fused multiply-adds, so every operation rounds as the
tensor version's does.
"""

import numpy as np
from numba import njit

LN2 = 0.6931471805599453
SQRT2 = 1.4142135623730951
# 2 / (2 k + 1): log((1 + s) / (1 - s)) / s as a series in s * s, good to 1e-10 for |s| < 0.172.
LOG_SERIES = (2.0, 2 / 3, 2 / 5, 2 / 7, 2 / 9, 2 / 11, 2 / 13)

_L0, _L1, _L2, _L3, _L4, _L5, _L6 = LOG_SERIES
_MASK = np.uint64(0xFFFFFFFF)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_SHIFT32 = np.uint64(32)
_FRACTION_MASK = np.int64((1 << 52) - 1)
_ONE_BITS = np.int64(1023 << 52)
_EXPONENT_SHIFT = np.int64(52)
_TWO52, _TWO52_BITS = 2.0**52, np.int64((1023 + 52) << 52)  # a double whose low bits count ones
# No Gumbel noise whose bits begin with these 12 is larger; the slack covers the logarithm's error.
_CEILING_SHIFT = np.uint32(20)
_CEILINGS = (-np.log(-np.log((np.arange(1, 4097) - 2.0**-21) / 4096)) + 1e-6).astype(np.float32)
_CHUNK = 1024  # numbers whose scratch stays in the nearest cache


@njit(cache=True)
def _log_in_place(
    x_V: np.ndarray, x_bits_V: np.ndarray, exponent_V: np.ndarray, exponent_bits_V: np.ndarray
) -> None:
    """x = log(x); `x_bits_V` views x, `exponent_V` and its view are scratch. Loops vectorise."""
    for at in range(x_V.shape[0]):
        bits = x_bits_V[at]
        exponent_bits_V[at] = (bits >> _EXPONENT_SHIFT) | _TWO52_BITS
        x_bits_V[at] = (bits & _FRACTION_MASK) | _ONE_BITS
    for at in range(x_V.shape[0]):
        fraction = x_V[at]
        exponent = exponent_V[at] - (_TWO52 + 1023.0)
        is_large = fraction > SQRT2
        exponent = exponent + 1.0 if is_large else exponent
        fraction = fraction * 0.5 if is_large else fraction
        s = (fraction - 1.0) / (fraction + 1.0)
        square = s * s
        series = ((((_L6 * square + _L5) * square + _L4) * square + _L3) * square + _L2) * square
        series = ((series + _L1) * square) + _L0
        x_V[at] = exponent * LN2 + s * series


@njit(cache=True)
def _fill_bits(seed: np.int64, c1: np.int64, c2: np.int64, c3: np.int64, out_V: np.ndarray) -> None:
    size = out_V.shape[0]
    for block in range((size + 3) // 4):
        x0, x1 = np.uint64(block), np.uint64(c1) & _MASK
        x2, x3 = np.uint64(c2) & _MASK, np.uint64(c3) & _MASK
        k0, k1 = np.uint64(seed) & _MASK, np.uint64(seed) >> _SHIFT32
        for _ in range(10):
            product0, product1 = x0 * _M0, x2 * _M1
            x0 = (product1 >> _SHIFT32) ^ x1 ^ k0
            x1 = product1 & _MASK
            x2 = (product0 >> _SHIFT32) ^ x3 ^ k1
            x3 = product0 & _MASK
            k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
        first = 4 * block
        if first + 4 <= size:
            out_V[first] = x0
            out_V[first + 1] = x1
            out_V[first + 2] = x2
            out_V[first + 3] = x3
        else:
            words = (x0, x1, x2, x3)
            for at in range(size - first):
                out_V[first + at] = words[at]


@njit(cache=True, nogil=True)
def fill_gumbel(
    seeds_R: np.ndarray,
    positions_R: np.ndarray,
    anchors_R: np.ndarray,
    purposes_R: np.ndarray,
    noise_RV: np.ndarray,
) -> None:
    """Write float32 Gumbel noise to `noise_RV`; the other arguments are int64 [R]."""
    size = noise_RV.shape[1]
    bits_V = np.empty(size, dtype=np.uint32)
    x, exponent = np.empty(_CHUNK), np.empty(_CHUNK)
    x_bits, exponent_bits = x.view(np.int64), exponent.view(np.int64)
    for row in range(noise_RV.shape[0]):
        _fill_bits(seeds_R[row], positions_R[row], anchors_R[row], purposes_R[row], bits_V)
        for start in range(0, size, _CHUNK):
            n = min(_CHUNK, size - start)
            for at in range(n):
                x[at] = (np.float64(bits_V[start + at]) + 0.5) * 2.0**-32
            _log_in_place(x[:n], x_bits[:n], exponent[:n], exponent_bits[:n])
            for at in range(n):
                x[at] = -x[at]
            _log_in_place(x[:n], x_bits[:n], exponent[:n], exponent_bits[:n])
            for at in range(n):
                noise_RV[row, start + at] = np.float32(-x[at])


@njit(cache=True, nogil=True)
def sample_gumbel(
    logits_RV: np.ndarray,
    seeds_R: np.ndarray,
    positions_R: np.ndarray,
    anchors_R: np.ndarray,
    purposes_R: np.ndarray,
    ids_R: np.ndarray,
) -> None:
    """ids = argmax(logits + the noise of `fill_gumbel`), float32, the lowest id of a tie.

    Takes logarithms only where the leading bits of the noise leave a chance to win, which is a
    handful of tokens a row.
    """
    size = logits_RV.shape[1]
    bits_V = np.empty(size, dtype=np.uint32)
    x, exponent = np.empty(1), np.empty(1)
    x_bits, exponent_bits = x.view(np.int64), exponent.view(np.int64)
    for row in range(logits_RV.shape[0]):
        _fill_bits(seeds_R[row], positions_R[row], anchors_R[row], purposes_R[row], bits_V)
        best, best_id = np.float32(-np.inf), 0
        for at in range(size):
            if logits_RV[row, at] + _CEILINGS[bits_V[at] >> _CEILING_SHIFT] > best:
                x[0] = (np.float64(bits_V[at]) + 0.5) * 2.0**-32
                _log_in_place(x, x_bits, exponent, exponent_bits)
                x[0] = -x[0]
                _log_in_place(x, x_bits, exponent, exponent_bits)
                key = logits_RV[row, at] + np.float32(-x[0])
                if key > best:
                    best, best_id = key, at
        ids_R[row] = best_id
