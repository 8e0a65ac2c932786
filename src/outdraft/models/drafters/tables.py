"""The embedding and the head of a drafter: its own, or its target's as the drafter's ranks have it.

A checkpoint may hold a copy of a table of the target's, and it may draft some tokens only.

Dimension key: R rows, D hidden, N tokens of this rank, or tokens that it can draft, V vocabulary.
"""

from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outdraft.core.errors import ConfigError
from outdraft.core.weights import QUANTIZATIONS
from outdraft.distributed.group import ALONE, RankGroup
from outdraft.distributed.vocabulary import VocabularyShard
from outdraft.kernels.decoder_ops import DecoderPass
from outdraft.kernels.products import EmbeddingTable, VocabParallel
from outdraft.models.base import LanguageModel
from outdraft.models.checkpoints.files import (
    Place,
    plain_weights,
    read_tensor,
    tensor_places,
    weight_files,
)
from outdraft.models.checkpoints.gguf_file import is_gguf
from outdraft.models.checkpoints.slots import Slot, rows_of
from outdraft.models.decoder.causal_lm import EMBEDDING_NAME, HEAD_NAME
from outdraft.models.decoder.config import ModelConfig
from outdraft.models.decoder.layers import Decoder, Kind, first_drafts, product_of
from outdraft.models.decoder.loader import open_checkpoint
from outdraft.models.drafters.config import DrafterConfig
from outdraft.models.modules import Embedding, Linear, memory_bytes

OF_TRAINING = ("verifier_norm.weight", "verifier_lm_head.weight")  # copies of the target's


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
        path: of the target's checkpoint; None: it is not known.
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
        """The product for logits of this rank's tokens, padded with -inf; packed, of the target's
        format. No part of the drafter: a module that keeps it would count it as its own."""
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
        if isinstance(config, ModelConfig):
            weights = open_checkpoint(self.path, config, (name,)).weights
        else:  # the transformers library computes the target
            weights = plain_weights(tensor_places(weight_files(self.path)))
        if name not in weights:
            raise ConfigError(f"{self.path} has no {name}: the drafter needs as many ranks")
        slot.to.copy_(slot.numbers(weights[name]))


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
            self._embedding = tables.embedding  # copies count before the first draft
        has_head = config.own_head
        self.lm_head = vocabulary_linear(size, self._drafted, kind) if has_head else None
        self.borrowed_bytes = 0 if has_head else memory_bytes(tables.head)
        ids_N = None if draft_ids_N is None else draft_ids_N.to(target.device)
        self.register_buffer("draft_ids_N", ids_N, persistent=False)

    def compile_passes(self, decoder: Decoder, **options: Any) -> DecoderPass:
        """Compile the passes of a decoder with these tables."""
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
        """Bytes of copies of the target's."""
        return self._of_target.copied_bytes

    def slots(self) -> dict[str, Slot]:
        """The place of each tensor of a checkpoint; only before the weights are packed."""
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


def check_sizes(raw: Mapping[str, Any], target: LanguageModel, *, hidden_key: str) -> None:
    """Raise ConfigError if heads on the target's last states name other sizes than the target's.

    A key that is missing is no contradiction: the shapes of the tensors are checked later.
    """
    sizes = {hidden_key: target.config.hidden_size, "vocab_size": target.config.vocab_size}
    for key, expected in sizes.items():
        if raw.get(key) is not None and raw[key] != expected:
            raise ConfigError(
                f"the draft heads are for another model: config.json has {key}={raw[key]!r}, "
                f"the target {expected}"
            )


