"""The vectors of a vocabulary's tokens.

Dimension key: V tokens, D numbers of a vector.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from outdraft.kernels.ops import Product


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingTable:
    """Vectors as numbers, or as the outputs of a product, which keeps their codes.

    Attributes:
        source: [V, D], of `dtype`; or the product, whose head it may be, too.
        num_tokens, size: V and D.
        dtype: of the vectors that are read.
    """

    source: "Tensor | Product"
    num_tokens: int
    size: int
    dtype: torch.dtype

    @staticmethod
    def of(numbers_VD: Tensor) -> "EmbeddingTable":
        """The table with these numbers."""
        num_tokens, size = numbers_VD.shape
        return EmbeddingTable(numbers_VD, num_tokens, size, numbers_VD.dtype)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """The vectors of int64 ids of any shape, [*, D]."""
        if isinstance(self.source, Tensor):
            return torch.nn.functional.embedding(token_ids, self.source)
        return self.source.rows(token_ids.flatten()).view(*token_ids.shape, self.size)

    @property
    def nbytes(self) -> int:
        """What the numbers or codes take."""
        return self.source.nbytes
