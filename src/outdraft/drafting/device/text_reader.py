"""Reads what a drafting network has not read yet: the end of a text, and mask tokens after it.

Its keys and values live in the same blocks as the target's. Before it drafts it reads all unread
tokens, the accepted ones and the newest together, in one pass. A network that reads the target's
states beside tokens finds them in a window over the newest tokens, or, of a prompt, in the step
that computes them.

Dimension key: B requests that draft, T rows, C rows of each request whose states are wanted, S
state rows, L tokens of a text, D the network's state, N places of states, F numbers of one.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from outdraft.attention.base import AttentionMetadata
from outdraft.attention.rows import RowBatch, Span, to_device
from outdraft.drafting.device.asks import DraftModelAsk, StateWindow, TargetStates
from outdraft.kernels.draft_ops import UnreadTexts
from outdraft.kernels.torch.rows import read_token_ids
from outdraft.kv.cache import KVCache

if TYPE_CHECKING:
    from outdraft.drafting.device.block_drafter import ContextReader
    from outdraft.drafting.device.network_drafter import DraftNetwork


class TextReader:
    """Reads texts with a network, as far as needed."""

    def __init__(
        self,
        network: "DraftNetwork | ContextReader",
        cache: KVCache,
        max_rows: int,
        window: StateWindow | None = None,
        mask_state_D: Tensor | None = None,
    ) -> None:
        """
        Args:
            max_rows: of one pass.
            window: of a network that reads states.
            mask_state_D: the state that such a network reads beside a mask token.
        """
        self.network, self.cache = network, cache
        self._max_rows = max_rows
        self._window = window
        self._mask_state_D = mask_state_D

    def keep(self, states: TargetStates) -> None:
        if self._window is None:
            return
        features_TF = self.network.features(states)
        self.network.kernels.copy_rows(self._window.features_NF, states.places_T, features_TF, None)
        if not states.reads:
            return
        spans = self._spans([text for text, _ in states.reads], states.token_ids_SL)
        rows: list[int] = []
        for (_, first_row), span in zip(states.reads, spans, strict=True):
            rows += range(first_row, first_row + span.num_causal)
        cache, ids_SL = self.cache, states.token_ids_SL
        self._pass(UnreadTexts(spans, ids_SL, cache.layers, cache.block_size, features_TF, rows))

    def unread(self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor) -> UnreadTexts:
        """Rows that one pass can read; the rows of long backlogs before them are read now."""
        asks = self._caught_up(asks, token_ids_SL)
        spans = self._spans(asks, token_ids_SL)
        return self._unread(asks, spans, token_ids_SL)

    def read(
        self, unread: UnreadTexts, sent: Sequence[int] = ()
    ) -> tuple[Tensor, AttentionMetadata, Tensor]:
        """Read the rest of the texts. Returns the states of their last tokens, [B, D]; the batch of
        the pass; and the numbers `sent` on the device."""
        ends = list(itertools.accumulate([span.num_rows for span in unread.spans]))
        extra = [end - 1 for end in ends], sent
        states_TD, metadata, (rows_B, sent_B) = self._pass(unread, extra=extra)
        are_all = len(ends) == ends[-1]
        ends_BD = states_TD if are_all else states_TD.index_select(0, rows_B)
        return ends_BD, metadata, sent_B

    def read_masked(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, num_last: Sequence[int]
    ) -> Tensor:
        """Read all that the network has not seen, and the mask tokens after it.

        Returns the states of the last rows of each request, [B, C, D]. C is the largest of
        `num_last`. A request with fewer rows than C has the last one repeated.
        """
        asks = self._caught_up(asks, token_ids_SL)
        spans = self._spans(asks, token_ids_SL)
        most, num_rows, rows = max(num_last), 0, list[int]()
        for span, count in zip(spans, num_last, strict=True):
            num_rows += span.num_rows
            rows += [num_rows - count + min(place, count - 1) for place in range(most)]
        unread = self._unread(asks, spans, token_ids_SL)
        states_TD, _, (rows_R,) = self._pass(unread, [ask.masks for ask in asks], [rows])
        if rows != list(range(num_rows)):
            states_TD = states_TD.index_select(0, rows_R)
        return states_TD.view(len(asks), most, -1)

    def _num_unread(self, ask: DraftModelAsk) -> int:
        """Tokens of the text to read."""
        return ask.num_tokens - self.network.token_shift - ask.num_computed

    def _spans(self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor) -> list[Span]:
        """Spans of all unread tokens, and of the mask tokens after them."""
        row_len = token_ids_SL.shape[1]
        return [
            self._span(ask, row_len, self._num_unread(ask), range(len(ask.masks))) for ask in asks
        ]

    def _span(
        self, ask: DraftModelAsk, row_len: int, count: int, masks: Sequence[int] = ()
    ) -> Span:
        """A span of `count` unread tokens, and a chain of mask tokens after it."""
        num_absent = ask.num_missing + ask.num_skipped
        start = ask.state_row * row_len + self.network.token_shift + num_absent
        context_len = ask.num_computed - num_absent
        return Span(context_len, count, masks, ask.block_ids, start)

    def _unread(
        self, asks: Sequence[DraftModelAsk], spans: Sequence[Span], token_ids_SL: Tensor
    ) -> UnreadTexts:
        """These rows, with their states in the window."""
        window, cache, places = self._window, self.cache, list[int]()
        if window is not None:
            for ask, span in zip(asks, spans, strict=True):
                places += window.places(ask.state_row, ask.num_computed, span.num_causal)
                places += [-1] * len(span.parents)
        features_NF = window.features_NF if window is not None else None
        skipped = [ask.num_skipped for ask in asks]
        rest = features_NF, places, skipped if any(skipped) else ()
        return UnreadTexts(spans, token_ids_SL, cache.layers, cache.block_size, *rest)

    def _caught_up(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor
    ) -> Sequence[DraftModelAsk]:
        """Read long backlogs in passes of at most max_rows rows, until the rest fits into one.

        At least one token of each text is left for that pass.
        """
        current = list(asks)
        more = sum(len(ask.masks) for ask in asks)
        while True:
            unread = [self._num_unread(ask) for ask in current]
            if sum(unread) + more <= self._max_rows:
                return current
            budget = self._max_rows
            spans: dict[int, Span] = {}
            for i, ask in enumerate(current):
                count = min(unread[i] - 1, budget)
                if count > 0:
                    budget -= count
                    spans[i] = self._span(ask, token_ids_SL.shape[1], count)
            if not spans:
                return current
            read, chunks = [current[i] for i in spans], list(spans.values())
            self._pass(self._unread(read, chunks, token_ids_SL))
            for i, span in spans.items():
                num_computed = current[i].num_computed + span.num_causal
                current[i] = structs.replace(current[i], num_computed=num_computed)

    def _pass(
        self,
        unread: UnreadTexts,
        masks: Sequence[Sequence[int]] = (),
        extra: Sequence[Sequence[int]] = (),
    ) -> tuple[Tensor, AttentionMetadata, Sequence[Tensor]]:
        """The states of all rows, [T, D]; their batch; `extra` on the device.

        Args:
            masks: the tokens that each request reads after its text; (): no request reads any.
        """
        network, spans = self.network, unread.spans
        width = max([len(span.parents) for span in spans])
        drafted: list[int] = []
        for tokens in masks:
            drafted += tokens
            drafted += [-1] * (width - len(tokens))
        device = unread.token_ids_SL.device
        sent = [drafted, unread.places, *extra]
        placed = network.kernels.place_rows(spans, sent, unread.block_size, width).to(device)
        drafts, places_T, *sent_extra = placed.extra
        if unread.num_skipped:
            placed = _in_the_text(placed, unread, device)
        ids_T = read_token_ids(
            unread.token_ids_SL,
            drafts.view(len(spans), width),
            placed.state_index_T,
            placed.draft_index_T,
        )
        features_NF = unread.features_NF
        states_TD = None
        if features_NF is not None:
            states_TD = features_NF.new_empty(len(places_T), features_NF.shape[1])
            network.kernels.copy_rows(states_TD, None, features_NF, places_T)
            if self._mask_state_D is not None:
                states_TD = torch.where(places_T[:, None] >= 0, states_TD, self._mask_state_D)
        return network.read(ids_T, states_TD, unread.caches, placed), placed, sent_extra


def _in_the_text(placed: RowBatch, unread: UnreadTexts, device: torch.device) -> RowBatch:
    """Shift the rows' positions to those of the texts, where some blocks are left out."""
    (skipped_B, rows_B) = to_device(
        [np.array(unread.num_skipped), np.array([span.num_rows for span in unread.spans])], device
    )
    skipped_T = skipped_B.repeat_interleave(rows_B, output_size=len(placed.positions_T))
    return replace(placed, positions_T=placed.positions_T + skipped_T)
