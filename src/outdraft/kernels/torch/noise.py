"""Counter-based noise: a pure function of (seed, position, vocabulary id, purpose, anchor).

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). The key is the
request's seed. The counter is (vocabulary id // 4, text position, anchor, purpose); one block
serves four neighbouring vocabulary ids. The same bits come out on every device, in any batch.
`data.noise` says what the parts of a key are.

Dimension key: R rows, V vocabulary, W = ceil(V / 4) blocks.
"""

from typing import Protocol

import torch
from torch import Tensor

from outdraft.kernels.data.noise import NOISE_NUMBERS, Gumbel, NoiseKeys

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

_EXPONENT_SHIFT = 52
_FRACTION_MASK = (1 << 52) - 1
_ONE_BITS = 1023 << 52
LN2, SQRT2 = 0.6931471805599453, 1.4142135623730951
# 2 / (2 k + 1): log((1 + s) / (1 - s)) / s as a series in s * s, good to 1e-10 for |s| < 0.172.
LOG_SERIES = (2.0, 2 / 3, 2 / 5, 2 / 7, 2 / 9, 2 / 11, 2 / 13)


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Four words of noise of a counter of four words and a key of two, all int64 in [0, 2**32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The products wrap around in int64, which leaves their 64 bits right.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def random_bits(keys: NoiseKeys, vocab_size: int) -> Tensor:
    """int64 [R, V] in [0, 2**32)."""
    blocks_W = torch.arange((vocab_size + 3) // 4, device=keys.seeds_R.device)
    zeros_RW = torch.zeros_like(keys.seeds_R)[:, None] * blocks_W
    counter = (
        zeros_RW + blocks_W,
        zeros_RW + (keys.positions_R & _MASK)[:, None],
        zeros_RW + (keys.anchors_R & _MASK)[:, None],
        zeros_RW + keys.purposes_R[:, None],
    )
    key = ((keys.seeds_R & _MASK)[:, None], ((keys.seeds_R >> 32) & _MASK)[:, None])
    words = torch.stack(philox4x32(counter, key), dim=-1)
    return words.flatten(1)[:, :vocab_size]


def uniform(keys: NoiseKeys, vocab_size: int) -> Tensor:
    """float32 [R, V] in (0, 1), symmetric around one half."""
    return _unit(random_bits(keys, vocab_size))


def uniform_scalar(keys: NoiseKeys) -> Tensor:
    """float32 [R] in (0, 1): vocabulary id 0 of `uniform`."""
    return uniform(keys, 1)[:, 0]


def gumbel(keys: NoiseKeys, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float32 [R, V], the same bits in every implementation: -log(-log(u)).

    u has all 32 bits, in float64, so that even the rarest token of a large vocabulary gets its
    share. The logarithm is our own, of operations that IEEE 754 fixes, so that every device
    gives the same bits.
    """
    noise_RV = torch.empty(len(keys.seeds_R), vocab_size, device=keys.seeds_R.device)
    num_rows = max(1, NOISE_NUMBERS // vocab_size)
    for to_RV, some in zip(noise_RV.split(num_rows), keys.split(num_rows), strict=True):
        u_RV = (random_bits(some, vocab_size).double() + 0.5) * 2.0**-32
        to_RV.copy_(-_log(-_log(u_RV)))
    return noise_RV


class Noise(Protocol):
    """A maker of noise: this module, or another one that makes the same bits."""

    def gumbel(self, keys: NoiseKeys, vocab_size: int) -> Tensor: ...

    def uniform_scalar(self, keys: NoiseKeys) -> Tensor: ...


def sample_gumbel(logits_RV: Tensor, keys: NoiseKeys, gumbel: Gumbel = gumbel) -> Tensor:
    """int64 [R]: argmax(logits + gumbel), a sample of softmax(logits); the lowest id of a tie.

    `gumbel`: a faster maker of the same bits.
    """
    return (logits_RV + gumbel(keys, logits_RV.shape[1])).argmax(1)


def _unit(bits: Tensor) -> Tensor:
    # 23 bits and a half fit into float32's 24, so that nothing rounds to 1.
    return ((bits >> 9).float() + 0.5) * 2.0**-23


def _log(x: Tensor) -> Tensor:
    """Natural logarithm of normal positive float64 numbers, to 1e-10, the same bits anywhere."""
    bits = x.view(torch.int64)
    fraction = ((bits & _FRACTION_MASK) | _ONE_BITS).view(torch.float64)
    is_large = fraction > SQRT2
    exponent = (bits >> _EXPONENT_SHIFT) - 1023 + is_large.long()
    fraction = torch.where(is_large, fraction * 0.5, fraction)
    s = (fraction - 1.0) / (fraction + 1.0)
    square = s * s
    series = torch.full_like(s, LOG_SERIES[-1])
    for coefficient in LOG_SERIES[-2::-1]:
        series = series * square
        series = series + coefficient
    return exponent.double() * LN2 + s * series
