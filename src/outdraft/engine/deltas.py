"""What the engine remembers of a caller's request between steps, and the deltas it tells of it."""

import time
from collections.abc import Mapping

from msgspec import Struct

from outdraft.core.decision import Decision
from outdraft.core.draft import DraftSource
from outdraft.core.outputs import DraftTrace, RequestDelta, SequenceDelta, TokenOrigin
from outdraft.core.plan import DraftChoice, TokenLogprobs, WorkResult
from outdraft.core.request import BookedWork

_ORIGINS = {source: TokenOrigin(source) for source in DraftSource}


class StepTold(Struct, frozen=True):
    """What a trace says of the engine's step.

    Attributes:
        seconds: how long it took.
        granted: the drafts that were wanted before the step was planned, by request.
    """

    seconds: float
    decision: Decision | None
    granted: Mapping[str, DraftChoice]


class RequestDeltas:
    """Makes the deltas of one request of n sequences.

    Attributes:
        live: ids of its sequences that have not ended.
    """

    def __init__(
        self, request_id: str, live: list[str], num_spec_tokens: int, *, lossless: bool
    ) -> None:
        self.request_id = request_id
        self.live = live
        self._num_spec_tokens = num_spec_tokens
        self._lossless = lossless
        self._first_scheduled_s: float | None = None
        self._num_cached_tokens = 0
        self._num_preemptions = 0
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._is_prompt_told = False
        self._news: list[SequenceDelta] = []

    def add(self, index: int, booked: BookedWork, told: StepTold) -> None:
        """Book one step of the index-th sequence; `told`: of all the step's requests."""
        request, work, outcome, added = booked
        if self._first_scheduled_s is None:
            self._first_scheduled_s = time.monotonic()
            self._num_cached_tokens = request.num_cached
        self._num_preemptions = max(self._num_preemptions, request.num_preemptions)
        if outcome.prompt_logprobs:
            # A preempted prompt is computed again: the same positions get the same values.
            end = work.start + len(outcome.prompt_logprobs)
            self._prompt_logprobs[work.start : end] = outcome.prompt_logprobs
        if added or request.finish_reason is not None:
            self._news.append(_sequence_delta(index, booked, told))

    def take(self) -> RequestDelta:
        """What came since it was asked last."""
        sequences, self._news = tuple(self._news), []
        prompt_logprobs = None
        if not self._is_prompt_told and sequences[0].index == 0:
            self._is_prompt_told = True
            prompt_logprobs = tuple(self._prompt_logprobs)
        assert self._first_scheduled_s is not None
        return RequestDelta(
            self.request_id,
            sequences,
            self._first_scheduled_s,
            self._num_cached_tokens,
            self._num_preemptions,
            self._num_spec_tokens,
            self._lossless,
            prompt_logprobs,
        )


def _sequence_delta(index: int, booked: BookedWork, told: StepTold) -> SequenceDelta:
    request, work, outcome, added = booked
    drafts = work.drafts
    drafted = None
    if drafts is not None:
        num_drafted = len(outcome.drafted_ids)
        drafted = {drafts.source.value: num_drafted} if num_drafted else {}
    reason = request.finish_reason
    return SequenceDelta(
        index,
        added,
        _origins(outcome, drafts)[: len(added)],
        drafted,
        outcome.logprobs[: len(added)],
        _trace(booked, told) if request.params.speculation.trace else None,
        None if reason is None else str(reason),
        request.stop_reason,
        request.error,
    )


def _origins(outcome: WorkResult, drafts: DraftChoice | None) -> tuple[TokenOrigin, ...]:
    """How each emitted token came, accepted drafts first."""
    if drafts is None:
        return (TokenOrigin.PLAIN,)
    accepted = [_ORIGINS[drafts.source]] * len(outcome.accepted_rows)
    # Row 0 of the parents is the root, so a drafted row has its place plus one there.
    is_whole = (
        bool(outcome.accepted_rows) and outcome.accepted_rows[-1] + 1 not in outcome.drafted_parents
    )
    return (*accepted, TokenOrigin.BONUS if is_whole else TokenOrigin.RECOVERED)


def _trace(booked: BookedWork, told: StepTold) -> DraftTrace:
    outcome, num_emitted = booked.outcome, len(booked.added)
    drafts, choice = booked.work.drafts, told.granted.get(booked.request.id)
    granted = len(choice) if choice is not None else 0
    if drafts is None:
        return DraftTrace((), (), (), (), num_emitted, told.seconds, (), granted, told.decision)
    return DraftTrace(
        (str(drafts.source),) * len(outcome.drafted_ids),
        outcome.drafted_ids,
        outcome.drafted_parents,
        outcome.accepted_rows,
        num_emitted,
        told.seconds,
        outcome.drafted_logprobs,
        granted,
        told.decision,
    )
