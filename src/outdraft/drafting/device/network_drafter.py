"""Drafts with a network that reads its own drafts, level after level, for texts on the device.

Dimension key: B requests that draft, G those of all ranks that share the network, E nodes of the
level above, F nodes of a level, V vocabulary, S state rows, L tokens of a text, D the network's
state.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from outdraft.attention.base import AttentionMetadata
from outdraft.attention.rows import to_device
from outdraft.core.draft import MAX_DRAFTS, DraftSource
from outdraft.core.plan import ModelDrafting
from outdraft.distributed.group import ALL_HERE, RequestShares
from outdraft.drafting.device.asks import DraftModelAsk, StateWindow
from outdraft.drafting.device.draft_network import DraftNetwork
from outdraft.drafting.device.grower import compiled_grow, frontier_of_all
from outdraft.drafting.device.text_reader import TextReader
from outdraft.kernels.data.graph_sizes import rounded_grown_len
from outdraft.kernels.draft_ops import DraftStart, Frontier, Growth, ModelDrafts, UnreadTexts
from outdraft.kv.cache import KVCache


class NetworkDrafter:
    """A small model, or EAGLE."""

    def __init__(
        self,
        network: DraftNetwork,
        cache: KVCache,
        max_rows: int,
        source: DraftSource,
        window: StateWindow | None = None,
    ) -> None:
        """
        Args:
            max_rows: of one pass over texts.
            window: of a network whose token_shift is 1.
        """
        self.network = network
        self.state_window = window.num_tokens if window is not None else 0
        self.taps, self.reads_all_hidden = network.taps, network.reads_hidden
        self.max_drafts = self.max_passes = MAX_DRAFTS
        self.drafting = ModelDrafting(source, max_kept=-1 if network.token_shift else None)
        self._reader = TextReader(network, cache, max_rows, window)
        self.keep, self.unread = self._reader.keep, self._reader.unread

    def draft(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, growth: Growth
    ) -> ModelDrafts:
        unread = self.unread(asks, token_ids_SL)
        if (fused := self.network.fused) is not None:
            return fused.draft(unread, growth)
        start = self.start(asks, unread)
        levels = NetworkLevels(self.network, start, growth.num_drafts_G, growth.shares)
        return compiled_grow(levels, growth)

    def start(self, asks: Sequence[DraftModelAsk], unread: UnreadTexts) -> DraftStart:
        """Read the unread rest of the texts."""
        shift = self.network.token_shift
        contexts = [ask.num_tokens - ask.num_missing - ask.num_skipped - shift for ask in asks]
        states_BD, metadata, contexts_B = self._reader.read(unread, contexts)
        skipped_B: Tensor | None = None
        if any(ask.num_skipped for ask in asks):
            skipped = np.array([ask.num_skipped for ask in asks])
            (skipped_B,) = to_device([skipped], states_BD.device)
        return DraftStart(
            states_BD=states_BD,
            caches=self._reader.cache.layers,
            contexts_B=contexts_B,
            block_table_BP=metadata.block_table_BP,
            block_size=self._reader.cache.block_size,
            # Tokens of the longest request: no table of blocks reaches further.
            max_seq_len=max(
                context + ask.num_drafts for context, ask in zip(contexts, asks, strict=True)
            ),
            num_skipped_B=skipped_B,
        )


class NetworkLevels:
    """Logits after each node of a level. Its rows are read after the text, and each sees its
    ancestors only. The ranks that share the network read the rows of all G requests together."""

    def __init__(
        self,
        network: DraftNetwork,
        start: DraftStart,
        num_drafts_G: Tensor,
        shares: RequestShares = ALL_HERE,
    ) -> None:
        """
        Args:
            start: of all G requests.
            num_drafts_G: int64, slots of each request after its text.
        """
        self._network, self._start, self._shares = network, start, shares
        self._num_drafts_G = num_drafts_G
        self._states_GED = start.states_BD[:, None]

    @cached_property
    def _of_levels(self) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs of all levels, int32: lengths of contexts [G], zeros [G], and 0 to G [G + 1]. Not
        made where a graph stands for the levels."""
        lengths_G, number = self._start.contexts_B.int(), len(self._num_drafts_G)
        places_G1 = torch.arange(number + 1, dtype=torch.int32, device=lengths_G.device)
        return lengths_G, torch.zeros_like(lengths_G), places_G1

    @property
    def first_keys_PSGC(self) -> Tensor:
        return self._start.caches[0].k_PSGC

    def static_inputs(self) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
        """Tensors, and the longest text, rounded up so that graphs can be shared."""
        start = self._start
        num_blocks, block_size = start.block_table_BP.shape[1], start.block_size
        seq_len = rounded_grown_len(max(start.max_seq_len, num_blocks * block_size))
        table_BP = pad(start.block_table_BP, (0, -(-seq_len // block_size) - num_blocks))
        tensors = start.states_BD, start.contexts_B, table_BP, start.num_skipped_B
        return (*tensors, self._num_drafts_G), (seq_len,)

    def rebind(
        self, tensors: tuple[Tensor | None, ...], common: tuple[int, ...]
    ) -> "NetworkLevels":
        states_BD, contexts_B, table_BP, num_skipped_B, num_drafts_G = tensors
        assert states_BD is not None
        assert contexts_B is not None
        assert table_BP is not None
        assert num_drafts_G is not None
        start = replace(
            self._start,
            states_BD=states_BD,
            contexts_B=contexts_B,
            block_table_BP=table_BP,
            num_skipped_B=num_skipped_B,
            max_seq_len=common[0],
        )
        return NetworkLevels(self._network, start, num_drafts_G, self._shares)

    def first_logits(self) -> Tensor:
        """[B, V]: after the last token before the drafts."""
        return self._network.logits(self._start.states_BD, self._shares)

    def next_logits(self, frontier: Frontier) -> Tensor:
        """[B, F, V]: after the nodes of a level."""
        every = frontier_of_all(frontier, self._shares)
        shape = every.token_ids_BF.shape
        states_GFD = self._states_GED
        if shape[1] > 1 or states_GFD.shape[1] > 1:
            origins_GF1 = every.origins_BF[:, :, None]
            states_GFD = states_GFD.gather(1, origins_GF1.expand(-1, -1, states_GFD.shape[2]))
        states_RD = self._network.read(
            every.token_ids_BF.flatten(),
            states_GFD.flatten(0, 1),
            self._start.caches,
            self._batch(every),
        )
        self._states_GED = states_RD.view(*shape, -1)
        return self._network.logits(states_RD, self._shares).unflatten(0, (-1, shape[1]))

    def _batch(self, frontier: Frontier) -> AttentionMetadata:
        width = frontier.token_ids_BF.shape[1]
        ancestors_T, positions_T, slots_T = self._network.kernels.place_level(
            frontier.ancestors_BF, frontier.first_row, self._num_drafts_G, self._start
        )
        if self._start.num_skipped_B is not None:
            positions_T = positions_T + self._start.num_skipped_B.repeat_interleave(width)
        lengths_G, zeros_G, places_G1 = self._of_levels
        return AttentionMetadata(
            query_start_B1=places_G1 * width,
            context_lens_B=lengths_G,
            num_causal_B=zeros_G,
            ancestors_T=ancestors_T,
            positions_T=positions_T,
            slots_T=slots_T,
            block_table_BP=self._start.block_table_BP,
            max_rows=width,
            max_seq_len=self._start.max_seq_len,
        )
