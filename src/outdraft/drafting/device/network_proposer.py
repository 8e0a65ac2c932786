"""Drafts with a network, token after token or level after level, from the device's own texts.

Its keys and values live in the same blocks as the target's. It may lag: before it drafts it reads
all tokens that it has not seen, the accepted ones and the newest together, in one pass. Nothing
is copied to the host: how many rows there are is known beforehand, what they hold is not.

Dimension key: B requests that draft, K drafts, V vocabulary, T rows, S state rows, L tokens, D the
network's state, F new nodes of a tree's level.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata
from outdraft.attention.rows import Span, lay_out, send, to_device
from outdraft.core.draft import MAX_DRAFTS, DraftSource
from outdraft.core.plan import ModelDrafting
from outdraft.core.tree_shape import TreeShape
from outdraft.core.tree_template import TreeTemplate
from outdraft.drafting.device.backlog import catch_up, text_places, whole_span
from outdraft.drafting.device.draft_network import DraftNetwork
from outdraft.drafting.device.draft_sampling import drafting_parameters, sample_drafts
from outdraft.drafting.device.draft_tree import Frontier
from outdraft.drafting.device.level_batch import blank_batch, level_batch
from outdraft.drafting.device.model_drafts import (
    DraftModelAsk,
    ModelDrafts,
    sampled_chains,
    without_surplus,
)
from outdraft.drafting.device.sampled_chain_cpu import can_draw_chain, draw_chain_cpu
from outdraft.drafting.device.sampled_tree_cpu import Texts, can_draw_trees, draw_trees_cpu
from outdraft.drafting.device.target_states import TargetStates
from outdraft.kv.cache import KVCache
from outdraft.models.compiled_forward import MAX_ROWS
from outdraft.sampling.batch import SamplingBatch


@dataclass(frozen=True, slots=True)
class DraftStart:
    """Where the drafts of a step begin.

    Attributes:
        states_BD: the network's, behind the newest token of each request.
        table_BP: blocks of each request, on the host.
        metadata: of the pass that read it.
    """

    states_BD: Tensor
    table_BP: np.ndarray
    metadata: AttentionMetadata


class NetworkProposer:
    """Drafts chains with a network that reads its own drafts."""

    def __init__(
        self,
        network: DraftNetwork,
        cache: KVCache,
        max_rows: int,
        source: DraftSource,
        *,
        samples: bool,
    ) -> None:
        """`samples`: draw drafts from the network's distribution instead of taking its best."""
        self.network = network
        self.reads_states = network.lag > 0
        self.max_drafts = self.max_passes = MAX_DRAFTS
        self.cache = cache
        self.drafting = ModelDrafting(source, max_kept=-1 if network.lag else None)
        self._max_rows = max_rows
        self._samples = samples

    @property
    def taps(self) -> tuple[int, ...]:
        """Residual streams of the target that `keep` needs."""
        return self.network.taps

    def keep(self, states: TargetStates) -> None:
        """The target has computed these."""
        self.network.keep(states)

    def propose(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, sampling: SamplingBatch
    ) -> ModelDrafts:
        """Draft for all asks; `sampling` has their requests in the same order."""
        start = self._start(asks, token_ids_SL)
        most = max(ask.num_drafts for ask in asks)
        positions_KB, extensions = self._extensions(asks, most, start)
        if sampling.is_plain_greedy or not self._samples:
            ids_KB = self.network.greedy_chain(start.states_BD, self.cache.layers, extensions)
            drafts = ModelDrafts(ids_KB.T)
        else:
            (num_tokens_B,) = to_device(
                [np.array([ask.num_tokens for ask in asks])], token_ids_SL.device
            )
            drafts = self._sample_chain(
                start.states_BD,
                positions_KB,
                extensions,
                num_tokens_B,
                drafting_parameters(sampling),
            )
        return without_surplus(drafts, [ask.num_drafts for ask in asks])

    def levels(self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor) -> "NetworkLevels":
        """For drafts that are trees."""
        return NetworkLevels(self.network, self.cache, asks, self._start(asks, token_ids_SL))

    def _sample_chain(
        self,
        states_BD: Tensor,
        positions_KB: Tensor,
        extensions: Sequence[AttentionMetadata],
        num_tokens_B: Tensor,
        sampling: SamplingBatch,
    ) -> ModelDrafts:
        """Drafts drawn with the requests' parameters."""
        if can_draw_chain(sampling) and len(states_BD) <= MAX_ROWS:
            chain = self.network.compiled_chain(self.cache.layers, extensions)
            if chain is not None:
                ids_BK, probs_BKV = draw_chain_cpu(
                    chain, states_BD, positions_KB, num_tokens_B, sampling
                )
                return sampled_chains(ids_BK, probs_BKV, sampling)
        return self._sample_chain_by_passes(
            states_BD, positions_KB, extensions, num_tokens_B, sampling
        )

    def _sample_chain_by_passes(
        self,
        states_BD: Tensor,
        positions_KB: Tensor,
        extensions: Sequence[AttentionMetadata],
        num_tokens_B: Tensor,
        sampling: SamplingBatch,
    ) -> ModelDrafts:
        """The same with any network, on any device."""
        requests_B = torch.arange(len(states_BD), device=states_BD.device)
        ids: list[Tensor] = []
        probs: list[Tensor] = []
        for step, positions_B in enumerate(positions_KB):
            if step:
                batch = extensions[step - 1]
                states_BD = self.network.read(ids[-1], states_BD, self.cache.layers, batch)
            logits_BV = self.network.logits(states_BD)
            chosen_B, probs_BV = sample_drafts(
                logits_BV, requests_B, positions_B, num_tokens_B, sampling
            )
            ids.append(chosen_B)
            probs.append(probs_BV)
        return sampled_chains(torch.stack(ids, dim=1), torch.stack(probs, dim=1), sampling)

    def _start(self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor) -> DraftStart:
        """Read all that the network has not seen."""
        lag = self.network.lag
        asks = catch_up(
            asks, lag, self._max_rows, lambda few, spans: self._read(few, spans, token_ids_SL)
        )
        return self._read(asks, [whole_span(ask, lag) for ask in asks], token_ids_SL)

    def _read(
        self, asks: Sequence[DraftModelAsk], spans: Sequence[Span], token_ids_SL: Tensor
    ) -> DraftStart:
        """One pass over texts, and over what others drafted behind them."""
        layout = lay_out(spans, self.cache.block_size, self.network.kernels)
        flat_T, given_T = text_places(
            asks, spans, layout.placed.positions_T, self.network.lag, token_ids_SL.shape[1]
        )
        last_B = layout.placed.query_start_B1[1:].astype(np.int64) - 1
        metadata, (flat, given, last) = send(layout, [flat_T, given_T, last_B], token_ids_SL.device)
        ids_T = token_ids_SL.view(-1)[flat]
        if any(ask.continued for ask in asks):
            ids_T = torch.where(given < 0, ids_T, given)
        states_TD = self.network.read(ids_T, None, self.cache.layers, metadata)
        states_BD = states_TD if len(spans) == len(states_TD) else states_TD[last]
        return DraftStart(states_BD, layout.block_table_BP, metadata)

    def _extensions(
        self, asks: Sequence[DraftModelAsk], most: int, start: DraftStart
    ) -> tuple[Tensor, list[AttentionMetadata]]:
        """Text positions of all drafts, [K, B], and the batches that read all drafts but the last.

        Laid out for all passes at once and sent in one copy. A request that wants fewer drafts
        runs along: its row is computed, kept nowhere.
        """
        lengths_B2 = np.array(
            [
                (ask.num_tokens + len(ask.continued) - self.network.lag, ask.num_drafts)
                for ask in asks
            ]
        )
        placed = self.network.kernels.place_extensions(
            lengths_B2, start.table_BP, self.cache.block_size, most
        )
        starts = np.arange(len(asks) + 1, dtype=np.int32)
        ones, zeros = np.ones(len(asks), dtype=np.int32), np.zeros(len(asks), dtype=np.int64)
        sent = to_device(
            [
                placed.positions_EB + self.network.lag,
                placed.context_lens_FB.astype(np.int64),
                placed.context_lens_FB,
                placed.slots_FB,
                starts,
                ones,
                zeros,
            ],
            start.metadata.slots_T.device,
        )
        positions, reads, contexts, slots, query_start, num_causal, ancestors = sent
        batches = [
            AttentionMetadata(
                query_start_B1=query_start,
                context_lens_B=contexts[step],
                num_causal_B=num_causal,
                ancestors_T=ancestors,
                positions_T=reads[step],
                slots_T=slots[step],
                block_table_BP=start.metadata.block_table_BP,
                max_rows=1,
                max_seq_len=int(placed.context_lens_FB[step].max()) + 1,
            )
            for step in range(most - 1)
        ]
        return positions, batches


