# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN201, ANN202
# Triton infers the types of kernels and specialises on them. A launch takes more than their
# parameters.
"""Noise on a GPU: that of torch/noise.py, bit for bit, the same operations on each number.

Dimension key: R rows, V vocabulary, W blocks of a tile, each of which serves four neighbouring
vocabulary ids.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from outdraft.kernels.data.noise import NoiseKeys
from outdraft.kernels.torch.noise import LN2, LOG_SERIES, ROUNDS, SQRT2

MASK = tl.constexpr(0xFFFFFFFF)
MULTIPLIER_0, MULTIPLIER_1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
WEYL_0, WEYL_1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
FRACTION_MASK = tl.constexpr((1 << 52) - 1)
ONE_BITS = tl.constexpr(1023 << 52)
_LN2, _SQRT2, _SERIES = tl.constexpr(LN2), tl.constexpr(SQRT2), tl.constexpr(LOG_SERIES)
_ROUNDS = tl.constexpr(ROUNDS)
_TILE = 256  # blocks of four tokens, or rows


def gumbel(keys: NoiseKeys, vocab_size: int) -> Tensor:
    num_rows = len(keys.seeds_R)
    noise_RV = torch.empty(num_rows, vocab_size, device=keys.seeds_R.device)
    if num_rows:
        gumbel_rows[(num_rows, triton.cdiv(vocab_size, 4 * _TILE))](
            *_columns(keys), noise_RV, vocab_size, TILE=_TILE, enable_fp_fusion=False
        )
    return noise_RV


def uniform_scalar(keys: NoiseKeys) -> Tensor:
    num_rows = len(keys.seeds_R)
    noise_R = torch.empty(num_rows, device=keys.seeds_R.device)
    if num_rows:
        uniform_of_rows[(triton.cdiv(num_rows, _TILE),)](
            *_columns(keys), noise_R, num_rows, TILE=_TILE, enable_fp_fusion=False
        )
    return noise_R


def _columns(keys: NoiseKeys) -> tuple[Tensor, ...]:
    columns = keys.seeds_R, keys.positions_R, keys.anchors_R, keys.purposes_R
    return tuple(column.contiguous() for column in columns)


@triton.jit
def _log(x):
    """The logarithm of torch/noise.py, float64. A fused sum would round less: other bits."""
    bits = x.to(tl.int64, bitcast=True)
    fraction = ((bits & FRACTION_MASK) | ONE_BITS).to(tl.float64, bitcast=True)
    is_large = fraction > _SQRT2
    exponent = (bits >> 52) - 1023 + is_large.to(tl.int64)
    fraction = tl.where(is_large, fraction * 0.5, fraction)
    s = (fraction - 1.0) / (fraction + 1.0)
    square = s * s
    series = tl.zeros_like(s) + _SERIES[6]
    for place in tl.static_range(5, -1, -1):
        series = series * square
        series = series + _SERIES[place]
    return exponent.to(tl.float64) * _LN2 + s * series


@triton.jit
def gumbel_of_word(word):
    u = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    return (-_log(-_log(u))).to(tl.float32)


@triton.jit
def unit_of_word(word):
    return ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2 ** -23


@triton.jit
def philox(c0, c1, c2, c3, seed):
    """Four words of noise by the counter's words, int64 below 2**32: all of one shape, or one."""
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    for _ in tl.static_range(_ROUNDS):
        # The products wrap around in 64 bits, which leaves them right.
        product0, product1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0 = ((product1 >> 32) & MASK) ^ c1 ^ k0
        c1 = product1 & MASK
        c2 = ((product0 >> 32) & MASK) ^ c3 ^ k1
        c3 = product0 & MASK
        k0, k1 = (k0 + WEYL_0) & MASK, (k1 + WEYL_1) & MASK
    return c0, c1, c2, c3


@triton.jit(
    do_not_specialize=["size"],
    do_not_specialize_on_alignment=["seeds", "positions", "anchors", "purposes"],
)
def gumbel_rows(
    seeds,
    positions,
    anchors,
    purposes,
    out,  # float32 [R, size]
    size,
    TILE: tl.constexpr,
):
    """Gumbel noise of a key for each row. Grid: [R, tiles of blocks]."""
    row = tl.program_id(0)
    block_W = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    position, anchor = tl.load(positions + row) & MASK, tl.load(anchors + row) & MASK
    words = philox(block_W, position, anchor, tl.load(purposes + row), tl.load(seeds + row))
    for part in tl.static_range(4):
        id_W = block_W * 4 + part
        target = out + row.to(tl.int64) * size + id_W
        tl.store(target, gumbel_of_word(words[part]), mask=id_W < size)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["seeds", "positions", "anchors", "purposes"],
)
def uniform_of_rows(
    seeds,
    positions,
    anchors,
    purposes,
    out,  # float32 [R]
    num_rows,
    TILE: tl.constexpr,
):
    """Uniform noise of vocabulary id 0 for each row. Grid: [tiles of rows]."""
    row_R = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_row_R = row_R < num_rows
    seed_R = tl.load(seeds + row_R, mask=is_row_R, other=0)
    word_R, _, _, _ = philox(
        tl.zeros_like(seed_R),
        tl.load(positions + row_R, mask=is_row_R, other=0) & MASK,
        tl.load(anchors + row_R, mask=is_row_R, other=0) & MASK,
        tl.load(purposes + row_R, mask=is_row_R, other=0),
        seed_R,
    )
    tl.store(out + row_R, unit_of_word(word_R), mask=is_row_R)
