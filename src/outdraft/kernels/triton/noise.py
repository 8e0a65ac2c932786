# pyright: reportCallIssue=false
# A launch takes more than the parameters of the kernel.
"""Noise on a GPU, by the kernel of noise_kernels.py.

Dimension key: R rows, V vocabulary.
"""

import torch
import triton
from torch import Tensor

from outdraft.kernels.data.noise import NoiseKeys
from outdraft.kernels.torch.noise import LN2, LOG_SERIES, ROUNDS, SQRT2
from outdraft.kernels.triton import noise_kernels as kernels

# What kernels that make Gumbel noise are compiled for. A fused sum would round less: other bits.
GUMBEL = {
    "ROUNDS": ROUNDS,
    "LN2": LN2,
    "SQRT2": SQRT2,
    "SERIES": LOG_SERIES,
    "enable_fp_fusion": False,
}
_TILE = 256  # blocks of four tokens, or rows


def gumbel(keys: NoiseKeys, vocab_size: int) -> Tensor:
    num_rows = len(keys.seeds_R)
    noise_RV = torch.empty(num_rows, vocab_size, device=keys.seeds_R.device)
    if num_rows:
        kernels.gumbel_rows[(num_rows, triton.cdiv(vocab_size, 4 * _TILE))](
            *_columns(keys), noise_RV, vocab_size, TILE=_TILE, **GUMBEL
        )
    return noise_RV


def uniform_scalar(keys: NoiseKeys) -> Tensor:
    num_rows = len(keys.seeds_R)
    noise_R = torch.empty(num_rows, device=keys.seeds_R.device)
    if num_rows:
        kernels.uniform_of_rows[(triton.cdiv(num_rows, _TILE),)](
            *_columns(keys), noise_R, num_rows, TILE=_TILE, ROUNDS=ROUNDS, enable_fp_fusion=False
        )
    return noise_R


def _columns(keys: NoiseKeys) -> tuple[Tensor, ...]:
    columns = keys.seeds_R, keys.positions_R, keys.anchors_R, keys.purposes_R
    return tuple(column.contiguous() for column in columns)
