"""The embedding and the head of a drafter: its own, or its target's as the drafter's ranks have it.

A checkpoint may hold a copy of a table of the target's, and it may draft some tokens only.

Dimension key: R rows, D hidden, N tokens of this rank, or tokens that it can draft, V vocabulary.
"""

from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from outdraft.core.errors import ConfigError
from outdraft.core.weights import QUANTIZATIONS, WeightFormat
from outdraft.distributed.group import ALL_HERE, ALONE, RankGroup, RequestShares
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
from outdraft.models.checkpoints.slots import Slot, fill_slots, own_slots, rows_of
from outdraft.models.decoder.causal_lm import EMBEDDING_NAME, HEAD_NAME
from outdraft.models.decoder.config import ModelConfig
from outdraft.models.decoder.layers import Decoder, Kind, first_drafts, product_of
from outdraft.models.decoder.loader import open_checkpoint
from outdraft.models.drafters.config import DFlashConfig, EagleConfig
from outdraft.models.modules import Linear, memory_bytes, pack_linears
from outdraft.models.shape import DRAFT_RANKS

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
        kind: dtype and device of the target.
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
        self.path, self.kind = path, Kind(dtype=target.dtype, device=target.device)

    @property
    def _are_the_targets(self) -> bool:
        return self.group.size == self.target.group.size

    @cached_property
    def embedding(self) -> EmbeddingTable:
        """The vectors of this rank's tokens."""
        own = self.target.embed_tokens
        if self._are_the_targets:
            return own
        table_ND = torch.empty(self.vocabulary.num_own, own.size, **self.kind)
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
        head = vocabulary_linear(self.target.config.hidden_size, self.vocabulary, self.kind)
        self._read(_head_name(self.target), rows_of(self.vocabulary, head.weight))
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


class TargetedNetwork(nn.Module):
    """A network that drafts for a target: of its dtype, on its device, with its kernels. Weights
    are not initialised."""

    def __init__(self, tables: TargetTables) -> None:
        super().__init__()
        target = tables.target
        self.tables, self.kernels = tables, target.kernels
        self.dtype, self.device = target.dtype, target.device
        self.kind = tables.kind

    @property
    def memory_bytes(self) -> int:
        """Bytes of its own weights, packed ones included, and of copies of the target's."""
        return memory_bytes(self) + self.tables.copied_bytes

    def wide(self, logits: Tensor) -> Tensor:
        """Logits of float32, or of float64 for a float64 target."""
        return logits.to(torch.promote_types(self.dtype, torch.float32))

    def checkpoint_slots(self) -> dict[str, Slot]:
        """The place of each tensor of a checkpoint: views into this network; before packing."""
        return own_slots(self)

    def pack(self, quantization: WeightFormat | None) -> None:
        """Make its own products, once and for good, when the weights are there."""
        pack_linears(self, self.kernels, quantization)

    def filled(self, found: Mapping[str, Place], quantization: WeightFormat | None) -> Self:
        """Itself, ready to run, with these tensors; raises ConfigError as `fill_slots`."""
        fill_slots(self.checkpoint_slots(), found)
        self.pack(quantization)
        return self.eval()


