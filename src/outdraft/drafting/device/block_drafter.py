"""Drafts a block of tokens in one pass: DFlash and DSpark (models/drafters/dflash.py).

The drafter keeps keys and values of a text for all tokens but the newest one, whose states the
target has yet to compute. After them it reads a block: the newest token and mask tokens, rows
that all see each other. So each draft depends on all mask tokens, also on later ones: the
block always has the size that the network was trained with, however few drafts are wanted. What
does not fit into the blocks of a request goes to a few spare ones. Nothing in a block has a use
later.

Dimension key: B requests that draft, G those of all ranks that share the network, R rows of a
block, K drafts, V vocabulary, N the draft vocabulary, T rows, S state rows, L tokens of a text, D
state, P blocks of the cache, F nodes of a level.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata, LayerCache
from outdraft.attention.rows import to_device
from outdraft.core.draft import DraftSource
from outdraft.distributed.group import ALL_HERE, RequestShares
from outdraft.drafting.device.asks import DraftModelAsk, StateWindow, TargetStates
from outdraft.drafting.device.grower import KnownLevels, compiled_grow
from outdraft.drafting.device.text_reader import TextReader
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.draft_ops import Frontier, Growth, TreeLevels, UnreadTexts
from outdraft.kv.cache import KVCache
from outdraft.models.drafters.dflash import DFlashNetwork, SparkHeads


def num_spare_blocks(num_rows: int, block_size: int) -> int:
    """Blocks of the cache that num_rows rows of one request may need beyond its own; the first of
    the rows stands in a place of the text."""
    return -(-(num_rows - 1) // block_size)


class ContextReader:
    """Writes the keys and values of texts, without attention; a `TextReader` reads them."""

    token_shift = 1

    def __init__(self, network: DFlashNetwork) -> None:
        self._network, self.kernels = network, network.kernels

    def features(self, states: TargetStates) -> Tensor:
        """[T, D]."""
        return self._network.features(states.tapped_TKD)

    def read(
        self,
        token_ids_T: Tensor,
        states_TD: Tensor | None,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """The features, as they were given."""
        assert states_TD is not None
        self._network.write_context(states_TD, caches, metadata)
        return states_TD


class BlockDrafter:
    """A network that drafts blocks, and the texts that it has read."""

    def __init__(
        self,
        network: DFlashNetwork,
        cache: KVCache,
        max_rows: int,
        source: DraftSource,
        window: StateWindow,
    ) -> None:
        """
        Args:
            cache: of the pool's blocks, then of the spare ones of each state row.
            max_rows: of one pass, if a block is not larger.
        """
        config = network.config
        self._network, self._cache = network, cache
        self.state_window, self.taps = window.num_tokens, network.taps
        self.reads_all_hidden = False
        self.source, self.max_kept = source, -1
        self.max_drafts, self.max_passes = config.num_drafts, 1
        self._reader = TextReader(ContextReader(network), cache, max_rows, window)
        self.keep, self.unread = self._reader.keep, self._reader.unread
        size = config.block_size
        self._most_blocks = max(1, max_rows // size)  # of a pass
        self._num_spare = num_spare_blocks(size, cache.block_size)
        num_state_rows = (len(window.features_NF) - 1) // window.num_tokens
        self._first_spare = cache.num_blocks - num_state_rows * self._num_spare
        is_causal = network.is_uniform and config.is_causal[0]
        rows_R = np.arange(size)
        masks_R = (1 << (rows_R + 1)) - 1 if is_causal else np.full(size, (1 << size) - 1)
        self._masks_R = masks_R.astype(np.int64)

    def draft(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, growth: Growth
    ) -> DraftBatch:
        unread = self.unread(asks, token_ids_SL)
        if len(asks) <= self._most_blocks:
            drafts = self._network.draft(self._with_room(asks, unread), growth)
            if drafts is not None:
                return drafts
        depth, shares = growth.shape.depth, growth.shares
        return compiled_grow(self.levels(asks, unread, depth, shares), growth)

    def levels(
        self,
        asks: Sequence[DraftModelAsk],
        unread: UnreadTexts,
        depth: int,
        shares: RequestShares = ALL_HERE,
    ) -> TreeLevels:
        """Read the rest of all texts; return `depth` levels after this rank's texts."""
        self._reader.read(unread)
        token_ids_SL, most = unread.token_ids_SL, self._most_blocks
        parts = [
            self._block_states(asks[first : first + most], token_ids_SL, depth)
            for first in range(0, len(asks), most)
        ]
        states_GKD = parts[0] if len(parts) == 1 else torch.cat(parts)
        network = self._network
        logits_RN = network.known_logits(states_GKD.flatten(0, 1), shares)
        if network.heads is None:
            logits_RV = network.over_vocabulary(logits_RN)
            return KnownLevels(logits_RV.unflatten(0, (-1, states_GKD.shape[1])))
        newest_B = shares.own(self._newest(asks, token_ids_SL))
        logits_BKN = logits_RN.unflatten(0, (-1, states_GKD.shape[1]))
        kind = SureSparkLevels if network.config.has_confidence else SparkLevels
        return kind(network, network.heads, logits_BKN, shares.own(states_GKD), newest_B)

    def _with_room(self, asks: Sequence[DraftModelAsk], unread: UnreadTexts) -> UnreadTexts:
        """Add blocks of the cache to `unread`, for all rows of the requests' blocks."""
        num_rows = self._network.config.block_size
        spans = [
            span._replace(
                block_ids=self._blocks(ask, span.context_len + span.num_causal + num_rows)
            )
            for ask, span in zip(asks, unread.spans, strict=True)
        ]
        return replace(unread, spans=spans)

    def _blocks(self, ask: DraftModelAsk, num_tokens: int) -> list[int]:
        """Cache blocks for num_tokens tokens: the request's own, then spare ones if needed."""
        needed = -(-num_tokens // self._cache.block_size)
        own = list(ask.block_ids[:needed])
        spare = self._first_spare + ask.state_row * self._num_spare
        return [*own, *range(spare, spare + needed - len(own))]

    def _block_states(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, depth: int
    ) -> Tensor:
        """[B, K, D]: of the rows of the first `depth` drafts."""
        network, num_rows = self._network, self._network.config.block_size
        contexts_B, positions_BR, slots_BR, table_BP = self._place(asks)
        num_requests = len(asks)
        starts_B1 = np.arange(num_requests + 1, dtype=np.int32) * num_rows
        first = num_rows - network.config.num_drafts  # row of the first draft
        drafting_BK = starts_B1[:-1, None] + np.arange(first, first + depth)
        sent = to_device(
            [
                starts_B1,
                contexts_B,
                np.zeros(num_requests, dtype=np.int32),
                np.tile(self._masks_R, num_requests),
                positions_BR.ravel(),
                slots_BR.ravel(),
                table_BP,
                drafting_BK.ravel().astype(np.int64),
            ],
            token_ids_SL.device,
        )
        longest = int(contexts_B.max()) + num_rows
        metadata = AttentionMetadata(*sent[:7], max_rows=num_rows, max_seq_len=longest)
        ids_BR = token_ids_SL.new_full((num_requests, num_rows), network.config.mask_token_id)
        ids_BR[:, 0] = self._newest(asks, token_ids_SL)
        states_TD = network(ids_BR.flatten(), self._cache.layers, metadata)
        return states_TD.index_select(0, sent[7]).view(num_requests, depth, -1)

    def _place(self, asks: Sequence[DraftModelAsk]) -> tuple[np.ndarray, ...]:
        """Lengths of the kept texts [B]; of the blocks after them positions and slots [B, R]; and
        tables of the cache's blocks [B, P]."""
        num_rows, size = self._network.config.block_size, self._cache.block_size
        contexts = [ask.num_tokens - ask.num_missing - 1 for ask in asks]
        width = -(-(max(contexts) + num_rows) // size)
        table_BP = np.zeros((len(asks), width), dtype=np.int32)
        for row, (ask, context) in enumerate(zip(asks, contexts, strict=True)):
            blocks = self._blocks(ask, context + num_rows)
            table_BP[row, : len(blocks)] = blocks
        positions_BR = np.array(contexts)[:, None] + np.arange(num_rows)
        blocks_BR = np.take_along_axis(table_BP, positions_BR // size, axis=1)
        slots_BR = blocks_BR.astype(np.int64) * size + positions_BR % size
        return np.array(contexts, dtype=np.int32), positions_BR, slots_BR, table_BP

    def _newest(self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor) -> Tensor:
        """int64 [B]."""
        rows = np.array([ask.state_row for ask in asks])
        ends = np.array([ask.num_tokens - 1 for ask in asks])
        rows_B, ends_B = to_device([rows, ends], token_ids_SL.device)
        return token_ids_SL[rows_B, ends_B]


class SparkLevels:
    """Logits of each draft of a block, given the token before it.

    Sampled tokens are drawn from the sums, so a draft's distribution is conditional on the
    tokens that were drawn before it.
    """

    def __init__(
        self,
        network: DFlashNetwork,
        heads: SparkHeads,
        logits_BKN: Tensor,
        states_BKD: Tensor,
        newest_B: Tensor,
    ) -> None:
        self._network, self._heads = network, heads
        self._logits_BKN, self._states_BKD, self._newest_B = logits_BKN, states_BKD, newest_B
        self._before_B, self._depth = newest_B, 0

    def first_logits(self) -> Tensor:
        return self._behind(self._newest_B[:, None], 0)[:, 0]

    def next_logits(self, frontier: Frontier) -> Tensor:
        return self._behind(frontier.token_ids_BF, frontier.depth)

    def _behind(self, token_ids_BF: Tensor, depth: int) -> Tensor:
        """[B, F, V]."""
        self._before_B, self._depth = token_ids_BF[:, 0], depth
        logits_BFN = self._logits_BKN[:, depth, None].expand(-1, token_ids_BF.shape[1], -1)
        if self._heads.markov_w1 is not None:
            pairs_RN = self._heads.pair_logits(token_ids_BF.flatten())
            logits_BFN = logits_BFN + pairs_RN.view(logits_BFN.shape)
        logits_RV = self._network.over_vocabulary(logits_BFN.flatten(0, 1))
        return logits_RV.view(*token_ids_BF.shape, logits_RV.shape[1])


class SureSparkLevels(SparkLevels):
    """Levels with confidences; implements `TellsOdds`.

    The row of a draft reads mask tokens only, and the token before it is known. So its confidence
    depends on no later token.
    """

    def odds_B(self) -> Tensor:
        """float32 [B]."""
        return self._heads.confidences(self._states_BKD[:, self._depth], self._before_B)
