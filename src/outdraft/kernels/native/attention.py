"""Paged tree attention, and its mass by blocks, by the compiled library.

Dimension key: as in attention/base.py; B requests, P blocks of a request.
"""

import ctypes
import weakref
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from outdraft.attention.base import (
    AttentionForm,
    AttentionMetadata,
    AttentionSizes,
    LayerCache,
    with_dense_rows,
)
from outdraft.kernels.native.arrays import Addresses, address_of
from outdraft.kernels.native.library import Team

_NO_LIMIT = 1 << 30  # longer than any text


class CAttentionBatch(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("q", "out", "k", "v")),
        *((name, c_void_p) for name in ("query_start", "context_lens", "num_causal")),
        *((name, c_void_p) for name in ("ancestors", "positions", "block_table", "sinks")),
        *((name, c_int64) for name in ("num_requests", "num_rows", "num_heads", "num_kv_heads")),
        *((name, c_int64) for name in ("block_size", "q_stride", "table_stride")),
        *((name, c_int32) for name in ("key_size", "value_size", "window", "chunk")),
        *((name, c_float) for name in ("scale", "soft_cap")),
        *((name, c_int32) for name in ("is_bf16_query", "is_bf16_out", "is_bf16_cache")),
    )


def limit(positions: int | None) -> int:
    """A window or a chunk as the library reads it."""
    return _NO_LIMIT if positions is None else min(positions, _NO_LIMIT)


class NativeAttention:
    """The operations of csrc/attention.cpp, for float32 and bfloat16 tensors on the CPU.

    Queries and cache may differ in dtype; scores, softmax and sums are float32. Rows after the
    last request are padding: their result is zero.
    """

    def __init__(self, team: Team) -> None:
        library = team.library
        create = library.function("attention_create", [c_void_p], c_void_p)
        destroy = library.function("attention_destroy", [c_void_p], releases_gil=True)
        arguments = [c_void_p, POINTER(CAttentionBatch), c_void_p]
        self._attend = library.function("attention_attend", arguments, releases_gil=True)
        rows, cached = [c_void_p, c_int64, c_int64], [c_void_p, c_int64]
        self._write = library.function(
            "attention_write", [*rows, *cached, c_void_p, c_int64, c_int64]
        )
        self._team = team
        self._memory = create(team.address)
        weakref.finalize(self, destroy, self._memory)

    def write(self, k_TGC: Tensor, v_TGE: Tensor, cache: LayerCache, slots_T: Tensor) -> None:
        for new_TGC, cached_PSGC in ((k_TGC, cache.k_PSGC), (v_TGE, cache.v_PSGE)):
            new_TGC = with_dense_rows(new_TGC)
            self._write(
                new_TGC.data_ptr(),
                new_TGC.stride(0),
                _is_bf16(new_TGC),
                address_of(cached_PSGC, cached_PSGC.dtype),
                _is_bf16(cached_PSGC),
                address_of(slots_T, torch.int64),
                new_TGC.shape[0],
                new_TGC.shape[1] * new_TGC.shape[2],
            )

    def attend(
        self,
        q_THC: Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        form: AttentionForm,
    ) -> Tensor:
        q_THC = with_dense_rows(q_THC)
        num_rows, num_heads, key_size = q_THC.shape
        _, block_size, num_kv_heads, value_size = cache.v_PSGE.shape
        out_THE = torch.empty((num_rows, num_heads, value_size), dtype=q_THC.dtype)
        sinks_H = None if form.sinks_H is None else form.sinks_H.float().contiguous()
        table_BP = metadata.block_table_BP.contiguous()  # the runner's may be a slice
        batch = CAttentionBatch(
            q=q_THC.data_ptr(),
            out=out_THE.data_ptr(),
            k=address_of(cache.k_PSGC, cache.k_PSGC.dtype),
            v=address_of(cache.v_PSGE, cache.k_PSGC.dtype),
            query_start=address_of(metadata.query_start_B1, torch.int32),
            context_lens=address_of(metadata.context_lens_B, torch.int32),
            num_causal=address_of(metadata.num_causal_B, torch.int32),
            ancestors=address_of(metadata.ancestors_T, torch.int64),
            positions=address_of(metadata.positions_T, torch.int64),
            block_table=address_of(table_BP, torch.int32),
            sinks=None if sinks_H is None else sinks_H.data_ptr(),
            num_requests=metadata.context_lens_B.shape[0],
            num_rows=num_rows,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            key_size=key_size,
            value_size=value_size,
            block_size=block_size,
            q_stride=q_THC.stride(0),
            table_stride=table_BP.shape[1],
            window=limit(form.window),
            chunk=limit(form.chunk),
            scale=form.scale,
            soft_cap=form.soft_cap or 0.0,
            is_bf16_query=_is_bf16(q_THC),
            is_bf16_out=_is_bf16(q_THC),
            is_bf16_cache=_is_bf16(cache.k_PSGC),
        )
        self._attend(self._team.address, ctypes.byref(batch), self._memory)
        return out_THE

    def temporary_bytes(self, most: AttentionSizes) -> int:
        return 0  # sums over parts of a context are too small to count


class _CMassTask(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "block_table", "num_keys", "mass")),
        *((name, c_int64) for name in ("num_requests", "num_heads", "num_kv_heads", "head_size")),
        *((name, c_int64) for name in ("block_size", "table_width")),
        ("scale", c_float),
        *((name, c_int32) for name in ("is_bf16", "is_bf16_query")),
    )


class NativeBlockMass:
    """The operation of csrc/block_mass.cpp, for float32 and bfloat16 on the CPU.

    Scores and sums are float32.
    """

    def __init__(self, team: Team) -> None:
        arguments = [c_void_p, POINTER(_CMassTask)]
        self._block_mass = team.library.function("block_mass", arguments, releases_gil=True)
        self._team = team

    def __call__(
        self,
        q_BHC: Tensor,
        k_PSGC: Tensor,
        block_table_BP: Tensor,
        num_keys_B: Tensor,
        scale: float,
    ) -> Tensor:
        at, (num_requests, num_heads, head_size) = Addresses(), q_BHC.shape
        num_blocks = block_table_BP.shape[1]
        mass_BP = torch.zeros(num_requests, num_blocks)
        task = _CMassTask(
            at(q_BHC.float(), torch.float32),
            address_of(k_PSGC, k_PSGC.dtype),
            at(block_table_BP, torch.int32),
            at(num_keys_B, torch.int64),
            mass_BP.data_ptr(),
            num_requests,
            num_heads,
            k_PSGC.shape[2],
            head_size,
            k_PSGC.shape[1],
            num_blocks,
            scale,
            k_PSGC.dtype is torch.bfloat16,
            q_BHC.dtype is torch.bfloat16,
        )
        self._block_mass(self._team.address, ctypes.byref(task))
        return mass_BP


def _is_bf16(tensor: Tensor) -> bool:
    assert tensor.dtype in (torch.float32, torch.bfloat16), f"not {tensor.dtype}"
    return tensor.dtype is torch.bfloat16
