"""Texts by the compiled library: an object there remembers them, and one call serves a step."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from outdraft.core.draft import MAX_DRAFTS, Draft, DraftAsk
from outdraft.kernels.native.library import Library

_PLACES = 1 + 2 * MAX_DRAFTS  # of a draft


class NativeTexts:
    """Texts of requests that the library remembers, see csrc/text_drafts.cpp.

    Args:
        new_text: makes what the library remembers of a text.
    """

    def __init__(self, library: Library, new_text: Callable[[], int]) -> None:
        self._new_text = new_text
        self._free, self._num_bytes = library.function("free_text"), library.function("text_bytes")
        self._draft = library.function("draft_texts")
        self._texts: dict[str, int] = {}

    def __del__(self) -> None:
        for text in self._texts.values():
            self._free(text)

    @property
    def num_bytes(self) -> int:
        """Memory of everything that is remembered."""
        return sum(self._num_bytes(text) for text in self._texts.values())

    def draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """Drafts of all asks: of each its number, then its token ids and their parents."""
        numbers = np.empty(len(asks) * _PLACES, np.int32)
        scores, match_lengths = np.empty(len(asks)), np.empty(len(asks), np.int64)
        native = np.array([self._ask(ask) for ask in asks], dtype=np.int64)
        self._draft(len(asks), native, numbers, scores, match_lengths)
        drafts: list[Draft] = []
        start = 0
        for score, match_length in zip(scores.tolist(), match_lengths.tolist(), strict=True):
            size = int(numbers[start])
            ids, parents = numbers[start + 1 : start + 1 + 2 * size].reshape(2, size).tolist()
            start += 1 + 2 * size
            drafts.append(
                Draft(tuple(ids), tuple(parents), score, match_length) if size else Draft()
            )
        return drafts

    def forget(self, request_id: str) -> None:
        text = self._texts.pop(request_id, None)
        if text is not None:
            self._free(text)

    def _ask(self, ask: DraftAsk) -> tuple[int, int, int, int]:
        """The fields of `TextAsk`, csrc/text_drafts.cpp."""
        text = self._texts.get(ask.request_id)
        if text is None:
            text = self._texts[ask.request_id] = self._new_text()
        token_ids = ask.token_ids
        assert token_ids.dtype == np.int32
        assert token_ids.flags.c_contiguous
        return text, token_ids.ctypes.data, len(token_ids), min(ask.max_tokens, MAX_DRAFTS)


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
        self._finished = function("new_finished")(max_depth, branching)
        rule = max_depth, max_spec_factor, min_token_prob, branching
        super().__init__(library, partial(function("new_suffix_text"), self._finished, *rule))
        self._free_finished = function("free_finished")
        self._finished_bytes = function("finished_bytes")
        self._add, self._count = function("add_finished"), function("count_finished")
        self._remove = function("remove_finished")

    def __del__(self) -> None:
        super().__del__()
        self._free_finished(self._finished)

    @property
    def num_bytes(self) -> int:
        """Memory of everything that is remembered."""
        return super().num_bytes + self._finished_bytes(self._finished)

    def add_finished(self, token_ids_T: np.ndarray) -> None:
        self._add(self._finished, token_ids_T, len(token_ids_T))

    def count_finished(self, max_tokens: int) -> int:
        return self._count(self._finished, max_tokens)

    def remove_finished(self, max_tokens: int) -> int:
        return self._remove(self._finished, max_tokens)


def ngram_texts(library: Library, min_n: int, max_n: int, branching: int) -> NativeTexts:
    return NativeTexts(
        library, partial(library.function("new_ngram_text"), min_n, max_n, branching)
    )
