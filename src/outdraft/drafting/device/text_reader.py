"""Reads what a drafting network has not read yet: the end of a text, and what stands behind it.

Its keys and values live in the same blocks as the target's. It may lag: before it drafts it reads
all tokens that it has not seen, the accepted ones and the newest together, in one pass.

Dimension key: B requests that draft, T rows, C rows of each request whose states are wanted, S
state rows, L tokens of a text, D the network's state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata
from outdraft.attention.rows import Span, lay_out, send
from outdraft.drafting.device.draft_network import DraftNetwork
from outdraft.drafting.device.model_drafts import DraftModelAsk
from outdraft.kv.cache import KVCache
from outdraft.kv.feature_cache import FeatureCache


@dataclass(frozen=True, slots=True)
class MaskStates:
    """What a network that reads states reads beside tokens that the target has not read.

    Attributes:
        state_D: learned.
        features: where the states of the text's tokens are.
    """

    state_D: Tensor
    features: FeatureCache


class TextReader:
    """Reads texts with a network, as far as needed."""

    def __init__(
        self,
        network: DraftNetwork,
        cache: KVCache,
        max_rows: int,
        mask_states: MaskStates | None = None,
    ) -> None:
        """`max_rows`: of one pass."""
        self.network, self.cache = network, cache
        self._max_rows = max_rows
        self._mask_states = mask_states

    def read(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, num_last: Sequence[int]
    ) -> tuple[Tensor, AttentionMetadata]:
        """Read all that the network has not seen.

        Returns the states behind the last rows of each request, [B, C, D], and the batch of the
        pass that read them. C is the largest of `num_last`. Who wants fewer rows than C has the
        last one repeated.
        """
        asks = self._caught_up(asks, token_ids_SL)
        lag = self.network.lag
        spans = [
            Span(ask.num_computed, _num_unread(ask, lag) + len(ask.continued), (), ask.block_ids)
            for ask in asks
        ]
        counts_B1 = np.array(num_last)[:, None]
        ends_B1 = np.array([[span.num_causal] for span in spans]).cumsum(0)
        places_BC = np.minimum(np.arange(counts_B1.max()), counts_B1 - 1)
        rows_R = (ends_B1 - counts_B1 + places_BC).ravel()
        states_TD, metadata, rows = self._pass(asks, spans, token_ids_SL, rows_R)
        if not np.array_equal(rows_R, np.arange(len(states_TD))):
            states_TD = states_TD[rows]
        return states_TD.view(*places_BC.shape, -1), metadata

    def _caught_up(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor
    ) -> Sequence[DraftModelAsk]:
        """Read long backlogs in passes of at most max_rows rows, until the rest fits into one.

        At least one token of each text is left for that pass.
        """
        current = list(asks)
        more = sum(len(ask.continued) for ask in asks)
        while True:
            unread = [_num_unread(ask, self.network.lag) for ask in current]
            if sum(unread) + more <= self._max_rows:
                return current
            budget = self._max_rows
            spans: dict[int, Span] = {}
            for i, ask in enumerate(current):
                count = min(unread[i] - 1, budget)
                if count > 0:
                    budget -= count
                    spans[i] = Span(ask.num_computed, count, (), ask.block_ids)
            if not spans:
                return current
            nothing = np.zeros(0, dtype=np.int64)
            self._pass([current[i] for i in spans], list(spans.values()), token_ids_SL, nothing)
            for i, span in spans.items():
                num_computed = current[i].num_computed + span.num_causal
                current[i] = replace(current[i], num_computed=num_computed)

    def _pass(
        self,
        asks: Sequence[DraftModelAsk],
        spans: Sequence[Span],
        token_ids_SL: Tensor,
        extra: np.ndarray,
    ) -> tuple[Tensor, AttentionMetadata, Tensor]:
        """The states of all rows, [T, D]; their batch; `extra` on the device."""
        network = self.network
        layout = lay_out(spans, self.cache.block_size, network.kernels)
        flat_T, given_T = _text_places(
            asks, spans, layout.placed.positions_T + network.lag, token_ids_SL.shape[1]
        )
        metadata, (flat, given, sent) = send(layout, [flat_T, given_T, extra], token_ids_SL.device)
        ids_T, states_TD = token_ids_SL.view(-1)[flat], None
        if any(ask.continued for ask in asks):
            ids_T = torch.where(given < 0, ids_T, given)
        if self._mask_states is not None:
            features_TD = self._mask_states.features.read(metadata.slots_T)
            states_TD = torch.where(given[:, None] < 0, features_TD, self._mask_states.state_D)
        return network.read(ids_T, states_TD, self.cache.layers, metadata), metadata, sent


def _num_unread(ask: DraftModelAsk, lag: int) -> int:
    """Tokens of the text to read; `lag` as in DraftNetwork."""
    return ask.num_tokens - lag - ask.num_computed


def _text_places(
    asks: Sequence[DraftModelAsk], spans: Sequence[Span], columns_T: np.ndarray, row_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Where the token of each row stands, both int64 [T].

    The first is the flat place in the texts [S, L]. The second is the token itself where it belongs
    to `continued`, and its place then has no meaning; elsewhere it is -1.

    Args:
        columns_T: places of the tokens in their texts.
        row_len: L.
    """
    counts_B = [span.num_causal for span in spans]
    given_T = np.full(len(columns_T), -1, dtype=np.int64)
    end = 0
    for ask, count in zip(asks, counts_B, strict=True):
        end += count
        num_behind = int(columns_T[end - 1]) + 1 - ask.num_tokens
        if num_behind > 0:
            assert num_behind == len(ask.continued), "a continuation is read whole"
            given_T[end - num_behind : end] = ask.continued
    rows_T = np.repeat([ask.state_row for ask in asks], counts_B)
    return rows_T * row_len + np.where(given_T < 0, columns_T, 0), given_T
