"""What a drafter keeps of the target's pass for each token, in the pool's blocks.

A feature has the same place as the token's keys and values. So a block that is found by its prefix
brings its features along, and a drafter that has not drafted for a while finds all of them.

Dimension key: P blocks, S slots per block, T rows, F numbers of a feature.
"""

import torch
from torch import Tensor


class FeatureCache:
    """One feature per slot. New memory is zero, so what was never written is finite."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # The last row takes writes that must go nowhere.
        self._features = torch.zeros(num_blocks * block_size + 1, size, dtype=dtype, device=device)

    @staticmethod
    def bytes_per_block(block_size: int, size: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes."""
        return block_size * size * dtype.itemsize

    def write(self, features_TF: Tensor, slots_T: Tensor) -> None:
        """Store features at their slots; rows with slot -1 are dropped."""
        # Place -1 is the last row. Several dropped rows share it: it is never read.
        self._features[slots_T.long()] = features_TF

    def read(self, slots_T: Tensor) -> Tensor:
        """[T, F]."""
        return self._features[slots_T]
