"""Paged tree attention, and its mass by blocks, by the compiled library.

Dimension key: as in attention/base.py; B requests, P blocks of a request.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from outdraft.attention.base import (
    AttentionForm,
    AttentionMetadata,
    AttentionSizes,
    LayerCache,
    with_dense_rows,
)
from outdraft.kernels.native.library import Team

_NO_LIMIT = 1 << 30  # longer than any text


def limit(positions: int | None) -> int:
    """A window or a chunk as the library reads it."""
    return _NO_LIMIT if positions is None else min(positions, _NO_LIMIT)


def batch_fields(metadata: AttentionMetadata) -> dict[str, Any]:
    """The fields of a batch of rows that `AttentionBatch` and `DecoderRows` of csrc share."""
    return {
        "query_start": metadata.query_start_B1,
        "context_lens": metadata.context_lens_B,
        "num_causal": metadata.num_causal_B,
        "ancestors": metadata.ancestors_T,
        "positions": metadata.positions_T,
        "block_table": metadata.block_table_BP,
        "num_requests": metadata.context_lens_B.shape[0],
        "table_stride": metadata.block_table_BP.shape[1],
    }


class NativeAttention:
    """The operations of csrc/attention.cpp and block_mass.cpp: float32 and bfloat16 on the CPU.

    Queries and cache may differ in dtype; scores, softmax and sums are float32. Rows after the
    last request are padding: their result is zero.
    """

    def __init__(self, team: Team) -> None:
        library = team.library
        self._attend = library.function("attention_attend", releases_gil=True)
        self._write = library.function("attention_write")
        self._block_mass = library.function("block_mass", releases_gil=True)
        self._team = team
        self._memory = library.function("attention_create")(team.address)
        destroy = library.function("attention_destroy", releases_gil=True)
        weakref.finalize(self, destroy, self._memory)

    def write(self, k_TGC: Tensor, v_TGE: Tensor, cache: LayerCache, slots_T: Tensor) -> None:
        for new_TGC, cached_PSGC in ((k_TGC, cache.k_PSGC), (v_TGE, cache.v_PSGE)):
            new_TGC = with_dense_rows(new_TGC)
            num_rows, num_heads, size = new_TGC.shape
            self._write(
                *(new_TGC.data_ptr(), new_TGC.stride(0), _is_bf16(new_TGC)),
                *(cached_PSGC, _is_bf16(cached_PSGC), slots_T),
                *(num_rows, num_heads * size),
            )

    def attend(
        self, q_THC: Tensor, cache: LayerCache, metadata: AttentionMetadata, form: AttentionForm
    ) -> Tensor:
        assert cache.v_PSGE.dtype is cache.k_PSGC.dtype
        q_THC = with_dense_rows(q_THC)
        num_rows, num_heads, key_size = q_THC.shape
        _, block_size, num_kv_heads, value_size = cache.v_PSGE.shape
        out_THE = torch.empty((num_rows, num_heads, value_size), dtype=q_THC.dtype)
        batch = self._team.library.struct(
            "AttentionBatch",
            q=q_THC.data_ptr(),
            out=out_THE,
            k=cache.k_PSGC,
            v=cache.v_PSGE,
            **batch_fields(metadata),
            sinks=None if form.sinks_H is None else form.sinks_H.float(),
            num_rows=num_rows,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            key_size=key_size,
            value_size=value_size,
            block_size=block_size,
            q_stride=q_THC.stride(0),
            window=limit(form.window),
            chunk=limit(form.chunk),
            scale=form.scale,
            soft_cap=form.soft_cap or 0.0,
            is_bf16_query=_is_bf16(q_THC),
            is_bf16_out=_is_bf16(q_THC),
            is_bf16_cache=_is_bf16(cache.k_PSGC),
        )
        self._attend(self._team.address, batch, self._memory)
        return out_THE

    def temporary_bytes(self, most: AttentionSizes) -> int:
        return 0  # sums over parts of a context are too small to count

    def block_mass(
        self,
        q_BHC: Tensor,
        k_PSGC: Tensor,
        block_table_BP: Tensor,
        num_keys_B: Tensor,
        scale: float,
    ) -> Tensor:
        mass_BP = torch.zeros(block_table_BP.shape)
        _, num_heads, head_size = q_BHC.shape
        task = self._team.library.struct(
            "MassTask",
            q=q_BHC.float(),
            k=k_PSGC,
            block_table=block_table_BP,
            num_keys=num_keys_B,
            mass=mass_BP,
            num_requests=len(q_BHC),
            num_heads=num_heads,
            num_kv_heads=k_PSGC.shape[2],
            head_size=head_size,
            block_size=k_PSGC.shape[1],
            table_width=block_table_BP.shape[1],
            scale=scale,
            is_bf16=_is_bf16(k_PSGC),
            is_bf16_query=q_BHC.dtype is torch.bfloat16,
        )
        self._block_mass(self._team.address, task)
        return mass_BP


def _is_bf16(tensor: Tensor) -> bool:
    assert tensor.dtype in (torch.float32, torch.bfloat16), f"not {tensor.dtype}"
    return tensor.dtype is torch.bfloat16
