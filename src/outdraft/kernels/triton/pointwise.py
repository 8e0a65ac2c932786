# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN201
# Triton infers the types of kernels and specialises on them. A launch takes more than their
# parameters.
"""The pointwise parts of a decoder on a GPU, several steps in one kernel each.

They are what torch/pointwise.py computes, in as few launches as a layer has places where all rows
must be complete. Numbers are rounded to the network's dtype where the functions there round them;
between these places they are float32. A compiler must not fuse multiplications and additions: then
it would round less than the reference.

Dimension key: T rows, D size of a row, C head size, F = C / 2 frequencies, H heads, G kv heads, I
intermediate, M positions; in kernels D and F are rounded up.
"""

import triton
import triton.language as tl
from torch import Tensor

from outdraft.attention.base import AttentionMetadata, LayerCache
from outdraft.kernels.decoder_ops import DecoderSpec, LayerSpec

_SILU_TILE = 1024


def add_and_norm(
    residual_TD: Tensor, added_TD: Tensor | None, weight_D: Tensor, eps: float
) -> Tensor:
    """rms_norm of `residual_TD`, to which `added_TD` is added in place before; all contiguous."""
    out_TD, size = residual_TD.new_empty(residual_TD.shape), residual_TD.shape[-1]
    num_rows = residual_TD.numel() // size
    if num_rows:
        width = triton.next_power_of_2(size)
        add_and_norm_kernel[(num_rows,)](
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
    spec: DecoderSpec,
    layer: LayerSpec,
    cache: LayerCache,
    metadata: AttentionMetadata,
) -> Tensor:
    """[T, H, C]: the queries, normed and rotated. Keys, treated alike, and values go to the cache.

    Args:
        qkv_TE: contiguous; queries of all heads, then keys, then values of all kv heads.
    """
    num_rows, num_heads = len(qkv_TE), spec.num_heads
    num_kv_heads, head_size = cache.k_PSGC.shape[2:]
    q_THC = qkv_TE.new_empty(num_rows, num_heads, head_size)
    if num_rows:
        rotate_heads_kernel[(num_rows, num_heads + 2 * num_kv_heads)](
            qkv_TE,
            layer.q_norm_C,
            layer.k_norm_C,
            spec.cos_sin_MC,
            metadata.positions_T,
            metadata.slots_T,
            q_THC,
            cache.k_PSGC,
            cache.v_PSGE,
            spec.eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            SIZE=head_size,
            HALF_WIDTH=triton.next_power_of_2(head_size // 2),
            HAS_NORMS=layer.q_norm_C is not None,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return q_THC


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """silu(gate) * up of contiguous rows, [T, I]."""
    num_rows, size = len(gate_up_T2I), gate_up_T2I.shape[1] // 2
    out_TI = gate_up_T2I.new_empty(num_rows, size)
    if num_rows:
        silu_and_multiply_kernel[(num_rows, triton.cdiv(size, _SILU_TILE))](
            gate_up_T2I, out_TI, SIZE=size, TILE=_SILU_TILE, enable_fp_fusion=False
        )
    return out_TI


@triton.jit
def add_and_norm_kernel(
    residual,
    added,  # None unless HAS_ADDED
    weight,
    out,
    eps,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_ADDED: tl.constexpr,
):
    """residual += added; out = rms_norm(residual, weight). Rows are contiguous. Grid: [rows]."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    place_D = tl.arange(0, WIDTH)
    is_number_D = place_D < SIZE
    x_D = tl.load(residual + row + place_D, mask=is_number_D, other=0.0)
    dtype = x_D.dtype
    if HAS_ADDED:
        added_D = tl.load(added + row + place_D, mask=is_number_D, other=0.0)
        x_D = (x_D.to(tl.float32) + added_D.to(tl.float32)).to(dtype)
        tl.store(residual + row + place_D, x_D, mask=is_number_D)
    wide_D = x_D.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide_D * wide_D, axis=0) / SIZE + eps)
    weight_D = tl.load(weight + place_D, mask=is_number_D, other=0.0).to(tl.float32)
    normed_D = (wide_D * scale).to(dtype).to(tl.float32)
    tl.store(out + row + place_D, (weight_D * normed_D).to(dtype), mask=is_number_D)


# Where numbers of rows begin in the tensor that brought them says nothing: one kernel serves all.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def rotate_heads_kernel(
    qkv,  # [T, H + 2 G, C]
    q_norm,  # None unless HAS_NORMS
    k_norm,
    cos_sin,  # float32 [M, C]
    positions,
    slots,
    q_out,  # [T, H, C]
    k_cache,  # [slots, G, C]
    v_cache,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """Norm and rotate queries and keys; keys and values go to their slots. Grid: [T, H + 2 G]."""
    HALF: tl.constexpr = SIZE // 2
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place_F = tl.arange(0, HALF_WIDTH)
    is_number_F = place_F < HALF
    source = qkv + (row * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * SIZE
    low_F = tl.load(source + place_F, mask=is_number_F, other=0.0)
    high_F = tl.load(source + HALF + place_F, mask=is_number_F, other=0.0)
    dtype = low_F.dtype
    if head >= NUM_HEADS + NUM_KV_HEADS:
        slot = tl.load(slots + row)
        target = v_cache + (slot * NUM_KV_HEADS + head - NUM_HEADS - NUM_KV_HEADS) * SIZE
        is_kept_F = place_F < tl.where(slot >= 0, HALF, 0)
        tl.store(target + place_F, low_F.to(v_cache.dtype.element_ty), mask=is_kept_F)
        tl.store(target + HALF + place_F, high_F.to(v_cache.dtype.element_ty), mask=is_kept_F)
        return
    if HAS_NORMS:
        wide_low_F, wide_high_F = low_F.to(tl.float32), high_F.to(tl.float32)
        squares_F = wide_low_F * wide_low_F + wide_high_F * wide_high_F
        scale = tl.rsqrt(tl.sum(squares_F, axis=0) / SIZE + eps)
        norm = q_norm if head < NUM_HEADS else k_norm
        low_weight_F = tl.load(norm + place_F, mask=is_number_F, other=0.0).to(tl.float32)
        high_weight_F = tl.load(norm + HALF + place_F, mask=is_number_F, other=0.0).to(tl.float32)
        low_F = (low_weight_F * (wide_low_F * scale).to(dtype).to(tl.float32)).to(dtype)
        high_F = (high_weight_F * (wide_high_F * scale).to(dtype).to(tl.float32)).to(dtype)
    angles = cos_sin + tl.load(positions + row) * SIZE
    cos_F = tl.load(angles + place_F, mask=is_number_F, other=0.0)
    sin_F = tl.load(angles + HALF + place_F, mask=is_number_F, other=0.0)
    wide_low_F, wide_high_F = low_F.to(tl.float32), high_F.to(tl.float32)
    low_F = (wide_low_F * cos_F - wide_high_F * sin_F).to(dtype)
    high_F = (wide_high_F * cos_F + wide_low_F * sin_F).to(dtype)
    if head < NUM_HEADS:
        target = q_out + (row * NUM_HEADS + head) * SIZE
        tl.store(target + place_F, low_F, mask=is_number_F)
        tl.store(target + HALF + place_F, high_F, mask=is_number_F)
    else:
        slot = tl.load(slots + row)
        target = k_cache + (slot * NUM_KV_HEADS + head - NUM_HEADS) * SIZE
        is_kept_F = place_F < tl.where(slot >= 0, HALF, 0)
        tl.store(target + place_F, low_F.to(k_cache.dtype.element_ty), mask=is_kept_F)
        tl.store(target + HALF + place_F, high_F.to(k_cache.dtype.element_ty), mask=is_kept_F)


@triton.jit
def silu_and_multiply_kernel(gate_up, out, SIZE: tl.constexpr, TILE: tl.constexpr):
    """silu(gate) * up of contiguous rows [T, 2 * SIZE]. Grid: [T, tiles of a row]."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_number = place < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + place, mask=is_number, other=0.0)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + place, mask=is_number, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    product = (silu * up.to(tl.float32)).to(gate.dtype)
    tl.store(out + row * SIZE + place, product, mask=is_number)
