"""A small model that drafts a chain of tokens, on the device, from the device's own texts.

Its keys and values live in the same blocks as the target's. It may lag: before it drafts it reads
all tokens that it has not seen, the accepted ones and the newest together, in one pass. Nothing
is copied to the host: how many rows there are is known beforehand, what they hold is not.

Dimension key: B requests that draft, K drafts, V vocabulary, T rows, S state rows, L tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata
from outdraft.attention.row_kernels import place_extensions
from outdraft.attention.rows import Span, lay_out, send, to_device
from outdraft.kv.cache import KVCache
from outdraft.models.language_model import LanguageModel
from outdraft.sampling.batch import SamplingBatch
from outdraft.sampling.noise import Purpose
from outdraft.sampling.processors import Paths, process_logits
from outdraft.sampling.sampler import sample_with_probs
from outdraft.spec.draft_sampling import drafting_parameters


@dataclass(frozen=True, slots=True)
class DraftModelAsk:
    """One request that the model drafts for.

    Attributes:
        state_row: its row in token_ids_SL.
        num_tokens: length of its text.
        num_computed: tokens of it that the drafter has in its cache.
        num_drafts: K of this request, at least 1.
        block_ids: cover the text, `continued`, and num_drafts slots more.
        continued: a chain behind the text that somebody else has drafted; these go on behind it.
    """

    state_row: int
    num_tokens: int
    num_computed: int
    num_drafts: int
    block_ids: Sequence[int]
    continued: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelDrafts:
    """One tree or chain per ask.

    Attributes:
        token_ids_BK: int64, padded with -1.
        parents_BK: int64, as in `DraftBatch`; None: chains.
        probs_BKV: float32, what sampled drafts were drawn from; None if all are deterministic.
        is_sampled_BK: bool, which drafts were drawn from probs_BKV; None with it.
        all_sampled: known on the host: all of them were.
    """

    token_ids_BK: Tensor
    parents_BK: Tensor | None = None
    probs_BKV: Tensor | None = None
    is_sampled_BK: Tensor | None = None
    all_sampled: bool = False

    def without_probs(self) -> "ModelDrafts":
        """The same drafts, to be verified as if nobody knew where they came from."""
        return ModelDrafts(self.token_ids_BK, self.parents_BK)


class DraftModelProposer:
    """Drafts chains with a language model that speaks the target's ids."""

    def __init__(
        self,
        model: LanguageModel,
        cache: KVCache,
        max_rows: int,
        *,
        samples: bool,
        shares_noise: bool,
    ) -> None:
        """`samples`: draw drafts from the drafter's distribution instead of taking its best.
        `shares_noise`: choose with the target's own noise (drafter-invariant mode)."""
        self.model = model
        self.cache = cache
        self._max_rows = max_rows
        self._samples = samples
        self._purpose = Purpose.SAMPLE if shares_noise else Purpose.DRAFT

    def propose(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, sampling: SamplingBatch
    ) -> ModelDrafts:
        """Draft for all asks; `sampling` has their requests in the same order."""
        asks = catch_up(
            asks, self._max_rows, lambda few, spans: self._read(few, spans, token_ids_SL)
        )
        most = max(ask.num_drafts for ask in asks)
        spans = [Span(a.num_computed, a.num_tokens - a.num_computed, (), a.block_ids) for a in asks]
        hidden_BD, metadata, block_table_BP = self._read(asks, spans, token_ids_SL)
        positions_KB, extensions = self._extensions(asks, most, metadata, block_table_BP)
        sampling = drafting_parameters(sampling)
        if sampling.is_plain_greedy or not self._samples:
            first_B = self.model.best_tokens(hidden_BD)
            drafts = ModelDrafts(self.model.greedy_chain(first_B, self.cache.layers, extensions).T)
        else:
            drafts = self._sample_chain(hidden_BD, positions_KB, extensions, sampling)
        return without_surplus(drafts, [ask.num_drafts for ask in asks])

    def _sample_chain(
        self,
        hidden_BD: Tensor,
        positions_KB: Tensor,
        extensions: Sequence[AttentionMetadata],
        sampling: SamplingBatch,
    ) -> ModelDrafts:
        """Drafts drawn with the requests' parameters."""
        requests_B = torch.arange(len(hidden_BD), device=hidden_BD.device)
        num_tokens_B = positions_KB[0]
        paths = Paths(None, torch.zeros_like(num_tokens_B), num_tokens_B, None)
        ids: list[Tensor] = []
        probs: list[Tensor] = []
        for step, positions_B in enumerate(positions_KB):
            if step:
                batch = extensions[step - 1]
                hidden_BD = self.model(ids[-1], batch.positions_T, self.cache.layers, batch)
            logits_BV = self.model.logits(hidden_BD)
            processed_BV = process_logits(logits_BV, requests_B, paths, sampling)
            chosen_B, probs_BV = self._choose(processed_BV, positions_B, num_tokens_B, sampling)
            ids.append(chosen_B)
            probs.append(probs_BV)
        token_ids_BK = torch.stack(ids, dim=1)
        return sampled_chains(token_ids_BK, torch.stack(probs, dim=1), sampling)

    def _read(
        self, asks: Sequence[DraftModelAsk], spans: Sequence[Span], token_ids_SL: Tensor
    ) -> tuple[Tensor, AttentionMetadata, np.ndarray]:
        """Hidden states of each span's last token, [B, D], and the batch that they were computed
        in, with its block table on the host."""
        layout = lay_out(spans, self.cache.block_size)
        counts = np.diff(layout.query_start_B1)
        rows_T = np.repeat([ask.state_row for ask in asks], counts)
        flat_T = rows_T * token_ids_SL.shape[1] + layout.positions_T
        last_B = layout.query_start_B1[1:].astype(np.int64) - 1
        metadata, (flat, last) = send(layout, [flat_T, last_B], token_ids_SL.device)
        ids_T = token_ids_SL.view(-1)[flat]
        hidden_TD = self.model(ids_T, metadata.positions_T, self.cache.layers, metadata)
        hidden_BD = hidden_TD if len(spans) == len(hidden_TD) else hidden_TD[last]
        return hidden_BD, metadata, layout.block_table_BP

    def _extensions(
        self,
        asks: Sequence[DraftModelAsk],
        most: int,
        first: AttentionMetadata,
        block_table_BP: np.ndarray,
    ) -> tuple[Tensor, list[AttentionMetadata]]:
        """Positions of all drafts, [K, B], and the batches that read all drafts but the last.

        Laid out for all passes at once and sent in one copy. A request that wants fewer drafts
        runs along: its row is computed, kept nowhere.
        """
        lengths_B2 = np.array([(ask.num_tokens, ask.num_drafts) for ask in asks])
        positions_KB = np.empty((most, len(asks)), dtype=np.int64)
        read_KB, slots_KB = (np.empty((most - 1, len(asks)), dtype=np.int64) for _ in range(2))
        context_lens_KB = np.empty((most - 1, len(asks)), dtype=np.int32)
        place_extensions(
            lengths_B2,
            block_table_BP,
            self.cache.block_size,
            positions_KB,
            read_KB,
            context_lens_KB,
            slots_KB,
        )
        starts = np.arange(len(asks) + 1, dtype=np.int32)
        ones, zeros = np.ones(len(asks), dtype=np.int32), np.zeros(len(asks), dtype=np.int64)
        sent = to_device(
            [positions_KB, read_KB, context_lens_KB, slots_KB, starts, ones, zeros],
            first.slots_T.device,
        )
        positions, reads, contexts, slots, query_start, num_causal, ancestors = sent
        longest = max(ask.num_tokens for ask in asks)
        batches = [
            AttentionMetadata(
                query_start_B1=query_start,
                context_lens_B=contexts[step],
                num_causal_B=num_causal,
                ancestors_T=ancestors,
                positions_T=reads[step],
                slots_T=slots[step],
                block_table_BP=first.block_table_BP,
                max_rows=1,
                max_seq_len=longest + step + 1,
            )
            for step in range(most - 1)
        ]
        return positions, batches

    def _choose(
        self, processed_BV: Tensor, positions_B: Tensor, anchors_B: Tensor, sampling: SamplingBatch
    ) -> tuple[Tensor, Tensor]:
        """The next draft of each request, and what it was drawn from."""
        return sample_with_probs(
            processed_BV,
            sampling.seeds_B,
            positions_B,
            sampling.is_greedy_B,
            self._purpose,
            all_greedy=sampling.all_greedy,
            anchors_R=anchors_B if self._purpose is Purpose.DRAFT else None,
        )


