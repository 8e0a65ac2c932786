"""Makes the deltas of a caller's request from the results of the engine's steps."""

import time

from outdraft.core.decision import Decision
from outdraft.core.outputs import DraftTrace, RequestDelta, SequenceDelta, TokenOrigin
from outdraft.core.plan import DraftChoice, TokenLogprobs, WorkResult
from outdraft.core.request import BookedWork


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
        self._has_sent_prompt = False
        self._grown: list[SequenceDelta] = []

    def add(
        self,
        index: int,
        booked: BookedWork,
        step_s: float,
        decision: Decision | None = None,
        granted: DraftChoice | None = None,
    ) -> None:
        """Book one step of the index-th sequence.

        Args:
            step_s: time of the engine's step, in seconds.
            decision: about the engine's step, for the trace.
            granted: the draft that the sequence was granted before the step was planned.
        """
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
            trace = None
            if request.params.speculation.trace:
                trace = _trace(booked, step_s, decision, granted)
            self._grown.append(_sequence_delta(index, booked, trace))

    def take(self) -> RequestDelta:
        """Return the delta since the last call."""
        sequences, self._grown = tuple(self._grown), []
        prompt_logprobs = None
        if not self._has_sent_prompt and sequences[0].index == 0:
            self._has_sent_prompt = True
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


def _sequence_delta(index: int, booked: BookedWork, trace: DraftTrace | None) -> SequenceDelta:
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
        trace,
        None if reason is None else str(reason),
        request.stop_reason,
        request.error,
    )


def _origins(outcome: WorkResult, drafts: DraftChoice | None) -> tuple[TokenOrigin, ...]:
    """Return one origin per emitted token, accepted drafts first."""
    if drafts is None:
        return (TokenOrigin.PLAIN,)
    accepted = [TokenOrigin(drafts.source)] * len(outcome.accepted_rows)
    # Row 0 of the parents is the root, so a drafted row has its place plus one there.
    is_whole = (
        bool(outcome.accepted_rows) and outcome.accepted_rows[-1] + 1 not in outcome.drafted_parents
    )
    return (*accepted, TokenOrigin.BONUS if is_whole else TokenOrigin.RECOVERED)


def _trace(
    booked: BookedWork, step_s: float, decision: Decision | None, granted: DraftChoice | None
) -> DraftTrace:
    drafts, outcome = booked.work.drafts, booked.outcome
    return DraftTrace(
        (str(drafts.source),) * len(outcome.drafted_ids) if drafts is not None else (),
        outcome.drafted_ids,
        outcome.drafted_parents,
        outcome.accepted_rows,
        len(booked.added),
        step_s,
        outcome.drafted_logprobs,
        len(granted) if granted is not None else 0,
        decision,
    )
