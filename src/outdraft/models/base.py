"""The interface between the engine and a language model.

Dimension key: T rows, R rows that need logits, Q of them on this rank, D hidden, F features, V
vocabulary, S columns of logits on each rank, K tapped layers.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata, LayerCache
from outdraft.core.weights import RoutedWeights
from outdraft.distributed.group import ALL_HERE, RankGroup, RequestShares
from outdraft.distributed.vocabulary import VocabularyShard
from outdraft.kernels.decoder_ops import FusedPasses
from outdraft.kernels.ops import Kernels
from outdraft.kernels.products import EmbeddingTable
from outdraft.models.modules import Linear
from outdraft.models.shape import ModelShape


class CachedNetwork(Protocol):
    """A network over a paged cache, its weights packed.

    Attributes:
        shard: the part of the shape that this rank has, whose keys and values are in its cache.
        weight_bytes: that one step reads at most, as they lie in memory: those of all experts too.
        memory_bytes: what the weights take, packed ones included.
        fused: whole steps and drafts in one call each; None: it has none.
    """

    dtype: torch.dtype
    device: torch.device
    kernels: Kernels

    @property
    def shard(self) -> ModelShape: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def memory_bytes(self) -> int: ...

    @property
    def fused(self) -> FusedPasses | None: ...


class LanguageModel(CachedNetwork, Protocol):
    """A decoder-only language model.

    Attributes:
        vocabulary: the tokens of this rank.
        group: the ranks that it is spread over. Each of them calls the same with the same rows.
        embed_tokens: the vectors of this rank's tokens.
        lm_head: the product of the head, without what the family does to its logits afterwards.
        routed: the weights of experts, of which few rows meet few; None: it has none, or a step
            reads all.
        numbers: the dtype that is computed, and the weights under it if they are kept otherwise.
    """

    group: RankGroup
    vocabulary: VocabularyShard
    lm_head: Linear

    @property
    def config(self) -> ModelShape: ...

    @property
    def embed_tokens(self) -> EmbeddingTable: ...

    @property
    def routed(self) -> RoutedWeights | None: ...

    @property
    def numbers(self) -> str: ...

    def __call__(
        self, token_ids_T: Tensor, caches: Sequence[LayerCache], metadata: AttentionMetadata
    ) -> Tensor:
        """The first part of `forward_tapped`."""
        ...

    def forward_tapped(
        self,
        token_ids_T: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        taps: Sequence[int],
        wanted_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The hidden states of the wanted rows that `logits` reads, [R, D], and the residual stream
        after the first taps[k] layers, [T, K, D], all of the model's dtype.

        Writes the keys and values of the rows to the caches, one cache a layer.

        Args:
            token_ids_T: int64; the positions of the metadata are below max_model_len.
            taps: each from 0 (the embedding) to the number of layers.
            wanted_R: as in DecoderPass.
        """
        ...

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """[R, S] of float32, of float64 for a float64 model: of this rank's tokens, padded with
        -inf."""
        ...

    def checked_best_tokens(self, hidden_RD: Tensor) -> tuple[Tensor, Tensor]:
        """The best tokens; bool [R]: the logits have a best one: no NaN or inf, not all -inf. The
        same on every rank."""
        ...


@runtime_checkable
class StateNetwork(CachedNetwork, Protocol):
    """A network that drafts: it reads a token together with the target's state before it. Where the
    target has not read the text, its own state takes that place. As EagleNetwork, which says more.
    """

    feature_size: int

    @property
    def taps(self) -> tuple[int, ...]: ...

    def features(self, hidden_TD: Tensor, tapped_TKS: Tensor) -> Tensor:
        """[T, F]: what a row reads of the target's pass over its position."""
        ...

    def __call__(
        self,
        token_ids_T: Tensor,
        states_TF: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """The state of each row, [T, D]."""
        ...

    def logits(self, states_RD: Tensor, shares: RequestShares = ALL_HERE) -> Tensor:
        """[Q, V] over the target's vocabulary, of the rows that are this rank's; -inf where it has
        no such token."""
        ...
