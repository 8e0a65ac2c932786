"""Counter-based noise: a pure function of (seed, position, vocabulary id, purpose).

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). The key is the
request's seed. The counter is (vocabulary id // 4, text position, anchor, purpose); one block
serves four neighbouring vocabulary ids. The same bits come out on every device, in any batch.

The *position* is that of the token being chosen. The *anchor* of noise that decides about drafts
(Purpose.DRAFT and Purpose.ACCEPT) must be the number of committed tokens when the step began.
Positions past the end of a step come back in the next one, and block verification has looked at
their drafts and coins to find that end: noise that was keyed by the position alone would be
conditioned on the outcome of the step before, and the output would be biased. SAMPLE and RECOVER
noise is used for emitted tokens only, so it needs no anchor. In a tree several nodes draw at one
position: the anchor of a drawn child is the number of committed tokens + (its parent's row << 24),
so that the draws of a level are independent.

This module is written with tensors, for any device; `noise_cpu` is its fast twin for the CPU.

Dimension key: R rows, V vocabulary, W = ceil(V / 4) blocks.
"""

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from outdraft.sampling import noise_cpu
from outdraft.sampling.noise_cpu import LN2, LOG_SERIES, SQRT2

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

_EXPONENT_SHIFT = 52
_FRACTION_MASK = (1 << 52) - 1
_ONE_BITS = 1023 << 52


class Purpose(IntEnum):
    """What a piece of noise decides. Each purpose is an independent stream."""

    DRAFT = 0
    ACCEPT = 1
    RECOVER = 2
    SAMPLE = 3


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Four words of noise of a counter of four words and a key of two, all int64 in [0, 2**32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
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


def random_bits(
    seeds_R: Tensor,
    positions_R: Tensor,
    purpose: Tensor | int,
    vocab_size: int,
    anchors_R: Tensor | None = None,
) -> Tensor:
    """int64 [R, V] in [0, 2**32). Arguments as for `uniform`."""
    device = seeds_R.device
    blocks_W = torch.arange((vocab_size + 3) // 4, device=device)
    zeros_RW = torch.zeros_like(seeds_R)[:, None] * blocks_W
    anchors_RW = zeros_RW if anchors_R is None else zeros_RW + (anchors_R & _MASK)[:, None]
    purposes_RW = zeros_RW + (purpose[:, None] if isinstance(purpose, Tensor) else int(purpose))
    counter = (
        zeros_RW + blocks_W,
        zeros_RW + (positions_R & _MASK)[:, None],
        anchors_RW,
        purposes_RW,
    )
    key = ((seeds_R & _MASK)[:, None], ((seeds_R >> 32) & _MASK)[:, None])
    words = torch.stack(philox4x32(counter, key), dim=-1)
    return words.flatten(1)[:, :vocab_size]


def uniform(
    seeds_R: Tensor,
    positions_R: Tensor,
    purpose: Tensor | int,
    vocab_size: int,
    anchors_R: Tensor | None = None,
) -> Tensor:
    """float32 [R, V] in (0, 1), symmetric around one half.

    Args:
        seeds_R: int64.
        positions_R: int64 text positions of the tokens to be chosen.
        purpose: of all rows, or int64 [R].
        anchors_R: int64 committed tokens when the step began, for DRAFT and ACCEPT.
    """
    return _unit(random_bits(seeds_R, positions_R, purpose, vocab_size, anchors_R))


def uniform_scalar(
    seeds: Tensor, positions: Tensor, purpose: Tensor | int, anchors: Tensor | None = None
) -> Tensor:
    """float32 in (0, 1) of any one shape: vocabulary id 0 of `uniform`, per element."""
    bits = random_bits(
        seeds.flatten(),
        positions.flatten(),
        purpose.flatten() if isinstance(purpose, Tensor) else purpose,
        1,
        None if anchors is None else anchors.flatten(),
    )
    return _unit(bits).view(seeds.shape)


def gumbel(
    seeds_R: Tensor,
    positions_R: Tensor,
    purpose: Tensor | int,
    vocab_size: int,
    anchors_R: Tensor | None = None,
) -> Tensor:
    """float32 [R, V] of standard Gumbel noise: -log(-log(u)); arguments as for `uniform`.

    u has all 32 bits, in float64, so that even the rarest token of a large vocabulary gets its
    share. The logarithm is our own, of operations that IEEE 754 fixes, so that every device
    and both twins give the same bits.
    """
    if seeds_R.device.type == "cpu":
        return gumbel_cpu(seeds_R, positions_R, purpose, vocab_size, anchors_R)
    return gumbel_reference(seeds_R, positions_R, purpose, vocab_size, anchors_R)


def gumbel_reference(
    seeds_R: Tensor,
    positions_R: Tensor,
    purpose: Tensor | int,
    vocab_size: int,
    anchors_R: Tensor | None = None,
) -> Tensor:
    """`gumbel` on any device."""
    bits_RV = random_bits(seeds_R, positions_R, purpose, vocab_size, anchors_R)
    u_RV = (bits_RV.double() + 0.5) * 2.0**-32
    return (-_log(-_log(u_RV))).float()


def gumbel_cpu(
    seeds_R: Tensor,
    positions_R: Tensor,
    purpose: Tensor | int,
    vocab_size: int,
    anchors_R: Tensor | None = None,
) -> Tensor:
    """`gumbel` of CPU tensors."""
    noise_RV = torch.empty(len(seeds_R), vocab_size, dtype=torch.float32)
    keys = _key_arrays(seeds_R, positions_R, purpose, anchors_R)
    noise_cpu.fill_gumbel(*keys, noise_RV.numpy())
    return noise_RV


def sample_gumbel(
    logits_RV: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    purpose: Tensor | int,
    anchors_R: Tensor | None = None,
) -> Tensor:
    """int64 [R]: argmax(logits + gumbel), a sample of softmax(logits); the lowest id of a tie."""
    noise_RV = gumbel(seeds_R, positions_R, purpose, logits_RV.shape[1], anchors_R)
    return (logits_RV + noise_RV).argmax(1)


def _key_arrays(
    seeds_R: Tensor, positions_R: Tensor, purpose: Tensor | int, anchors_R: Tensor | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Contiguous int64 seeds, positions, anchors and purposes of CPU tensors."""
    zeros_R = torch.zeros_like(seeds_R)
    anchors_R = zeros_R if anchors_R is None else anchors_R
    return (
        seeds_R.contiguous().numpy(),
        positions_R.contiguous().numpy(),
        anchors_R.contiguous().numpy(),
        (zeros_R + purpose).contiguous().numpy(),
    )


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
