"""The tensors of the block pool: keys and values of every layer of one model.

The target and the drafter each have a KVCache with the same number of blocks, so one block id
names the same token positions in both.

Dimension key: N keys or values of layers, P blocks, S slots per block, G kv heads, C size of a key,
E size of a value, R rows to move.
"""

import math
import mmap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outdraft.kv.block_pool import LayerCacheShape

HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys [P, S, G, C] and values [P, S, G, E]."""

    k_PSGC: Tensor
    v_PSGE: Tensor


class KVCache:
    """Keys and values of all layers of one model, cut into blocks.

    Slot s of block b has the flat index b * block_size + s. New memory is zero, so a slot that
    was never written is finite and can be masked by a weight of zero. On a CPU a page is taken when
    it is first written.
    """

    def __init__(
        self,
        shapes: Sequence[LayerCacheShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`shapes`: one for each layer; they may differ.

        Keys and values of one shape are parts of one tensor, so that `compact` moves them at once.
        """
        keys = [(shape.num_kv_heads, shape.key_size) for shape in shapes]
        values = [(shape.num_kv_heads, shape.value_size) for shape in shapes]
        self._alike_NPSGC = [
            untouched_zeros((count, num_blocks, block_size, *size), dtype, device)
            for size, count in Counter([*keys, *values]).items()
        ]
        parts = {tuple(alike.shape[3:]): iter(alike) for alike in self._alike_NPSGC}
        self.layers = [
            LayerCache(next(parts[key]), next(parts[value]))
            for key, value in zip(keys, values, strict=True)
        ]
        self.num_blocks = num_blocks
        self.block_size = block_size

    @staticmethod
    def bytes_per_block(
        shapes: Sequence[LayerCacheShape], block_size: int, dtype: torch.dtype
    ) -> int:
        """Bytes that one block takes over all layers, keys and values together."""
        numbers = sum(one.num_kv_heads * (one.key_size + one.value_size) for one in shapes)
        return numbers * block_size * dtype.itemsize

    def compact(self, source_slots_R: Tensor, target_slots_R: Tensor) -> None:
        """Copy row source_slots[r] to target_slots[r] in every layer, all at once.

        Every source is read before any target is written, so the two may overlap. A row whose
        source or target is -1 is skipped, without a copy to the host. Targets must be distinct.
        """
        if source_slots_R.numel() == 0:
            return
        moves_R = (source_slots_R >= 0) & (target_slots_R >= 0)
        # A skipped row repeats the first row that moves; if none moves, slot 0 goes to slot 0.
        rows_R = torch.arange(len(moves_R), device=moves_R.device)
        rows_R = torch.where(moves_R, rows_R, moves_R.int().argmax())
        source_R, target_R = (
            slots_R.long().index_select(0, rows_R) * moves_R.any()
            for slots_R in (source_slots_R, target_slots_R)
        )
        for alike in self._alike_NPSGC:
            slots = alike.flatten(1, 2)  # [N, P * S, G, C]
            slots.index_copy_(1, target_R, slots.index_select(1, source_R))


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of which no page is taken before it is written.

    On a CPU in huge pages where the system has them: attention reads rows that lie far apart. But
    the first blocks of each layer's keys and values are in small ones: two huge pages for each
    layer are too much for a server that has hardly any text.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    part = num_bytes // shape[0]  # of a layer
    for start in range(HUGE_PAGE_BYTES, num_bytes, part):
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        if (rest := start + part - HUGE_PAGE_BYTES - page) > 0:
            memory.madvise(mmap.MADV_HUGEPAGE, page, min(rest, num_bytes - page))
    return torch.frombuffer(memory, dtype=dtype).view(shape)
