"""Follows a grammar along one sequence's output, and along the trees that are drafted after it.

Dimension key: R rows of a draft with its root, W int32 words of a mask of one bit per token.
"""

from collections.abc import Callable, Sequence, Set
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher

from outdraft.structured.time_limit import TimeLimit

EVERYTHING = -1  # all bits of a word
Result = TypeVar("Result")


class Grammar:
    """A compiled grammar, which any number of sequences follow.

    All states that were copied from each other share one lexer. It caches its work, which makes
    later masks faster, up to a limit: then it is replaced.
    """

    def __init__(
        self, compile_state: Callable[[], LLMatcher], end_id: int, limit: TimeLimit
    ) -> None:
        """
        Args:
            end_id: the token of the library's tokenizer that stands for the end of the output.
            limit: of the time that it may take to follow the grammar for one sequence and step.
        """
        self.end_id = end_id
        self.limit = limit
        self.failure: str | None = None  # why no sequence may follow it any more
        self.start = compile_state()
        self.compile_state = compile_state

    def matcher(self, stop_ids: Set[int]) -> "SequenceMatcher":
        """Make a new sequence's matcher: `stop_ids` may end it exactly where the grammar may end.

        Without `stop_ids` it is finished where nothing can follow.
        """
        return SequenceMatcher(self, stop_ids)


class SequenceMatcher:
    """The GrammarMatcher of one sequence."""

    def __init__(self, grammar: Grammar, stop_ids: Set[int]) -> None:
        self._grammar = grammar
        self._stop_ids = sorted(stop_ids)
        self._output: list[int] = []
        self._start = grammar.start
        self._state = grammar.start.deep_copy()
        self.is_finished = False
        self.failure: str | None = None

    def advance(self, token_id: int) -> None:
        if self._is_over():
            return
        if token_id in self._stop_ids:
            self.is_finished = True
            return
        self._within_time(lambda: self._advance(token_id))

    def fill_masks(
        self, token_ids: Sequence[int], parents: Sequence[int], masks_RW: np.ndarray
    ) -> list[int]:
        masks_RW[:] = EVERYTHING
        if self._is_over():
            return []
        own_RW = masks_RW.copy()  # a call that took too long may still write to it
        ends = self._within_time(lambda: self._masks(token_ids, parents, own_RW))
        if ends is None or self.failure is not None:
            return []
        masks_RW[:] = own_RW
        return ends

    def _is_over(self) -> bool:
        if self._grammar.failure is not None and not self.is_finished:
            self.failure = self._grammar.failure
        return self.is_finished or self.failure is not None

    def _within_time(self, function: Callable[[], Result]) -> Result | None:
        """Return the function's result; None: it takes too long, so the state must not be used.

        Nor the grammar: all sequences that follow it share its lexer, which may be in use for long.
        """
        try:
            return self._grammar.limit.run(function)
        except TimeoutError:
            limit_s = self._grammar.limit.limit_s
            reason = f"it took more than {limit_s:g} s to find what may follow"
            self._grammar.failure = self.failure = _failure(reason)
            return None

    def _advance(self, token_id: int) -> None:
        self._output.append(token_id)
        if not self._state.consume_token(token_id) and not self._renew():
            self._fail()
        elif not self._stop_ids and self._state.is_accepting():
            self.is_finished = self._is_complete()

    def _masks(
        self, token_ids: Sequence[int], parents: Sequence[int], masks_RW: np.ndarray
    ) -> list[int]:
        """Write the masks; return the ends."""
        ends = self._masks_and_ends(token_ids, parents, masks_RW)
        if "LexerTooComplex" in ends.values() and self._renew():  # a fresh one might find masks
            masks_RW[:] = EVERYTHING
            ends = self._masks_and_ends(token_ids, parents, masks_RW)
        if 0 in ends:
            self._fail()
            return []
        return list(ends)

    def _masks_and_ends(
        self, token_ids: Sequence[int], parents: Sequence[int], masks_RW: np.ndarray
    ) -> dict[int, str]:
        """Write the masks; return the rows that can be reached but have none, each with why."""
        states, ends = {0: self._state}, dict[int, str]()
        for row in range(len(token_ids) + 1):
            if row > 0:
                parent, token_id = parents[row - 1], token_ids[row - 1]
                is_known = parent in states and token_id not in self._stop_ids
                if not is_known or not _holds(masks_RW[parent], token_id):
                    continue  # neither it nor a descendant is ever emitted
                state = states[parent].deep_copy()  # takes microseconds; its errors are its own
                if not state.consume_token(token_id):
                    ends[row] = state.stop_reason()
                    continue
                states[row] = state
            if not self._write_mask(states[row], masks_RW[row]):
                masks_RW[row] = EVERYTHING
                ends[row] = states.pop(row).stop_reason()
        return ends

    def _write_mask(self, state: LLMatcher, mask_W: np.ndarray) -> bool:
        """Write the tokens that may follow a state; False if there are none.

        Then the output is complete, no tokens can complete it, or the grammar has become too
        complex for the library.
        """
        words_W = np.frombuffer(state.compute_bitmask(), dtype=np.int32)
        if state.is_error():
            return False
        may_end = _holds(words_W, self._grammar.end_id)
        mask_W[:] = words_W[: len(mask_W)]
        _set(mask_W, self._grammar.end_id, False)
        text_W = mask_W.copy()
        for stop_id in self._stop_ids:
            _set(mask_W, stop_id, may_end)
        if not mask_W.any() and not may_end:
            # Only tokens that the caller made stop tokens can follow: then they may end the output,
            # as they would without a grammar.
            mask_W[:] = text_W
        return bool(mask_W.any())

    def _is_complete(self) -> bool:
        """Return True if nothing can follow the output, which may end here."""
        words_W = np.frombuffer(self._state.compute_bitmask(), dtype=np.int32).copy()
        _set(words_W, self._grammar.end_id, False)
        return not self._state.is_error() and not words_W.any()

    def _renew(self) -> bool:
        """Reach the same state with another lexer; False if that is not possible."""
        if self._grammar.start is self._start:
            self._grammar.start = self._grammar.compile_state()
        self._start = self._grammar.start
        self._state = self._start.deep_copy()
        return self._state.consume_tokens(self._output)

    def _fail(self) -> None:
        self.failure = _failure(self._state.get_error() or "no token can follow")


def _failure(reason: str) -> str:
    """The message for the client."""
    return f"the output can keep to its grammar no longer: {reason}"


def _holds(mask_W: np.ndarray, token_id: int) -> bool:
    word, bit = divmod(token_id, 32)
    return word < len(mask_W) and bool(mask_W[word] >> bit & 1)


def _set(mask_W: np.ndarray, token_id: int, value: bool) -> None:
    """Set one bit; nothing happens if the mask does not reach so far."""
    word, bit = divmod(token_id, 32)
    if word < len(mask_W):
        bits = np.uint32(1 << bit).view(np.int32)
        mask_W[word] = mask_W[word] | bits if value else mask_W[word] & ~bits
