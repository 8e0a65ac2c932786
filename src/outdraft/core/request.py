"""One sequence being generated: its tokens, how far they are computed, when it ends.

A step's requests stay on the scheduler's side; only the plan crosses to the runner.
"""

import time
from collections.abc import Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from outdraft.core.grammar import GrammarMatcher
from outdraft.core.plan import NO_GAP, Admission, StepPlan, TokenRules, Work, WorkResult
from outdraft.core.sampling import SamplingParams


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestStatus(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def block_salt(cache_salt: str | None) -> bytes:
    """A part of the hashes of a text's blocks: only texts of the same salt share blocks."""
    if cache_salt is None:
        return b""
    return blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=32).digest()


class Request:
    """State of one sequence. The scheduler alone changes it.

    Attributes:
        token_ids: int32 [num_tokens], prompt and output so far.
        num_computed: tokens whose keys and values the target has in the cache.
        num_drafter_computed: the same for the drafter's layers, less the gap; may be smaller.
        drafter_gap: the tokens before those that the drafter lacks.
        sent_gap: the gap that was last sent to the runner.
        num_usual_unread: tokens left for the drafter to read if it drafts in every step.
        num_states: of the newest computed tokens the drafter can find the target's states.
        slot: row of the device-resident state while running, else None.
        owner: the draft group that drafts for it while it runs.
        seed: the noise key of every choice of this request.
        wants_drafts: the client leaves it to the engine to draft; it never changes.
        prediction_ids: int32 [num_tokens], the output that the client expects; may be empty.
        grammar: limits the output; None: nothing does.
        may_draft: False: the next step verifies no drafts, which may have spoilt the last one.
        error: the cause, of a request that ended with FinishReason.ERROR.
    """

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        *,
        seed: int,
        max_model_len: int,
        stop_token_ids: frozenset[int] = frozenset(),
        bad_words_ids: Sequence[Sequence[int]] = (),
        prediction_ids: Sequence[int] = (),
        grammar: GrammarMatcher | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        self.id = request_id
        self.params = params
        self.seed = seed
        self.priority = priority
        asked = params.speculation
        self.wants_drafts = asked.enabled and asked.num_speculative_tokens != 0
        self.stop_token_ids = stop_token_ids
        self.bad_words_ids = bad_words_ids
        self.prediction_ids = np.array(prediction_ids, dtype=np.int32)
        self.grammar = grammar
        self.num_prompt = len(prompt_ids)
        self.max_total = max_model_len
        if params.max_tokens is not None:
            self.max_total = min(max_model_len, self.num_prompt + params.max_tokens)
        self._ids = np.zeros(self.max_total, dtype=np.int32)
        self._ids[: self.num_prompt] = prompt_ids
        self.num_tokens = self.num_prompt
        self.num_computed = 0
        self.num_drafter_computed = 0
        self.drafter_gap = self.sent_gap = NO_GAP
        self.num_usual_unread = 1
        self.num_states = 0
        self.num_cached = 0  # prompt tokens found in the prefix cache at first admission
        self.num_preemptions = 0
        self.status = RequestStatus.WAITING
        self.slot: int | None = None
        self.owner = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.may_draft = True
        self.error: str | None = None
        self.block_hashes: list[bytes] = []
        self.block_salt = block_salt(cache_salt)
        self.arrival_s = time.monotonic()

    @property
    def token_ids(self) -> np.ndarray:
        return self._ids[: self.num_tokens]

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def max_drafts(self) -> int:
        """Drafts that could still be emitted together with the token that follows them."""
        return max(0, self.max_total - self.num_tokens - 1)

    def admission(self) -> Admission:
        """The message to the runner when the request gets its slot."""
        assert self.slot is not None, f"request {self.id} has no slot"
        words = tuple(tuple(word) for word in self.bad_words_ids)
        stops = tuple(sorted(self.stop_token_ids)) if self.params.min_tokens > 0 else ()
        rules = TokenRules(self.params, self.seed, stops, words)
        return Admission(self.slot, self.token_ids.copy(), self.num_prompt, rules)

    def failed(self) -> FinishReason | None:
        """FinishReason.ERROR if the grammar has failed, so that no token may follow; else None."""
        if self.grammar is None or self.grammar.failure is None:
            return None
        self.error = self.grammar.failure
        return FinishReason.ERROR

    def append(self, token_id: int) -> FinishReason | None:
        """Add one output token; the reason if the request ends with it."""
        self._ids[self.num_tokens] = token_id
        self.num_tokens += 1
        if self.num_output >= self.params.min_tokens and token_id in self.stop_token_ids:
            asked = token_id in (self.params.stop_token_ids or ())
            self.stop_reason = token_id if asked else None
            return FinishReason.STOP
        if self.grammar is not None:
            self.grammar.advance(token_id)
            if self.grammar.failure is not None:
                return self.failed()
            if self.grammar.is_finished:  # also before min_tokens: nothing can follow
                return FinishReason.STOP
        return FinishReason.LENGTH if self.num_tokens >= self.max_total else None


class ScheduledStep(NamedTuple):
    """A plan, and the requests of its works in the same order."""

    plan: StepPlan
    requests: tuple[Request, ...]

    @property
    def works(self) -> tuple[Work, ...]:
        return self.plan.works


class BookedWork(NamedTuple):
    """The outcome of one request's part of a step.

    Attributes:
        added: the tokens that were really added to the request's output.
    """

    request: Request
    work: Work
    outcome: WorkResult
    added: tuple[int, ...]