class NetworkLevels:
    """What follows each node of a tree's level: its rows are read behind the text, each seeing its
    ancestors only."""

    def __init__(
        self,
        network: DraftNetwork,
        cache: KVCache,
        asks: Sequence[DraftModelAsk],
        start: DraftStart,
    ) -> None:
        assert not any(ask.continued for ask in asks), "a tree begins at the newest token"
        self._network = network
        self._cache = cache
        self._states_BFD = start.states_BD[:, None]
        self._block_table_BP = start.metadata.block_table_BP
        contexts = [ask.num_tokens - network.lag for ask in asks]
        num_drafts = [ask.num_drafts for ask in asks]
        self._context_lens_B, self._num_drafts_B = to_device(
            [np.array(contexts), np.array(num_drafts)], start.states_BD.device
        )
        # The longest request has so many tokens: no table of blocks reaches further.
        self._max_seq_len = max(map(sum, zip(contexts, num_drafts, strict=True)))

    def draw_trees(
        self, shape: TreeShape | TreeTemplate, num_tokens_B: Tensor, sampling: SamplingBatch
    ) -> ModelDrafts | None:
        """As `TreeDrawer`."""
        states_BD, widest = self._states_BFD[:, 0], max(shape.levels)
        num_requests = len(states_BD)
        if not (
            states_BD.is_cpu and can_draw_trees(sampling) and num_requests * widest <= MAX_ROWS
        ):
            return None
        batch = blank_batch(num_requests, widest, self._block_table_BP, self._max_seq_len)
        chain = self._network.compiled_chain(self._cache.layers, [batch])
        if chain is None:
            return None
        texts = Texts(
            num_tokens_B.numpy(),
            self._context_lens_B.numpy(),
            self._num_drafts_B.numpy(),
            self._block_table_BP.numpy(),
        )
        return draw_trees_cpu(chain, batch, states_BD, texts, shape, sampling)

    def first_logits(self) -> Tensor:
        """[B, V]: behind the newest token."""
        return self._network.logits(self._states_BFD[:, 0])

    def next_logits(self, frontier: Frontier) -> Tensor:
        """[B, F, V]: behind the nodes of a level."""
        batch = level_batch(
            frontier,
            self._context_lens_B,
            self._num_drafts_B,
            self._block_table_BP,
            self._cache.block_size,
            self._max_seq_len,
        )
        shape = frontier.token_ids_BF.shape
        requests_B1 = torch.arange(shape[0], device=batch.slots_T.device)[:, None]
        above_RD = self._states_BFD[requests_B1, frontier.origins_BF].flatten(0, 1)
        states_RD = self._network.read(
            frontier.token_ids_BF.flatten(), above_RD, self._cache.layers, batch
        )
        self._states_BFD = states_RD.view(*shape, -1)
        return self._network.logits(states_RD).view(*shape, -1)
