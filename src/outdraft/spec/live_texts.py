"""The texts of many requests, each with growing arrays of its own, for one compiled call a step.

A proposer's memory of a request lies in a few int32 arrays that grow with the text. Each live
request has a row, and a table says where the arrays of a row are: a kernel that gets this table,
and where the texts are, serves a whole batch in one call.

Dimension key: B requests, R rows, A arrays of a row, 3: see array_places.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from outdraft.core.draft import MAX_DRAFTS, DraftAsk
from outdraft.spec.array_places import place_of_array, place_of_text


class TextState(Protocol):
    """What a proposer knows of one text."""

    @property
    def capacity(self) -> int:
        """Tokens of the longest text that there is room for."""
        ...

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """C-contiguous int32 arrays of two dimensions each, always in the same order."""
        ...

    def reserve(self, num_tokens: int) -> None:
        """Make room for a text of this length, and some more; arrays may be replaced."""
        ...


class TextBatch(NamedTuple):
    """The texts of a batch; good until the next one, and while its asks are.

    Attributes:
        rows_B: int64 [B].
        texts_B3: int64 [B, 3], the places of the token ids.
        max_tokens_B: int64 [B], rows that each draft may have.
        places_RA3: int64 [R, A, 3], the places of the arrays.
    """

    rows_B: np.ndarray
    texts_B3: np.ndarray
    max_tokens_B: np.ndarray
    places_RA3: np.ndarray


@dataclass(slots=True)
class _LiveText:
    row: int
    state: TextState
    num_read: int = 0
    newest_token: int = -1

    def is_continued_by(self, token_ids: np.ndarray) -> bool:
        """Whether this text can be the one that was read, grown (judged by one token)."""
        read = self.num_read
        return read == 0 or (
            read <= len(token_ids) and int(token_ids[read - 1]) == self.newest_token
        )


class LiveTexts:
    """Gives every request a row, and its state the room that its text needs."""

    def __init__(self, new_state: Callable[[], TextState]) -> None:
        self._new_state = new_state
        self._texts: dict[str, _LiveText] = {}
        self._free_rows: list[int] = []
        # Texts that were begun anew: a batch may name a request twice, and its kernel then still
        # reads the arrays of the first.
        self._replaced: list[_LiveText] = []
        self._places_RA3 = np.zeros((0, len(new_state().arrays), 3), np.int64)

    def __len__(self) -> int:
        return len(self._texts)

    def batch(self, asks: Sequence[DraftAsk]) -> TextBatch:
        """Rows for the asks, with room for their texts; the kernel must be given all of them."""
        self._free_rows += [text.row for text in self._replaced]
        self._replaced.clear()
        rows: list[int] = []
        for ask in asks:
            text = self._text_of(ask)
            rows.append(text.row)
            num_tokens = len(ask.token_ids)
            if num_tokens > text.num_read:
                text.num_read = num_tokens
                text.newest_token = int(ask.token_ids[-1])
                if num_tokens > text.state.capacity:
                    text.state.reserve(num_tokens)
                    self._point(text)
        return TextBatch(
            np.array(rows, np.int64),
            np.array([place_of_text(ask.token_ids) for ask in asks], np.int64),
            np.array([min(ask.max_tokens, MAX_DRAFTS) for ask in asks], np.int64),
            self._places_RA3,
        )

    def finish(self, request_id: str) -> None:
        """Forget a text; unknown ids are fine."""
        text = self._texts.pop(request_id, None)
        if text is not None:
            self._free_rows.append(text.row)

    def _text_of(self, ask: DraftAsk) -> _LiveText:
        text = self._texts.get(ask.request_id)
        if text is not None:
            if text.is_continued_by(ask.token_ids):
                return text
            self._replaced.append(text)
        if not self._free_rows:
            self._add_rows()
        text = _LiveText(self._free_rows.pop(), self._new_state())
        self._texts[ask.request_id] = text
        self._point(text)
        return text

    def _point(self, text: _LiveText) -> None:
        for place_3, array in zip(self._places_RA3[text.row], text.state.arrays, strict=True):
            place_3[:] = place_of_array(array)

    def _add_rows(self) -> None:
        rows, *shape = self._places_RA3.shape
        grown = np.zeros((2 * rows + 1, *shape), np.int64)
        grown[:rows] = self._places_RA3
        self._places_RA3 = grown
        self._free_rows += range(rows, len(grown))