def catch_up(
    asks: Sequence[DraftModelAsk],
    max_rows: int,
    read: Callable[[Sequence[DraftModelAsk], Sequence[Span]], object],
    num_more_rows: int = 0,
) -> list[DraftModelAsk]:
    """Read long backlogs in passes of at most max_rows rows; one token at least is left.

    Args:
        read: reads a span of the text of each ask; what it returns is not needed.
        num_more_rows: rows that the pass behind these adds to what is left of the backlogs.
    """
    current = list(asks)
    while True:
        budget = max_rows
        lag = [ask.num_tokens - ask.num_computed for ask in current]
        if sum(lag) + num_more_rows <= max(budget, len(current) + num_more_rows):
            return current
        chosen: list[int] = []
        spans: list[Span] = []
        for i, ask in enumerate(current):
            count = min(lag[i] - 1, budget)
            if count > 0:
                budget -= count
                chosen.append(i)
                spans.append(Span(ask.num_computed, count, (), ask.block_ids))
        read([current[i] for i in chosen], spans)
        for i, span in zip(chosen, spans, strict=True):
            ask = current[i]
            current[i] = replace(ask, num_computed=ask.num_computed + span.num_causal)


def sampled_chains(token_ids_BK: Tensor, probs_BKV: Tensor, sampling: SamplingBatch) -> ModelDrafts:
    """Chains of which those of requests that are not greedy were drawn from `probs_BKV`."""
    if sampling.all_greedy:
        return ModelDrafts(token_ids_BK)
    return ModelDrafts(
        token_ids_BK,
        probs_BKV=probs_BKV,
        is_sampled_BK=~sampling.is_greedy_B[:, None].expand_as(token_ids_BK),
        all_sampled=not sampling.any_greedy,
    )


def without_surplus(drafts: ModelDrafts, num_drafts: Sequence[int]) -> ModelDrafts:
    """The same drafts, with -1 behind what each request wanted."""
    most = drafts.token_ids_BK.shape[1]
    if min(num_drafts) == most:
        return drafts
    device = drafts.token_ids_BK.device
    (counts_B,) = to_device([np.array(num_drafts)], device)
    past_BK = torch.arange(most, device=device) >= counts_B[:, None]
    return replace(drafts, token_ids_BK=drafts.token_ids_BK.masked_fill(past_BK, -1))
