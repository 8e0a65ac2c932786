"""A language model that speaks another one's token ids: token-level intersection (TLI).

Timor et al., ICML 2025, arXiv 2502.05202, algorithm 4. Each id that the model reads is translated.
The model predicts its own distribution, restricted to the tokens that both vocabularies share and
renormalised; the logits of all other tokens are -inf. For temperature, top-k, top-p, noise and
verification it is a drafter with the target's vocabulary that gives some tokens no mass. What is
exact for such drafters is exact for this one.

Dimension key: T rows, R rows that need logits, Q of them on this rank, D hidden, V the target's
vocabulary, U the drafter's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata, LayerCache
from outdraft.distributed.group import ALL_HERE, RequestShares
from outdraft.kernels.ops import Kernels
from outdraft.models.base import LanguageModel


@dataclass(frozen=True, slots=True)
class VocabularyMap:
    """The tokens that two vocabularies share, one to one, and how to read those they do not.

    Both sizes are those of the networks, which may have more ids than there are tokens.

    Attributes:
        target_to_draft_V: int64; the same token where it is shared, else a token that the drafter
            reads in place of it.
        draft_to_target_U: int64; -1: the target has no such token.
        num_target_tokens, num_draft_tokens: ids that stand for something.
    """

    target_to_draft_V: Tensor
    draft_to_target_U: Tensor
    num_target_tokens: int
    num_draft_tokens: int

    @property
    def is_shared_V(self) -> Tensor:
        """bool; the drafter can draft these of the target's ids."""
        ids_V = torch.arange(len(self.target_to_draft_V), device=self.target_to_draft_V.device)
        return self.draft_to_target_U[self.target_to_draft_V] == ids_V

    @property
    def num_shared(self) -> int:
        return int((self.draft_to_target_U >= 0).sum())

    @property
    def target_share(self) -> float:
        """Share of the target's tokens that the drafter knows."""
        return self.num_shared / max(1, self.num_target_tokens)

    @property
    def draft_share(self) -> float:
        """Share of the drafter's tokens that the target knows."""
        return self.num_shared / max(1, self.num_draft_tokens)

    def __str__(self) -> str:
        return (
            f"{self.num_shared:,} of {self.num_target_tokens:,} ids ({self.target_share:.1%}) of "
            f"the target's vocabulary, {self.draft_share:.1%} of its own"
        )


class TranslatedModel:
    """`model` for callers with the target's vocabulary."""

    fused = None  # a compiled draft would continue with tokens that are not shared

    def __init__(self, model: LanguageModel, vocabulary: VocabularyMap) -> None:
        """The vocabularies share a token at least: no row of logits is all -inf."""
        assert vocabulary.num_shared > 0, "no token to draft"
        self.model, self.dtype, self.device = model, model.dtype, model.device
        # The model has these shapes itself; only its logits have another width.
        self.shard = replace(model.shard, vocab_size=len(vocabulary.target_to_draft_V))
        self._num_draft_ids = len(vocabulary.draft_to_target_U)
        self._draft_ids_V = vocabulary.target_to_draft_V.to(model.device)
        is_shared_V = vocabulary.is_shared_V.to(model.device)
        # Added to logits: a product and a comparison less than masking them.
        self._mask_V = torch.where(is_shared_V, 0.0, -torch.inf)
        own_bytes = self._draft_ids_V.nbytes + self._mask_V.nbytes
        self.weight_bytes, self.memory_bytes = model.weight_bytes, model.memory_bytes + own_bytes

    @property
    def kernels(self) -> Kernels:
        return self.model.kernels

    def __call__(
        self, token_ids_T: Tensor, caches: Sequence[LayerCache], metadata: AttentionMetadata
    ) -> Tensor:
        """[T, D]; token_ids_T are the target's."""
        return self.model(self._draft_ids_V[token_ids_T], caches, metadata)

    def logits(self, hidden_RD: Tensor, shares: RequestShares = ALL_HERE) -> Tensor:
        """[Q, V], of the rows that are this rank's: -inf for the tokens that the model does not
        share."""
        logits_QU = shares.turn(self.model.logits(hidden_RD), self._num_draft_ids)
        return logits_QU.index_select(1, self._draft_ids_V).add_(self._mask_V)


DraftModel = LanguageModel | TranslatedModel
