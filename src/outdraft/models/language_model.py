"""What drafting asks of a language model, with its own token ids or translated ones.

Dimension key: T rows, R rows that need logits, D hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata, LayerCache
from outdraft.kernels.draft_ops import DraftStart, Growth, ModelDrafts
from outdraft.kernels.ops import Kernels
from outdraft.models.config import ModelConfig


class LanguageModel(Protocol):
    """`CausalLM` without its inside."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def kernels(self) -> Kernels: ...

    @property
    def weight_bytes(self) -> int:
        """Weights that one step reads."""
        ...

    @property
    def memory_bytes(self) -> int:
        """What the model takes, packed weights included."""
        ...

    def __call__(
        self,
        token_ids_T: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """The hidden state of each row behind the final norm, [T, D] of the model's dtype."""
        ...

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """[R, V] of float32, of float64 for a float64 model; -inf for tokens it does not know."""
        ...

    def draft(
        self, start: DraftStart, growth: Growth, by_levels: Callable[[], ModelDrafts]
    ) -> ModelDrafts:
        """As `DecoderPass.draft`."""
        ...
