"""What a drafting network has not read yet: the end of a text, and what stands behind it.

Dimension key: B requests that draft, T rows, S state rows, L tokens of a text.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from outdraft.attention.rows import Span
from outdraft.drafting.device.model_drafts import DraftModelAsk

# Reads a span of the text of each ask; what it returns is not needed.
ReadSpans = Callable[[Sequence[DraftModelAsk], Sequence[Span]], object]


def num_unread(ask: DraftModelAsk, lag: int) -> int:
    """Tokens of the text to read; `lag` as in DraftNetwork."""
    return ask.num_tokens - lag - ask.num_computed


def whole_span(ask: DraftModelAsk, lag: int) -> Span:
    """What is left to read: first the rest of the text, then what continues it."""
    return Span(ask.num_computed, num_unread(ask, lag) + len(ask.continued), (), ask.block_ids)


def catch_up(
    asks: Sequence[DraftModelAsk], lag: int, max_rows: int, read: ReadSpans
) -> list[DraftModelAsk]:
    """Read long backlogs in passes of at most max_rows rows, until the rest fits into one.

    At least one token of each text is left for that pass.
    """
    current = list(asks)
    more = sum(len(ask.continued) for ask in asks)
    while True:
        unread = [num_unread(ask, lag) for ask in current]
        if sum(unread) + more <= max_rows:
            return current
        budget = max_rows
        chosen: list[int] = []
        spans: list[Span] = []
        for i, ask in enumerate(current):
            count = min(unread[i] - 1, budget)
            if count > 0:
                budget -= count
                chosen.append(i)
                spans.append(Span(ask.num_computed, count, (), ask.block_ids))
        if not chosen:
            return current
        read([current[i] for i in chosen], spans)
        for i, span in zip(chosen, spans, strict=True):
            num_computed = current[i].num_computed + span.num_causal
            current[i] = replace(current[i], num_computed=num_computed)


def text_places(
    asks: Sequence[DraftModelAsk],
    spans: Sequence[Span],
    positions_T: np.ndarray,
    lag: int,
    row_len: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Where the token of each row stands, both int64 [T].

    The first is the flat place in the texts [S, L]. The second is the token itself where it belongs
    to `continued`, and its place then has no meaning; elsewhere it is -1.

    Args:
        positions_T: cache indices of the rows.
        row_len: L.
    """
    counts_B = [span.num_causal for span in spans]
    columns_T = positions_T + lag
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
