"""The texts of many requests, each with growing arrays of its own, for one compiled call a step.

What a proposer remembers of a request is in a few int32 arrays that grow with the text. Each live
request has a row, and a table says where the arrays of a row are. A kernel that gets this table and
the places of the texts serves a whole batch in one call.

At batch 1 this module takes most of a step's time. So the table is kept from step to step, and one
array has everything that a step says about its texts. The kernel itself finds out whether a text
continues where it stood, since it reads the text anyway.

Dimension key: B requests, R rows, A arrays of a row, 3: see array_places, T tokens.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from outdraft.core.draft import MAX_DRAFTS, DraftAsk
from outdraft.core.jit import njit
from outdraft.drafting.host.array_places import address_of, place_of_array, text_at

# Columns of a request in a batch.
ROW = 0
ADDRESS = 1  # of its token ids
LENGTH = 2  # their number
MAX_TOKENS = 3  # rows that its draft may have
COLUMNS = 4
PACKED_ASK = struct.Struct(f"={COLUMNS}q")  # the columns as bytes, which numpy takes fastest


class TextState(Protocol):
    """What a proposer knows of one text."""

    @property
    def capacity(self) -> int:
        """Tokens of the longest text that may be read before `reserve` is called again."""
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

    A text that does not continue the one of its row starts anew: kernels see to it.

    Attributes:
        asks_B4: int64 [B, 4], columns as above.
        places_RA3: int64 [R, A, 3], the places of the arrays.
    """

    asks_B4: np.ndarray
    places_RA3: np.ndarray


@dataclass(slots=True)
class _LiveText:
    row: int
    state: TextState
    capacity: int


class LiveTexts:
    """Gives every request a row, and its state the room that its text needs."""

    def __init__(self, new_state: Callable[[], TextState]) -> None:
        self._new_state = new_state
        self._texts: dict[str, _LiveText] = {}
        self._free_rows: list[int] = []
        self._places_RA3 = np.zeros((0, len(new_state().arrays), 3), np.int64)
        self._batch = TextBatch(np.empty((0, COLUMNS), np.int64), self._places_RA3)

    def __len__(self) -> int:
        return len(self._texts)

    def batch(self, asks: Sequence[DraftAsk]) -> TextBatch:
        """Rows for the asks, with room for their texts; the kernel must be given all of them."""
        if len(asks) != len(self._batch.asks_B4):
            asks_B4 = np.empty((len(asks), COLUMNS), np.int64)
            self._batch = TextBatch(asks_B4, self._places_RA3)
        packed, start = self._batch.asks_B4.data, 0
        for ask in asks:
            token_ids = ask.token_ids
            text = self._texts.get(ask.request_id)
            if text is None:
                text = self._add(ask.request_id)
            num_tokens = len(token_ids)
            if num_tokens > text.capacity:
                text.state.reserve(num_tokens)
                self._point(text)
            max_tokens = min(ask.max_tokens, MAX_DRAFTS)
            PACKED_ASK.pack_into(
                packed, start, text.row, address_of(token_ids), num_tokens, max_tokens
            )
            start += PACKED_ASK.size
        return self._batch

    def finish(self, request_id: str) -> None:
        """Forget a text; unknown ids are fine."""
        text = self._texts.pop(request_id, None)
        if text is not None:
            self._free_rows.append(text.row)

    def _add(self, request_id: str) -> _LiveText:
        if not self._free_rows:
            self._add_rows()
        text = _LiveText(self._free_rows.pop(), self._new_state(), 0)
        self._texts[request_id] = text
        self._point(text)
        return text

    def _point(self, text: _LiveText) -> None:
        text.capacity = text.state.capacity
        for place_3, array in zip(self._places_RA3[text.row], text.state.arrays, strict=True):
            place_3[:] = place_of_array(array)

    def _add_rows(self) -> None:
        rows, *shape = self._places_RA3.shape
        grown = np.zeros((2 * rows + 1, *shape), np.int64)
        grown[:rows] = self._places_RA3
        self._places_RA3 = grown
        self._batch = TextBatch(self._batch.asks_B4, grown)
        self._free_rows += range(rows, len(grown))


@njit(cache=True)
def text_of(ask_4: np.ndarray) -> np.ndarray:
    """The token ids of a request in a batch: int32 [T]."""
    return text_at(ask_4[ADDRESS], ask_4[LENGTH])


@njit(cache=True)
def is_continued(text_T: np.ndarray, num_read: int, newest_token: int) -> bool:
    """Whether a text can be the one that was read, grown (judged by one token)."""
    return num_read == 0 or (num_read <= len(text_T) and text_T[num_read - 1] == newest_token)
