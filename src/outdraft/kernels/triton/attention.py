# pyright: reportCallIssue=false
# A launch takes more than the parameters of the kernel.
"""Paged tree attention on a GPU, by the kernels of attention_kernels.py.

Requests of a few rows, trees and prompt chunks have tiles of their own sizes, in launches of their
own: which launch a request is in depends on its own rows only, so it reads the same alone and in
any batch. Contexts are cut into splits of a fixed size that run side by side and are merged; long
prompt chunks have work enough without. Grids come from shapes and from the two numbers that the
host knows; programs without work leave at once.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from outdraft.attention.base import (
    AttentionForm,
    AttentionMetadata,
    AttentionSizes,
    LayerCache,
    with_dense_rows,
)
from outdraft.core.draft import MAX_DRAFTS
from outdraft.core.errors import ConfigError
from outdraft.kernels.data.graph_sizes import TREE_ROWS
from outdraft.kernels.triton import attention_kernels as kernels

GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_ELEMENTS = 1 << 26  # 256 MiB of float32 for the parts of split contexts
_NO_SPLIT = 1 << 30
_LOG2_E = 1.4426950408889634


class _Launch(NamedTuple):
    """The launch for requests with min_rows to max_rows rows."""

    min_rows: int
    max_rows: int
    lanes: int
    keys: int
    split_keys: int
    num_warps: int
    num_stages: int


class TritonAttention:
    """Attention as attention/base.py states it, for float32, bfloat16 and float16 on a GPU.

    Queries and cache may differ in dtype; scores, softmax and sums are float32. Rows after the
    last request are padding: their result is zero, and so is that of rows that see nothing.
    """

    def __init__(self, max_elements: int = MAX_ELEMENTS) -> None:
        """`max_elements`: of the parts that are merged at once; one tile may take more."""
        self._max_elements = max_elements

    def write(self, k_TGC: Tensor, v_TGE: Tensor, cache: LayerCache, slots_T: Tensor) -> None:
        """Store k and v at their slots; rows with slot -1 are dropped.

        Raises:
            ConfigError: a dtype that the kernels do not read.
        """
        _check_dtypes(k_TGC, v_TGE, cache.k_PSGC, cache.v_PSGE)
        if len(slots_T) == 0:
            return
        k_TGC, v_TGE = with_dense_rows(k_TGC), with_dense_rows(v_TGE)
        k_size, v_size = (x.shape[1] * x.shape[2] for x in (k_TGC, v_TGE))
        kernels.write_rows[(len(slots_T),)](
            k_TGC,
            v_TGE,
            cache.k_PSGC,
            cache.v_PSGE,
            slots_T,
            k_TGC.stride(0),
            v_TGE.stride(0),
            KEY_ROW=k_size,
            KEY_WIDTH=triton.next_power_of_2(k_size),
            VALUE_ROW=v_size,
            VALUE_WIDTH=triton.next_power_of_2(v_size),
            enable_fp_fusion=True,
        )

    def attend(
        self,
        q_THC: Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        form: AttentionForm,
    ) -> Tensor:
        """[T, H, E] of q's dtype, as `AttentionBackend`.

        Raises:
            ConfigError: a dtype that the kernels do not read.
        """
        _check_dtypes(q_THC, cache.k_PSGC, cache.v_PSGE)
        call = _Call(with_dense_rows(q_THC), cache, metadata, form)
        wide = max(q_THC.dtype.itemsize, cache.k_PSGC.dtype.itemsize)
        for launch in _launches(call.heads_per_kv, max(call.key_size, call.value_size), wide):
            if _is_needed(launch, call.num_requests, len(q_THC), metadata.max_rows):
                self._launch(launch, call)
        return call.out_THE

    def temporary_bytes(self, most: AttentionSizes) -> int:
        cache, heads_per_kv = most.cache, most.num_heads // most.cache.num_kv_heads
        head_size, found = max(cache.key_size, cache.value_size), 0
        for launch in _launches(heads_per_kv, head_size, most.dtype.itemsize):
            if most.num_keys > launch.split_keys and most.num_rows >= launch.min_rows:
                sizes = (cache.num_kv_heads, cache.value_size)
                numbers = self._part_numbers(launch, most.num_keys, *sizes)
                num_tiles = most.num_rows // (launch.lanes // heads_per_kv) + most.num_requests
                found = max(found, numbers * min(num_tiles, max(1, self._max_elements // numbers)))
        return 4 * found

    def _part_numbers(
        self, launch: _Launch, num_keys: int, num_kv_heads: int, value_size: int
    ) -> int:
        """Numbers that the splits of one tile take."""
        num_splits = triton.cdiv(num_keys, launch.split_keys)
        return num_kv_heads * num_splits * launch.lanes * (value_size + 2)

    def _launch(self, launch: _Launch, call: "_Call") -> None:
        """Some tiles after another, as many as the parts have room for."""
        num_splits = triton.cdiv(call.metadata.max_seq_len, launch.split_keys)
        num_tiles = len(call.q_THC) // (launch.lanes // call.heads_per_kv) + call.num_requests
        sizes = (call.num_kv_heads, call.value_size)
        numbers = self._part_numbers(launch, call.metadata.max_seq_len, *sizes)
        is_split = num_splits > 1
        at_once = min(num_tiles, max(1, self._max_elements // numbers)) if is_split else num_tiles
        shape = (at_once, call.num_kv_heads, num_splits, launch.lanes)
        acc, top, total = (
            torch.empty(size if is_split else 0, dtype=torch.float32, device=call.q_THC.device)
            for size in ((*shape, call.value_size), shape, shape)
        )
        for first_tile in range(0, num_tiles, at_once):
            tiles = range(first_tile, min(first_tile + at_once, num_tiles))
            _attend_tiles(launch, call, (acc, top, total), tiles, num_splits)
            if is_split:
                _merge_splits(launch, call, (acc, top, total), tiles, num_splits)


class _Call:
    """The arguments of `attend`, its result, and their sizes."""

    def __init__(
        self, q_THC: Tensor, cache: LayerCache, metadata: AttentionMetadata, form: AttentionForm
    ) -> None:
        self.q_THC, self.cache, self.metadata, self.form = q_THC, cache, metadata, form
        _, num_heads, self.key_size = q_THC.shape
        _, self.block_size, self.num_kv_heads, self.value_size = cache.v_PSGE.shape
        self.out_THE = q_THC.new_zeros((*q_THC.shape[:2], self.value_size))
        self.num_requests = len(metadata.context_lens_B)
        self.heads_per_kv = num_heads // self.num_kv_heads
        # float32.
        self.sinks_H = None if form.sinks_H is None else form.sinks_H.float().contiguous()
        # The tensors of the metadata that both kernels read.
        self.rows = (
            *(metadata.query_start_B1, metadata.context_lens_B, metadata.num_causal_B),
            *(metadata.ancestors_T, metadata.positions_T),
        )

    def constants(self, launch: _Launch) -> dict[str, int | bool]:
        """The constants that both kernels are compiled for."""
        return {
            "MIN_ROWS": launch.min_rows,
            "MAX_ROWS": launch.max_rows,
            "NUM_KV_HEADS": self.num_kv_heads,
            "HEADS_PER_KV": self.heads_per_kv,
            "VALUE_SIZE": self.value_size,
            "TILE_LANES": launch.lanes,
            "VALUE_TILE": _tile_size(self.value_size),
            "SPLIT_KEYS": launch.split_keys,
            "HAS_WINDOW": self.form.window is not None,
            "HAS_CHUNK": self.form.chunk is not None,
            "HAS_SINKS": self.sinks_H is not None,
        }


def _attend_tiles(
    launch: _Launch, call: _Call, parts: tuple[Tensor, ...], tiles: range, num_splits: int
) -> None:
    q_THC, k_PSGC, table_BP = call.q_THC, call.cache.k_PSGC, call.metadata.block_table_BP
    form, cap = call.form, call.form.soft_cap
    kernels.attend_tiles[(len(tiles), call.num_kv_heads, num_splits)](
        call.out_THE,
        *parts,
        q_THC,
        k_PSGC,
        call.cache.v_PSGE,
        *call.rows,
        table_BP,
        call.sinks_H,
        q_THC.stride(0),
        form.scale * _LOG2_E if cap is None else form.scale / cap,
        0.0 if cap is None else cap * _LOG2_E,
        tiles.start,
        call.num_requests,
        table_BP.stride(0),
        form.window or 0,
        form.chunk or 0,
        BLOCK_SIZE=call.block_size,
        TILE_KEYS=launch.keys,
        KEY_SIZE=call.key_size,
        KEY_TILE=_tile_size(call.key_size),
        HAS_CAP=cap is not None,
        CUTS_DRAFTS=form.chunk is not None or (form.window or MAX_DRAFTS) < MAX_DRAFTS,
        IS_SPLIT=num_splits > 1,
        IS_WIDE=q_THC.dtype is not k_PSGC.dtype,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        enable_fp_fusion=True,  # said, because Triton's default depends on its version
        **call.constants(launch),
    )


def _merge_splits(
    launch: _Launch, call: _Call, parts: tuple[Tensor, ...], tiles: range, num_splits: int
) -> None:
    num_lanes = launch.lanes // call.heads_per_kv * call.heads_per_kv
    kernels.merge_splits[(len(tiles), call.num_kv_heads, num_lanes)](
        call.out_THE,
        *parts,
        *call.rows,
        call.sinks_H,
        tiles.start,
        call.num_requests,
        num_splits,
        call.form.window or 0,
        call.form.chunk or 0,
        enable_fp_fusion=True,
        **call.constants(launch),
    )


def _launches(heads_per_kv: int, head_size: int, itemsize: int) -> list[_Launch]:
    """For requests of a few rows, for trees, and for prompt chunks.

    Wide numbers and heads leave room for fewer lanes and keys, and what is multiplied without
    tensor cores compiles for minutes if it is large.
    """
    tile_size = _tile_size(head_size)
    keys = min(64, max(16, 2**14 // (itemsize * tile_size)))
    few_lanes = _decode_lanes(heads_per_kv, head_size, itemsize)
    few_rows, lanes = few_lanes // heads_per_kv, _max_lanes(head_size, itemsize)
    tree_lanes, most_lanes = (max(min(size, lanes), few_lanes) for size in (64, 128))
    return [
        _Launch(1, few_rows, few_lanes, keys, 256, 4, 2),
        _Launch(few_rows + 1, TREE_ROWS, tree_lanes, keys, 2048, 4, 2),
        _Launch(max(few_rows, TREE_ROWS) + 1, 1 << 30, most_lanes, keys, _NO_SPLIT, 8, 2),
    ]


def decode_tile_rows(heads_per_kv: int, head_size: int, itemsize: int) -> int:
    """Most rows of a request that one tile of the smallest kind holds."""
    return _decode_lanes(heads_per_kv, head_size, itemsize) // heads_per_kv


def _decode_lanes(heads_per_kv: int, head_size: int, itemsize: int) -> int:
    """Room for a chain of seven drafts, if it is not too much; a tensor core takes 16 at least."""
    room = min(8 * heads_per_kv, 64, _max_lanes(head_size, itemsize))
    return triton.next_power_of_2(max(16, heads_per_kv, room))


def _max_lanes(head_size: int, itemsize: int) -> int:
    return 2**16 // (itemsize**2 * _tile_size(head_size))


def _is_needed(launch: _Launch, num_requests: int, num_rows: int, max_rows: int) -> bool:
    """True if a request of the batch may belong to a launch; the host knows the longest only."""
    if max_rows < launch.min_rows:
        return False
    is_uniform = num_rows == num_requests * max_rows
    return max_rows <= launch.max_rows or (num_requests > 1 and not is_uniform)


def _tile_size(head_size: int) -> int:
    return max(16, triton.next_power_of_2(head_size))


def _check_dtypes(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype not in GPU_DTYPES:
            raise ConfigError(
                f"triton attention reads float32, bfloat16 and float16, not {tensor.dtype}: "
                "use the reference kernels for other dtypes"
            )
