"""What a drafter reads of its target: the embedding and the head, as the drafter's ranks have them.

Dimension key: D hidden, N tokens of this rank.
"""

from functools import cached_property, partial
from pathlib import Path

import torch

from outdraft.core.errors import ConfigError
from outdraft.core.weight_format import QUANTIZATIONS
from outdraft.distributed.group import ALONE, RankGroup
from outdraft.distributed.vocabulary import VocabularyShard
from outdraft.kernels.products import EmbeddingTable, VocabParallel
from outdraft.models.base import LanguageModel
from outdraft.models.config import ModelConfig
from outdraft.models.decoder import Kind
from outdraft.models.layers.linear import Linear, memory_bytes
from outdraft.models.llama import EMBEDDING_NAME, HEAD_NAME
from outdraft.models.loader import fill_slots, open_checkpoint, tensor_places, weight_files
from outdraft.models.quantized.placing import fill_stored
from outdraft.models.slots import Slot, rows_of


def vocabulary_linear(num_inputs: int, shard: VocabularyShard, kind: Kind) -> Linear:
    """A head without a bias: each rank has the weights of its tokens, and gets their logits, padded
    with -inf."""
    spread = None if shard.group.size == 1 else partial(VocabParallel, shard)
    return Linear(num_inputs, shard.num_own, bias=False, **kind, spread=spread)


class TargetTables:
    """The embedding and the head of a target, for a drafter.

    A drafter over as many ranks as the target reads the target's own. One over fewer ranks needs
    larger parts than these ranks have of the target: they are read anew from the target's
    checkpoint when they are asked for, and count as the drafter's.

    Attributes:
        group: the ranks of the drafter.
        copied_bytes: what was read anew so far.
        path: of the target's checkpoint; None: nobody said it.
    """

    def __init__(
        self, target: LanguageModel, group: RankGroup = ALONE, path: Path | None = None
    ) -> None:
        """
        Args:
            target: packed.
            path: its checkpoint, where it has more ranks than the drafter.
        """
        self.target, self.group, self.copied_bytes = target, group, 0
        self.vocabulary = VocabularyShard(group, target.config.vocab_size)
        self.path = path

    @property
    def _are_the_targets(self) -> bool:
        return self.group.size == self.target.group.size

    @cached_property
    def embedding(self) -> EmbeddingTable:
        """The vectors of this rank's tokens."""
        own = self.target.embed_tokens.table
        if self._are_the_targets:
            return own
        table_ND = torch.empty(
            self.vocabulary.num_own, own.size, dtype=own.dtype, device=self.target.device
        )
        self._read(EMBEDDING_NAME, rows_of(self.vocabulary, table_ND))
        self.copied_bytes += table_ND.nbytes
        return EmbeddingTable.of(table_ND)

    @cached_property
    def head(self) -> Linear:
        """To logits of this rank's tokens, padded with -inf; packed, of the target's number format.
        No part of the drafter: a module that keeps it would count it as its own."""
        own = self.target.lm_head
        if self._are_the_targets:
            return own
        config = self.target.config
        kind = Kind(dtype=self.target.dtype, device=self.target.device)
        head = vocabulary_linear(config.hidden_size, self.vocabulary, kind)
        name = EMBEDDING_NAME if config.tie_word_embeddings else HEAD_NAME
        self._read(name, rows_of(self.vocabulary, head.weight))
        head.pack(self.target.kernels, own.format if own.format in QUANTIZATIONS else None)
        self.copied_bytes += memory_bytes(head)
        return head

    def _read(self, name: str, slot: Slot) -> None:
        assert self.path is not None, "the target has other ranks than the drafter"
        config = self.target.config
        if not isinstance(config, ModelConfig):  # the transformers library computes the target
            places = tensor_places(weight_files(self.path))
            if name not in places:
                raise ConfigError(f"{self.path} has no {name}: the drafter needs as many ranks")
            fill_slots({name: slot}, {name: places[name]})
            return
        checkpoint = open_checkpoint(self.path, config, (name,))
        if name in checkpoint.stored:
            fill_stored({name: slot}, checkpoint.stored, {})
        else:
            fill_slots({name: slot}, {name: checkpoint.places[name]})