class LayeredDrafter(TargetedNetwork):
    """A drafter with a decoder over a paged cache of its own. The embedding and the head are its
    own or the target's, spread over the ranks of the target's tables.

    Attributes:
        taps: after how many of the target's layers it reads the residual streams.
        shard: its layers as this rank has them, which is the shape of its cache.
        feature_size: numbers that it keeps of the target's pass for a row.
        embed_tokens, lm_head: of the drafter's checkpoint; None: the target's is read.
        num_drafted: N.
        draft_ids_N: int64, the target's id of each token; None: it has the same ids.
    """

    decoder: Decoder
    draft_ids_N: Tensor | None

    def __init__(
        self,
        config: EagleConfig | DFlashConfig,
        tables: TargetTables,
        found: dict[str, Place],
        *,
        reads_own_size: bool = False,
    ) -> None:
        """
        Args:
            found: the tensors of its checkpoint; those that are no weights are taken out.
            reads_own_size: the states that it reads must be of its own size.

        Raises:
            ConfigError: the drafter does not fit the target or its checkpoint, or cannot be divided
                over its ranks.
        """
        super().__init__(tables)
        _drop_the_targets_embedding(found, tables.target)
        layer, has_head = config.layer, "lm_head.weight" in found
        has_embedding = "embed_tokens.weight" in found
        has_own_size = reads_own_size or not (has_embedding and has_head)
        _check_fit(config, tables.target, has_own_size=has_own_size, has_head=has_head)
        self.taps = config.taps_of(tables.target.config.num_layers)
        self.shard = layer.shard(tables.group.size, DRAFT_RANKS)
        self.feature_size, self.num_drafted = layer.hidden_size, config.draft_vocab_size
        self._drafted = VocabularyShard(tables.group, self.num_drafted)
        self.embed_tokens: nn.Parameter | None = None
        if has_embedding:
            table_ND = torch.empty(tables.vocabulary.num_own, layer.hidden_size, **self.kind)
            self.embed_tokens = nn.Parameter(table_ND, requires_grad=False)
        # Copies of the target's count before the first draft.
        own = self.embed_tokens
        self._embedding = tables.embedding if own is None else EmbeddingTable.of(own.data)
        self.lm_head: Linear | None = None
        if has_head:
            self.lm_head = vocabulary_linear(layer.hidden_size, self._drafted, self.kind)
        self._borrowed_bytes = 0 if has_head else memory_bytes(tables.head)
        ids_N = _take_draft_ids(config, found)
        ids_N = None if ids_N is None else ids_N.to(self.device)
        self.register_buffer("draft_ids_N", ids_N, persistent=False)

    @cached_property
    def passes(self) -> DecoderPass:
        """The network's computation, once its weights and the target's are packed."""
        tables = self.tables
        head = tables.head if self.lm_head is None else self.lm_head
        return self.decoder.compile_passes(
            embedding=self._embedding,
            head=product_of(head),
            draft_ids_N=self.draft_ids_N,
            num_first_drafts=first_drafts(self._drafted) if self.draft_ids_N is None else 0,
            shard=None if tables.group.size == 1 else tables.vocabulary,
            **self.pass_options(),
        )

    def pass_options(self) -> dict[str, Any]:
        """Other arguments of `Decoder.compile_passes`."""
        return {}

    def known_logits(self, states_RD: Tensor, shares: RequestShares = ALL_HERE) -> Tensor:
        """[Q, N] of the tokens that it can draft, of the rows that are this rank's; float32, or
        float64 as the target's."""
        return shares.turn(self.passes.logits(states_RD), self.num_drafted)

    def over_vocabulary(self, logits_RN: Tensor) -> Tensor:
        """[R, V]: -inf where the drafter has no such token."""
        if self.draft_ids_N is None:
            return logits_RN
        return over_vocabulary(logits_RN, self.draft_ids_N, self.tables.vocabulary.num_tokens)

    def bytes_read(self, *unread: nn.Module | None) -> int:
        """Weights that a pass reads as they lie in memory, the target's head included; of the
        embedding it reads a few rows, and these parts it does not read."""
        of_unread = sum(memory_bytes(part) for part in unread if part is not None)
        of_table = 0 if self.embed_tokens is None else self.embed_tokens.nbytes
        return memory_bytes(self) - of_unread - of_table + self._borrowed_bytes

    def checkpoint_slots(self) -> dict[str, Slot]:
        slots: dict[str, Slot] = {}
        for _, layer_slots in self.decoder.parts(""):
            slots |= layer_slots
        if self.embed_tokens is not None:
            slots["embed_tokens.weight"] = rows_of(self.tables.vocabulary, self.embed_tokens)
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


def _check_fit(
    config: EagleConfig | DFlashConfig, target: LanguageModel, *, has_own_size: bool, has_head: bool
) -> None:
    """Raise ConfigError if a drafter cannot read this target's states, or both mean other tokens.

    Args:
        has_own_size: the target's states must be of the drafter's own size.
    """
    size, own_size = target.config.hidden_size, config.layer.hidden_size
    vocab_size, num_drafted = config.layer.vocab_size, config.draft_vocab_size
    if config.target_hidden_size != size:
        raise ConfigError(
            f"the drafter reads states of size {config.target_hidden_size}, but the target's "
            f"hidden size is {size}"
        )
    if own_size != size and has_own_size:
        raise ConfigError(
            f"the drafter has a hidden size of {own_size}, so that it cannot go on with what it "
            f"takes of the target, whose hidden size is {size}"
        )
    if vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"the drafter knows {vocab_size} tokens, but the target "
            f"{target.config.vocab_size}: they must have the same vocabulary"
        )
    if not has_head and num_drafted < vocab_size:
        raise ConfigError(
            "the checkpoint lacks tensors: lm_head.weight, which a draft vocabulary of "
            f"{num_drafted} tokens needs"
        )


def _drop_the_targets_embedding(found: dict[str, Place], target: LanguageModel) -> None:
    """Drop a copy of the target's embedding: it is large, and not kept twice. Each rank looks at
    the vectors of its own tokens."""
    place, own_ND = found.get("embed_tokens.weight"), target.embed_tokens.source
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
    own = tensor_places(weight_files(path)).get(_head_name(target))
    if own is None:
        return
    stored, own = read_tensor(place), read_tensor(own)
    if stored.dtype == own.dtype and torch.equal(stored, own):
        del found["lm_head.weight"]


def _head_name(target: LanguageModel) -> str:
    return EMBEDDING_NAME if target.config.tie_word_embeddings else HEAD_NAME


def _take_draft_ids(config: EagleConfig | DFlashConfig, found: dict[str, Place]) -> Tensor | None:
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
