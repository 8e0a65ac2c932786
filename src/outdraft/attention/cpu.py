"""Paged tree attention on the CPU, without gathering the cache first.

The kernels are in cpu_kernels.py. Small batches run in the calling thread. Large ones, and long
contexts of few rows, are shared with a few threads of our own: the kernels release the GIL, and a
second OpenMP runtime would compete with PyTorch's for the cores. The number of threads changes
no bit of the result.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata, LayerCache
from outdraft.attention.cpu_kernels import Batch, attend, merge, partial_bytes, write_rows
from outdraft.core.errors import ConfigError

CPU_DTYPES = (torch.float32, torch.bfloat16)
_WORK_PER_SHARE = 3 << 20  # multiply-adds below which waking a thread costs more than it saves
_LANES_PER_READ = 8  # reading keys and values takes as long as this many lanes' multiply-adds
NO_WINDOW = 1 << 62


class CpuAttention:
    """Attention as attention/base.py states it, for float32 and bfloat16 tensors on the CPU.

    Queries and cache may differ in dtype; scores, softmax and sums are float32. Rows behind the
    last request are padding: their result is zero.

    Args:
        num_threads: how many threads a large batch may use, the calling one included.
    """

    name = "cpu"

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(max(num_threads - 1, 1), "outdraft-attention")

    def write(self, k_TGC: Tensor, v_TGC: Tensor, cache: LayerCache, slots_T: Tensor) -> None:
        """Store k and v at their slots; rows with slot -1 are dropped.

        Raises:
            ConfigError: a dtype that the kernels do not read.
        """
        for new_TGC, cached_PSGC in ((k_TGC, cache.k_PSGC), (v_TGC, cache.v_PSGC)):
            new_TGC = _with_dense_rows(new_TGC)
            write_rows(
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
        scale: float,
        window: int | None,
    ) -> Tensor:
        """[T, H, C] of q's dtype: softmax(scale * q k^T) v over what each row sees.

        Raises:
            ConfigError: a dtype that the kernels do not read.
        """
        q_THC = _with_dense_rows(q_THC)
        num_rows, num_heads, head_size = q_THC.shape
        out_THC = torch.zeros((num_rows, num_heads, head_size), dtype=q_THC.dtype)
        _, block_size, num_kv_heads, _ = cache.k_PSGC.shape
        table_BP = metadata.block_table_BP.contiguous()  # the runner's may be a slice
        batch = Batch(
            q=q_THC.data_ptr(),
            out=out_THC.data_ptr(),
            k=address_of(cache.k_PSGC, cache.k_PSGC.dtype),
            v=address_of(cache.v_PSGC, cache.k_PSGC.dtype),
            query_start=address_of(metadata.query_start_B1, torch.int32),
            context_lens=address_of(metadata.context_lens_B, torch.int32),
            num_causal=address_of(metadata.num_causal_B, torch.int32),
            ancestors=address_of(metadata.ancestors_T, torch.int64),
            positions=address_of(metadata.positions_T, torch.int64),
            block_table=address_of(table_BP, torch.int32),
            num_requests=metadata.context_lens_B.shape[0],
            num_rows=num_rows,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            block_size=block_size,
            q_stride=q_THC.stride(0),
            table_stride=table_BP.shape[1],
            window=NO_WINDOW if window is None else window,
            scale=scale,
            is_bf16_query=_is_bf16(q_THC),
            is_bf16_cache=_is_bf16(cache.k_PSGC),
        )
        num_keys = min(metadata.max_seq_len, batch.window + metadata.max_rows)
        num_shares = _work_per_key(batch) * num_keys // _WORK_PER_SHARE
        self._attend_shared(batch, max(1, min(self._num_threads, num_shares)))
        return out_THC

    def _attend_shared(self, batch: Batch, num_shares: int) -> None:
        if num_shares == 1:
            attend(batch, 0, 1, 0)
            return
        partial = torch.empty(partial_bytes(batch, num_shares), dtype=torch.uint8)
        shared = num_shares, partial.data_ptr()
        others = [self._pool.submit(attend, batch, i, *shared) for i in range(1, num_shares)]
        attend(batch, 0, *shared)
        for other in others:
            other.result()
        merge(batch, *shared)


def _work_per_key(batch: Batch) -> int:
    """Time of one more key of every request, in multiply-adds."""
    lanes = batch.num_rows * batch.num_heads
    reads = batch.num_requests * batch.num_kv_heads
    return (lanes + _LANES_PER_READ * reads) * batch.head_size


def _with_dense_rows(rows_THC: Tensor) -> Tensor:
    """The same values with contiguous rows; a slice of a fused projection has them already."""
    if rows_THC.stride(2) == 1 and rows_THC.stride(1) == rows_THC.shape[2]:
        return rows_THC
    return rows_THC.contiguous()


def address_of(tensor: Tensor, dtype: torch.dtype) -> int:
    """The address of the numbers; the caller must keep the tensor alive."""
    assert tensor.dtype is dtype, f"expected {dtype}, got {tensor.dtype}"
    assert tensor.is_cpu
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _is_bf16(tensor: Tensor) -> bool:
    if tensor.dtype not in CPU_DTYPES:
        raise ConfigError(
            f"cpu attention reads float32 and bfloat16, not {tensor.dtype}: "
            "use the reference attention for other dtypes"
        )
    return tensor.dtype is torch.bfloat16
