"""The tensors behind the block pool: keys and values of every layer of one model.

The target and the drafter each have a KVCache with the same number of blocks, so one block id
names the same token positions in both.

Dimension key: L layers, P blocks, S slots per block, G kv heads, C head size, R rows to move.
"""

import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values: two [P, S, G, C] tensors."""

    k_PSGC: Tensor
    v_PSGC: Tensor


class KVCache:
    """Keys and values of all layers of one model, cut into blocks.

    Slot s of block b has the flat index b * block_size + s. New memory is zero, so a slot that
    was never written is finite and can be masked by a weight of zero.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_size)
        self._kv_L2PSGC = _zeros(shape, dtype, device)
        self.layers = [LayerCache(kv[0], kv[1]) for kv in self._kv_L2PSGC]
        self.num_blocks = num_blocks
        self.block_size = block_size

    @staticmethod
    def bytes_per_block(
        num_layers: int, block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype
    ) -> int:
        """Bytes that one block takes over all layers, keys and values together."""
        return 2 * num_layers * block_size * num_kv_heads * head_size * dtype.itemsize

    def compact(self, source_slots_R: Tensor, target_slots_R: Tensor) -> None:
        """Copy row source_slots[r] to target_slots[r] in every layer, all at once.

        Every source is read before any target is written, so the two may overlap. A row whose
        source or target is -1 is skipped, without a copy to the host. Targets must be distinct.
        """
        if source_slots_R.numel() == 0:
            return
        slots = self._kv_L2PSGC.flatten(0, 1).flatten(1, 2)  # [2L, P * S, G, C]
        source_R, target_R = source_slots_R.long(), target_slots_R.long()
        moves_R = (source_R >= 0) & (target_R >= 0)
        # A skipped row repeats the first row that moves; if none moves, slot 0 goes to slot 0.
        stand_in = moves_R.int().argmax()
        any_moves = moves_R.any()
        source_R = torch.where(moves_R, source_R, source_R[stand_in] * any_moves)
        target_R = torch.where(moves_R, target_R, target_R[stand_in] * any_moves)
        slots.index_copy_(1, target_R, slots.index_select(1, source_R))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU in huge pages where the system has them: attention reads rows that lie far apart."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
