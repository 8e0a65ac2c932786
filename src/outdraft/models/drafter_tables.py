"""The embedding and the head of a drafter: its own ones, or its target's.

Dimension key: R rows, D hidden, N tokens that it can draft, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from outdraft.distributed.vocabulary import VocabularyShard
from outdraft.kernels.decoder_ops import DecoderPass
from outdraft.kernels.products import EmbeddingTable
from outdraft.models.decoder import Decoder, Kind, first_drafts, product_of
from outdraft.models.drafter_config import DrafterConfig
from outdraft.models.layers.embedding import Embedding
from outdraft.models.layers.linear import memory_bytes
from outdraft.models.slots import Slot, rows_of
from outdraft.models.target_tables import TargetTables, vocabulary_linear


class DrafterTables(nn.Module):
    """Spread over the ranks of the target's tables. Weights are not initialised.

    Attributes:
        embed_tokens, lm_head: of the drafter's checkpoint; None: the target's is read.
        num_drafted: N.
        borrowed_bytes: of the target's head, which a pass reads.
    """

    draft_ids_N: Tensor | None

    def __init__(
        self,
        config: DrafterConfig,
        tables: TargetTables,
        draft_ids_N: Tensor | None,
    ) -> None:
        """`draft_ids_N`: int64, the target's id of each token; None: it has the same ids."""
        super().__init__()
        target, size = tables.target, config.layer.hidden_size
        kind = Kind(dtype=target.dtype, device=target.device)
        self._of_target, self._vocab_size = tables, config.layer.vocab_size
        self._drafted = VocabularyShard(tables.group, config.draft_vocab_size)
        self.num_drafted = config.draft_vocab_size
        self.embed_tokens: Embedding | None = None
        if config.own_embedding:
            self.embed_tokens = Embedding(
                EmbeddingTable.of(torch.empty(tables.vocabulary.num_own, size, **kind))
            )
            self._embedding = self.embed_tokens.table
        else:
            self._embedding = tables.embedding  # copies count before anybody drafts
        has_head = config.own_head
        self.lm_head = vocabulary_linear(size, self._drafted, kind) if has_head else None
        self.borrowed_bytes = 0 if has_head else memory_bytes(tables.head)
        ids_N = None if draft_ids_N is None else draft_ids_N.to(target.device)
        self.register_buffer("draft_ids_N", ids_N, persistent=False)

    def compile_passes(self, decoder: Decoder, **options: Any) -> DecoderPass:
        """As `Decoder.compile_passes`, with these tables."""
        tables = self._of_target
        head = tables.head if self.lm_head is None else self.lm_head
        return decoder.compile_passes(
            self._embedding,
            product_of(head),
            draft_ids_N=self.draft_ids_N,
            num_first_drafts=first_drafts(self._drafted) if self.draft_ids_N is None else 0,
            shard=None if tables.group.size == 1 else tables.vocabulary,
            **options,
        )

    def over_vocabulary(self, logits_RN: Tensor) -> Tensor:
        """[R, V]: -inf where the drafter has no such token."""
        if self.draft_ids_N is None:
            return logits_RN
        return over_vocabulary(logits_RN, self.draft_ids_N, self._vocab_size)

    @property
    def copied_bytes(self) -> int:
        """What copies of the target's take."""
        return self._of_target.copied_bytes

    def slots(self) -> dict[str, Slot]:
        """Where each tensor of a checkpoint belongs; only before the weights are packed."""
        slots: dict[str, Slot] = {}
        if self.embed_tokens is not None:
            weight = self.embed_tokens.weight
            slots["embed_tokens.weight"] = rows_of(self._of_target.vocabulary, weight)
        if self.lm_head is not None:
            slots["lm_head.weight"] = rows_of(self._drafted, self.lm_head.weight)
        return slots


def over_vocabulary(logits_RN: Tensor, ids_N: Tensor, vocab_size: int) -> Tensor:
    """[R, V]: logits of these tokens, -inf for all others."""
    logits_RV = logits_RN.new_full((len(logits_RN), vocab_size), -torch.inf)
    return logits_RV.index_copy_(1, ids_N, logits_RN)