def check_fit(config: DrafterConfig, target: LanguageModel, *, reads_own_size: bool) -> None:
    """Raise ConfigError if a drafter cannot read this target's states, or both mean other tokens.

    Args:
        reads_own_size: the states that it reads must be of its own size.
    """
    size, own_size = target.config.hidden_size, config.layer.hidden_size
    borrows = not (config.own_embedding and config.own_head)
    if config.target_hidden_size != size:
        raise ConfigError(
            f"the drafter reads states of size {config.target_hidden_size}, but the target's "
            f"hidden size is {size}"
        )
    if own_size != size and (borrows or reads_own_size):
        raise ConfigError(
            f"the drafter has a hidden size of {own_size}, so that it cannot go on with what it "
            f"takes of the target, whose hidden size is {size}"
        )
    vocab_size = config.layer.vocab_size
    if vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"the drafter knows {vocab_size} tokens, but the target "
            f"{target.config.vocab_size}: they must have the same vocabulary"
        )
    if not config.own_head and config.draft_vocab_size < vocab_size:
        raise ConfigError(
            "the checkpoint lacks tensors: lm_head.weight, which a draft vocabulary of "
            f"{config.draft_vocab_size} tokens needs"
        )


def drop_the_targets_embedding(found: dict[str, Place], target: LanguageModel) -> None:
    """Drop a copy of the target's embedding: it is large, and not kept twice. Each rank looks at
    the vectors of its own tokens."""
    place, own_ND = found.get("embed_tokens.weight"), target.embed_tokens.table.source
    if place is not None and isinstance(own_ND, Tensor):  # plain numbers are no codes
        slot, [stored] = rows_of(target.vocabulary, own_ND), plain_weights({"": place}).values()
        is_own = list(stored.shape) == slot.shape
        is_own = is_own and torch.equal(slot.numbers(stored).to(own_ND), own_ND)
        if bool(target.group.gather(torch.tensor(is_own, device=target.device)).all()):
            del found["embed_tokens.weight"]


def drop_the_targets_head(
    found: dict[str, Place], target: LanguageModel, path: Path | None
) -> None:
    """Drop a copy of the target's head. The target's own is packed: its numbers are compared in the
    checkpoint at `path`; None: they cannot be."""
    place = found.get("lm_head.weight")
    if place is None or path is None or is_gguf(path):
        return
    name = EMBEDDING_NAME if target.config.tie_word_embeddings else HEAD_NAME
    places = tensor_places(weight_files(path))
    if name not in places:
        return
    stored, own = read_tensor(place), read_tensor(places[name])
    if stored.dtype == own.dtype and torch.equal(stored, own):
        del found["lm_head.weight"]


def take_draft_ids(config: DrafterConfig, found: dict[str, Place]) -> Tensor | None:
    """int64 [N]: the target's id of each draft token; None if it is the same id. The tensors that
    map them are no weights: they are taken out of `found`.

    Raises:
        ConfigError: these tensors are missing or contradict each other.
    """
    num_drafts, vocab_size = config.draft_vocab_size, config.layer.vocab_size
    own_N = torch.arange(num_drafts)
    ids_N, offsets, marks = own_N, found.pop("d2t", None), found.pop("t2d", None)
    if offsets is not None:
        ids_N = own_N + _read_ints(offsets, (num_drafts,))
    elif num_drafts < vocab_size:
        raise ConfigError(
            f"the checkpoint lacks tensors: d2t, which a draft vocabulary of {num_drafts} of "
            f"{vocab_size} tokens needs"
        )
    if not bool(((ids_N >= 0) & (ids_N < vocab_size)).all()):
        raise ConfigError(f"tensor 'd2t' leads out of the vocabulary of {vocab_size} tokens")
    if len(ids_N.unique()) != num_drafts:
        raise ConfigError("tensor 'd2t' maps several draft tokens to one token")
    if marks is not None:
        is_draft_V = _read_ints(marks, (vocab_size,)) != 0
        if not torch.equal(is_draft_V.nonzero().flatten(), ids_N.sort().values):
            raise ConfigError("tensors 't2d' and 'd2t' contradict each other")
    return None if num_drafts == vocab_size and torch.equal(ids_N, own_N) else ids_N


def _read_ints(place: Place, shape: tuple[int, ...]) -> Tensor:
    """int64, of a tensor of whole numbers or bools."""
    tensor = read_tensor(place)
    if tensor.shape != shape or tensor.is_floating_point():
        raise ConfigError(
            f"tensor {place[1]!r} is {list(tensor.shape)} of {tensor.dtype}, but config.json "
            f"asks for {list(shape)} of whole numbers"
        )
    return tensor.long()
