"""Token embeddings.

Dimension key: T rows, V vocabulary, D hidden.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """A table [V, D] of vectors; memory is not initialised."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        table_VD = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(table_VD, requires_grad=False)

    def forward(self, token_ids_T: Tensor) -> Tensor:
        """[T, D]."""
        return F.embedding(token_ids_T, self.weight)
