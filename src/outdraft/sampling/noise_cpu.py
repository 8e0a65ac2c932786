"""The fast twin of `noise` for the CPU: the same bits, one pass per row.

Compiled without fast-math and without fused multiply-adds, so every operation rounds as the
tensor version's does.
"""

import numpy as np

from outdraft.core.jit import njit

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
_EXP_CEILINGS = np.exp(_CEILINGS.astype(np.float64)).astype(np.float32)
_BOUND_SLACK = 1 - 1e-5  # covers the rounding of exp(key), of which the key has 24 bits
_UNIT_SHIFT = np.uint64(9)  # 23 bits and a half fit into float32's 24
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


@njit(inline="always")
def _round(  # noqa: ANN202
    number: int,
    x0: np.uint64,
    x1: np.uint64,
    x2: np.uint64,
    x3: np.uint64,
    k0: np.uint64,
    k1: np.uint64,
):
    n = np.uint64(number)
    product0, product1 = x0 * _M0, x2 * _M1
    return (
        (product1 >> _SHIFT32) ^ x1 ^ ((k0 + n * _W0) & _MASK),
        product1 & _MASK,
        (product0 >> _SHIFT32) ^ x3 ^ ((k1 + n * _W1) & _MASK),
        product0 & _MASK,
    )


@njit(inline="always")
def _philox(  # noqa: ANN202
    block: int, seed: int, c1: int, c2: int, c3: int
):
    """Four words of noise, uint64 below 2**32. Rounds are written out so that loops vectorise."""
    x0, x1 = np.uint64(block), np.uint64(c1) & _MASK
    x2, x3 = np.uint64(c2) & _MASK, np.uint64(c3) & _MASK
    k0, k1 = np.uint64(seed) & _MASK, np.uint64(seed) >> _SHIFT32
    x0, x1, x2, x3 = _round(0, x0, x1, x2, x3, k0, k1)
    x0, x1, x2, x3 = _round(1, x0, x1, x2, x3, k0, k1)
    x0, x1, x2, x3 = _round(2, x0, x1, x2, x3, k0, k1)
    x0, x1, x2, x3 = _round(3, x0, x1, x2, x3, k0, k1)
    x0, x1, x2, x3 = _round(4, x0, x1, x2, x3, k0, k1)
    x0, x1, x2, x3 = _round(5, x0, x1, x2, x3, k0, k1)
    x0, x1, x2, x3 = _round(6, x0, x1, x2, x3, k0, k1)
    x0, x1, x2, x3 = _round(7, x0, x1, x2, x3, k0, k1)
    x0, x1, x2, x3 = _round(8, x0, x1, x2, x3, k0, k1)
    return _round(9, x0, x1, x2, x3, k0, k1)


@njit(cache=True)
def _fill_bits(seed: int, c1: int, c2: int, c3: int, out_V: np.ndarray) -> None:
    size = out_V.shape[0]
    words_4W = np.empty((4, (size + 3) // 4), dtype=np.uint32)
    w0_W, w1_W, w2_W, w3_W = words_4W[0], words_4W[1], words_4W[2], words_4W[3]
    for block in range(w0_W.shape[0]):
        w0_W[block], w1_W[block], w2_W[block], w3_W[block] = _philox(block, seed, c1, c2, c3)
    for block in range(size // 4):
        out_V[4 * block] = w0_W[block]
        out_V[4 * block + 1] = w1_W[block]
        out_V[4 * block + 2] = w2_W[block]
        out_V[4 * block + 3] = w3_W[block]
    for at in range(size // 4 * 4, size):
        out_V[at] = words_4W[at % 4, at // 4]


@njit(cache=True)
def uniform_scalar(seed: int, c1: int, c2: int, c3: int) -> np.float32:
    """float32 in (0, 1): vocabulary id 0 of position c1, anchor c2 and purpose c3."""
    word = _philox(0, seed, c1, c2, c3)[0]
    return np.float32((np.float64(word >> _UNIT_SHIFT) + 0.5) * 2.0**-23)


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


@njit(cache=True)
def _gumbel_of(
    bits: np.uint32,
    x: np.ndarray,
    x_bits: np.ndarray,
    exponent: np.ndarray,
    exponent_bits: np.ndarray,
) -> np.float32:
    """The noise of one word; the arrays are scratch of one number, as in `_log_in_place`."""
    x[0] = (np.float64(bits) + 0.5) * 2.0**-32
    _log_in_place(x, x_bits, exponent, exponent_bits)
    x[0] = -x[0]
    _log_in_place(x, x_bits, exponent, exponent_bits)
    return np.float32(-x[0])


@njit(cache=True, nogil=True)
def sample_logits(logits_V: np.ndarray, seed: int, c1: int, c2: int, c3: int) -> int:
    """argmax(logits + the noise of `fill_gumbel`) of one row, float32, the lowest id of a tie.

    c1, c2, c3 are position, anchor and purpose. Takes logarithms only where the leading bits of
    the noise leave a chance to win, which is a handful of tokens.
    """
    bits_V = np.empty(logits_V.shape[0], dtype=np.uint32)
    x, exponent = np.empty(1), np.empty(1)
    x_bits, exponent_bits = x.view(np.int64), exponent.view(np.int64)
    _fill_bits(seed, c1, c2, c3, bits_V)
    best, best_id = np.float32(-np.inf), 0
    for at in range(logits_V.shape[0]):
        if logits_V[at] + _CEILINGS[bits_V[at] >> _CEILING_SHIFT] > best:
            key = logits_V[at] + _gumbel_of(bits_V[at], x, x_bits, exponent, exponent_bits)
            if key > best:
                best, best_id = key, at
    return best_id


@njit(cache=True, nogil=True)
def sample_weights(weights_V: np.ndarray, seed: int, c1: int, c2: int, c3: int) -> int:
    """`sample_logits` of log(weights), weights of at least 0 and at most 1, one of them above 0.

    Compares exponentials first, so that logarithms of weights too are taken for a handful only.
    """
    bits_V = np.empty(weights_V.shape[0], dtype=np.uint32)
    x, exponent = np.empty(1), np.empty(1)
    x_bits, exponent_bits = x.view(np.int64), exponent.view(np.int64)
    _fill_bits(seed, c1, c2, c3, bits_V)
    best, best_id, bound = np.float32(-np.inf), 0, np.float32(0.0)
    for at in range(weights_V.shape[0]):
        if weights_V[at] * _EXP_CEILINGS[bits_V[at] >> _CEILING_SHIFT] > bound:
            noise = _gumbel_of(bits_V[at], x, x_bits, exponent, exponent_bits)
            key = np.float32(np.log(np.float64(weights_V[at]))) + noise
            if key > best:
                best, best_id = key, at
                bound = np.float32(np.exp(np.float64(best)) * _BOUND_SLACK)
    return best_id
