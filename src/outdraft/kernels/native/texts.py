"""Texts by the compiled library: an object there remembers them, and one call serves a step."""

import struct
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char, c_double, c_int64, c_void_p
from functools import partial

import numpy as np

from outdraft.core.draft import MAX_DRAFTS, Draft, DraftAsk
from outdraft.kernels.native.library import Library

_INT32 = np.dtype(np.int32)  # to compare with this is cheap, with np.int32 it is not
_NO_BYTES = c_char * 0
_ASK = struct.Struct("=4q")  # TextAsk of csrc/text_drafts.cpp
_SUFFIX_RULE = c_int64, c_double, c_double, c_int64
_PLACES = 1 + 2 * MAX_DRAFTS  # of a draft


class NativeTexts:
    """Texts of requests that the library remembers, see csrc/text_drafts.cpp.

    Args:
        new_text: makes what the library remembers of a text.
    """

    def __init__(self, library: Library, new_text: Callable[[], int]) -> None:
        self._new_text = new_text
        self._free = library.function("free_text", [c_void_p])
        self._num_bytes = library.function("text_bytes", [c_void_p], c_int64)
        self._draft = library.function("draft_texts", [c_int64, *[c_void_p] * 4], c_int64)
        self._texts: dict[str, int] = {}
        self._arrays = _AskArrays(1)

    def __del__(self) -> None:
        for text in self._texts.values():
            self._free(text)

    @property
    def num_bytes(self) -> int:
        """Memory of everything that is remembered."""
        return sum(self._num_bytes(text) for text in self._texts.values())

    def draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        arrays = self._arrays
        if len(asks) > arrays.num_asks:
            arrays = self._arrays = _AskArrays(2 * len(asks))
        start = 0
        for ask in asks:
            text = self._texts.get(ask.request_id)
            if text is None:
                text = self._texts[ask.request_id] = self._new_text()
            token_ids = ask.token_ids
            max_tokens = min(ask.max_tokens, MAX_DRAFTS)
            _ASK.pack_into(
                arrays.asks, start, text, _address(token_ids), len(token_ids), max_tokens
            )
            start += _ASK.size
        num_places = self._draft(len(asks), *arrays.addresses)
        return arrays.to_drafts(len(asks), num_places)

    def forget(self, request_id: str) -> None:
        text = self._texts.pop(request_id, None)
        if text is not None:
            self._free(text)


class NativeSuffixTexts(NativeTexts):
    """Texts of requests and finished texts."""

    def __init__(
        self,
        library: Library,
        max_depth: int,
        max_spec_factor: float,
        min_token_prob: float,
        branching: int,
    ) -> None:
        function = library.function
        self._finished = function("new_finished", [c_int64] * 2, c_void_p)(max_depth, branching)
        new_text = function("new_suffix_text", [c_void_p, *_SUFFIX_RULE], c_void_p)
        rule = max_depth, max_spec_factor, min_token_prob, branching
        super().__init__(library, partial(new_text, self._finished, *rule))
        self._free_finished = function("free_finished", [c_void_p])
        self._finished_bytes = function("finished_bytes", [c_void_p], c_int64)
        self._add = function("add_finished", [c_void_p, c_void_p, c_int64])
        self._count = function("count_finished", [c_void_p, c_int64], c_int64)
        self._remove = function("remove_finished", [c_void_p, c_int64], c_int64)

    def __del__(self) -> None:
        super().__del__()
        self._free_finished(self._finished)

    @property
    def num_bytes(self) -> int:
        """Memory of everything that is remembered."""
        return super().num_bytes + self._finished_bytes(self._finished)

    def add_finished(self, token_ids_T: np.ndarray) -> None:
        self._add(self._finished, _address(token_ids_T), len(token_ids_T))

    def count_finished(self, max_tokens: int) -> int:
        return self._count(self._finished, max_tokens)

    def remove_finished(self, max_tokens: int) -> int:
        return self._remove(self._finished, max_tokens)


def ngram_texts(library: Library, min_n: int, max_n: int, branching: int) -> NativeTexts:
    new_text = library.function("new_ngram_text", [c_int64] * 3, c_void_p)
    return NativeTexts(library, partial(new_text, min_n, max_n, branching))


class _AskArrays:
    """Asks and drafts as arrays, with their addresses; kept from step to step."""

    def __init__(self, num_asks: int) -> None:
        self.num_asks = num_asks
        self.asks = bytearray(num_asks * _ASK.size)
        self._drafts = np.empty(num_asks * _PLACES, np.int32)
        self._scores = np.empty(num_asks)
        self._match_lengths = np.empty(num_asks, np.int64)
        self.addresses = (
            addressof(c_char.from_buffer(self.asks)),
            self._drafts.ctypes.data,
            self._scores.ctypes.data,
            self._match_lengths.ctypes.data,
        )

    def to_drafts(self, num_asks: int, num_places: int) -> list[Draft]:
        numbers: tuple[int, ...] = tuple(self._drafts[:num_places].tolist())
        scores: list[float] = self._scores[:num_asks].tolist()
        match_lengths: list[int] = self._match_lengths[:num_asks].tolist()
        drafts: list[Draft] = []
        start = 1
        for score, match_length in zip(scores, match_lengths, strict=True):
            middle = start + numbers[start - 1]
            stop = 2 * middle - start
            if stop > start:
                token_ids, parents = numbers[start:middle], numbers[middle:stop]
                drafts.append(Draft(token_ids, parents, score, match_length))
            else:
                drafts.append(Draft())
            start = stop + 1
        return drafts


def _address(token_ids: np.ndarray) -> int:
    """The address of contiguous int32 token ids; their owner keeps them during the call."""
    assert token_ids.dtype == _INT32
    if token_ids.flags.writeable:  # numpy's own answer takes five times as long
        return addressof(_NO_BYTES.from_buffer(token_ids.data))
    assert token_ids.flags.c_contiguous
    return token_ids.ctypes.data
