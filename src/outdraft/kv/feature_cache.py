"""What a drafter keeps of the target's pass for each token, in the pool's blocks.

Its place is that of the token's keys and values: a block that is found by its prefix brings the
features along, and a drafter that has lagged behind finds them all.

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
        # The last row takes writes that are meant for nobody.
        self._features = torch.zeros(num_blocks * block_size + 1, size, dtype=dtype, device=device)

    @staticmethod
    def bytes_per_block(block_size: int, size: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes."""
        return block_size * size * dtype.itemsize

    def write(self, features_TF: Tensor, slots_T: Tensor) -> None:
        """Store features at their slots; rows with slot -1 are dropped."""
        last = len(self._features) - 1
        slots_T = torch.where(slots_T < 0, last, slots_T.long())
        # Several dropped rows share the last row: whichever comes last stays, and nobody reads it.
        self._features[slots_T] = features_TF

    def read(self, slots_T: Tensor) -> Tensor:
        """[T, F]."""
        return self._features[slots_T]
