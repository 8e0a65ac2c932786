# pyright: reportCallIssue=false
# A launch takes more than the parameters of the kernel.
"""The pointwise parts of a decoder on a GPU, by the kernels of pointwise_kernels.py.

They are what torch/pointwise.py computes, in as few launches as a layer has places where all
rows must be complete. A compiler must not fuse multiplications and additions: then it would round
less than the reference.

Dimension key: T rows, D hidden, H heads, G kv heads, C head size, I intermediate, M positions.
"""

from typing import NamedTuple

import triton
from torch import Tensor

from outdraft.attention.base import AttentionMetadata, LayerCache
from outdraft.kernels.triton import pointwise_kernels as kernels

_SILU_TILE = 1024


class HeadNorms(NamedTuple):
    """Weights of the norms of queries and keys; None: there are none."""

    q_C: Tensor | None
    k_C: Tensor | None


def add_and_norm(
    residual_TD: Tensor, added_TD: Tensor | None, weight_D: Tensor, eps: float
) -> Tensor:
    """rms_norm of `residual_TD`, to which `added_TD` is added in place before; all contiguous."""
    out_TD, size = residual_TD.new_empty(residual_TD.shape), residual_TD.shape[-1]
    num_rows = residual_TD.numel() // size
    if num_rows:
        width = triton.next_power_of_2(size)
        kernels.add_and_norm[(num_rows,)](
            residual_TD,
            added_TD,
            weight_D,
            out_TD,
            eps,
            SIZE=size,
            WIDTH=width,
            HAS_ADDED=added_TD is not None,
            num_warps=min(16, max(1, width // 512)),
            enable_fp_fusion=False,
        )
    return out_TD


def rotate_heads(
    qkv_TE: Tensor,
    num_heads: int,
    norms: HeadNorms,
    cos_sin_MC: Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    eps: float,
) -> Tensor:
    """[T, H, C]: the queries, normed and rotated. Keys, treated alike, and values go to the cache.

    Args:
        qkv_TE: contiguous; queries of all heads, then keys, then values of all kv heads.
    """
    num_rows, num_kv_heads, head_size = len(qkv_TE), *cache.k_PSGC.shape[2:]
    q_THC = qkv_TE.new_empty(num_rows, num_heads, head_size)
    if num_rows:
        kernels.rotate_heads[(num_rows, num_heads + 2 * num_kv_heads)](
            qkv_TE,
            norms.q_C,
            norms.k_C,
            cos_sin_MC,
            metadata.positions_T,
            metadata.slots_T,
            q_THC,
            cache.k_PSGC,
            cache.v_PSGE,
            eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            SIZE=head_size,
            HALF_WIDTH=triton.next_power_of_2(head_size // 2),
            HAS_NORMS=norms.q_C is not None,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return q_THC


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """silu(gate) * up of contiguous rows, [T, I]."""
    num_rows, size = len(gate_up_T2I), gate_up_T2I.shape[1] // 2
    out_TI = gate_up_T2I.new_empty(num_rows, size)
    if num_rows:
        kernels.silu_and_multiply[(num_rows, triton.cdiv(size, _SILU_TILE))](
            gate_up_T2I, out_TI, SIZE=size, TILE=_SILU_TILE, enable_fp_fusion=False
        )
    return out_TI
