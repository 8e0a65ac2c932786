"""The engine: requests in, one step at a time, deltas out. It never waits and has no I/O.

It handles ids only: RequestAssembly makes text of them, beside the engine or in another process.

The life of a step: choose drafts, schedule, launch, collect, commit.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import structs

from outdraft.core.decision import Decision
from outdraft.core.errors import RequestError
from outdraft.core.outputs import DraftTrace, RequestDelta, SequenceDelta, TargetChoice
from outdraft.core.plan import DraftChoice, StepResult, StepStats, TokenLogprobs, WorkResult
from outdraft.core.request import BookedWork, Request, ScheduledStep
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.policy import DraftPolicy
from outdraft.engine.alarms import SourceAlarms
from outdraft.engine.inputs import EncodedPrompt, InputProcessor, Prompt
from outdraft.engine.stats import StatsTotal, step_stats
from outdraft.runner.model_runner import LaunchedStep
from outdraft.runner.parallel_runner import StepRunner
from outdraft.scheduling.scheduler import Scheduler, allowed_tokens, plan_step

if TYPE_CHECKING:
    from outdraft.ranks.processes import RankProcesses


class RequestDeltas:
    """Makes the deltas of one request of n sequences.

    Attributes:
        live: by their ids, the indices of its sequences that have not ended.
    """

    def __init__(
        self, request_id: str, live: dict[str, int], num_spec_tokens: int, *, lossless: bool
    ) -> None:
        self.request_id, self.live = request_id, live
        self._num_spec_tokens, self._lossless = num_spec_tokens, lossless
        self._first_scheduled_s: float | None = None
        self._num_cached_tokens = self._num_preemptions = 0
        self._prompt_logprobs: list[TokenLogprobs] | None = []  # None: they have been taken
        self._grown: list[SequenceDelta] = []

    def add(
        self,
        booked: BookedWork,
        step_s: float,
        decision: Decision | None = None,
        granted: DraftChoice | None = None,
    ) -> None:
        """Book one step of a sequence.

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
        if outcome.prompt_logprobs and self._prompt_logprobs is not None:
            # A preempted prompt is computed again: the same positions get the same values.
            end = work.start + len(outcome.prompt_logprobs)
            self._prompt_logprobs[work.start : end] = outcome.prompt_logprobs
        if added or request.finish_reason is not None:
            is_traced = request.params.speculation.trace
            trace = _trace(booked, step_s, decision, granted) if is_traced else None
            self._grown.append(_sequence_delta(self.live[request.id], booked, trace))

    def take(self) -> RequestDelta:
        """Return the delta since the last call."""
        sequences, self._grown = tuple(self._grown), []
        prompt_logprobs = None
        if self._prompt_logprobs is not None and sequences[0].index == 0:
            prompt_logprobs, self._prompt_logprobs = tuple(self._prompt_logprobs), None
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


class Engine:
    """Composes scheduler, draft policy and runner; makes the deltas of callers' requests.

    Not safe to use from several threads: AsyncEngine does that. An engine of several ranks whose
    step raises RanksError is dead.

    Attributes:
        on_step: is called after each step.
        ranks: the processes that compute with it; None: it computes alone.
    """

    def __init__(
        self,
        inputs: InputProcessor,
        scheduler: Scheduler,
        drafting: DraftPolicy,
        runner: StepRunner,
        ranks: "RankProcesses | None" = None,
    ) -> None:
        self.inputs = inputs
        self.scheduler = scheduler
        self.drafting = drafting
        self.runner = runner
        self.stats = StatsTotal()
        self.on_step: Callable[[StepStats], None] | None = None
        self.ranks = ranks
        # One of a caller's n sequences is a request of the scheduler.
        self._sequences: dict[str, tuple[Request, RequestDeltas]] = {}
        self._callers: dict[str, RequestDeltas] = {}
        self._num_added = 0
        self._alarms = SourceAlarms(str(source) for source in drafting.config.methods)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def is_live(self, request_id: str) -> bool:
        """Return True if a sequence of the request waits or runs."""
        return request_id in self._callers

    def running_requests(self) -> list[str]:
        """Ids of the requests with a sequence that runs, or that ended without a delta."""
        waiting = {request.id for request in self.scheduler.waiting}
        return [
            request_id
            for request_id, deltas in self._callers.items()
            if not waiting.issuperset(deltas.live)
        ]

    def prepare(self, params: SamplingParams) -> None:
        """Do the parts of `add_request` that may take seconds. Safe to use from any thread.

        Raises:
            RequestError: the parameters are wrong.
        """
        self.inputs.check_params(params)
        self.inputs.grammar(params)

    def check_request(self, prompt: Prompt, params: SamplingParams) -> EncodedPrompt:
        """Check a request; return its prompt encoded, which `add_request` takes as well.

        Raises:
            RequestError: such a request could never run. Nothing is queued either way.
        """
        encoded = self.inputs.encoded(prompt)
        self._sequence_requests("", encoded, params, priority=0)
        return encoded

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0
    ) -> None:
        """Queue a request of n sequences.

        Raises:
            RequestError: it can never run; nothing was queued.
            CapacityError: the waiting queue has no room for it now.
        """
        if request_id in self._callers:
            raise RequestError(f"request id {request_id!r} is in use", "request_id")
        self.scheduler.check_room(params.n)
        encoded = self.inputs.encoded(prompt)
        requests = self._sequence_requests(request_id, encoded, params, priority)
        deltas = RequestDeltas(
            request_id,
            {request.id: index for index, request in enumerate(requests)},
            self.drafting.limits.most_drafts(requests[0]),
            lossless=self.drafting.config.is_lossless,
        )
        for request in requests:
            self.scheduler.add(request)
            self._sequences[request.id] = request, deltas
        self._callers[request_id] = deltas
        self._num_added += 1

    def step(self) -> list[RequestDelta]:
        """Advance all running requests by at least 1 token or prompt chunk; return the deltas.

        A sequence that fails by itself ends with FinishReason.ERROR; the others go on.
        """
        started_s = time.perf_counter()
        step = plan_step(self.scheduler, self.drafting)
        if not step.works:
            return []
        result = self._run(step)
        booked = self.scheduler.commit(step, result)
        grown: dict[str, RequestDeltas] = {}
        booked_s = time.perf_counter() - started_s
        decision, granted = self.drafting.decided, self.drafting.granted
        for one in booked:
            request, deltas = self._sequences[one.request.id]
            deltas.add(one, booked_s, decision, granted.get(request.id))
            if one.added or request.finish_reason is not None:
                grown[deltas.request_id] = deltas
        stats = step_stats(
            booked,
            result,
            step_s=time.perf_counter() - started_s,
            num_waiting=len(self.scheduler.waiting),
            kv_usage=self.scheduler.pool.usage,
            granted=granted,
            decision=decision,
        )
        self.drafting.observe(booked, stats)
        if alarms := self._alarms.watch(booked, decision):
            stats = structs.replace(stats, alarms=alarms)
        self._record(stats)
        taken = [deltas.take() for deltas in grown.values()]
        for one in booked:  # last: after a step that failed, callers can abort them
            if one.request.finish_reason is not None:
                self._forget(one.request.id)
        return taken

    def abort(self, request_id: str) -> None:
        """End a request early and give back all it holds; unknown ones are ignored.

        After a step that failed: also one that ended in it, of which no delta came.
        """
        caller = self._callers.get(request_id)
        for sequence_id in list(caller.live) if caller is not None else ():
            self.scheduler.abort(sequence_id)
            self._forget(sequence_id)

    def stop_sequence(self, request_id: str, index: int, num_tokens: int) -> None:
        """End one of a request's sequences because its reader found a stop string.

        The text ends with the first `num_tokens` tokens of its output. Unlike an aborted one it
        is a whole text, which the proposers learn. Unknown ones are ignored.
        """
        sequence_id = _sequence_id(request_id, index)
        if sequence_id in self._sequences:
            request, _ = self._sequences[sequence_id]
            self.scheduler.stop(request, num_tokens)
            self._forget(sequence_id)

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not balance."""
        self.scheduler.check_invariants()
        live = {request.id for request in (*self.scheduler.running, *self.scheduler.waiting)}
        assert live == set(self._sequences)
        assert live == {one for deltas in self._callers.values() for one in deltas.live}

    def _run(self, step: ScheduledStep) -> StepResult:
        """Compute a step and wait for it; masks are made while the target reads."""
        pending = self.runner.launch(step.plan)
        if isinstance(pending, LaunchedStep):
            drafted = self.runner.drafted(pending)
            allowed = allowed_tokens(step, drafted, self.inputs.vocab_size)
            pending = self.runner.verify(pending, allowed)
        return self.runner.collect(pending)

    def _forget(self, sequence_id: str) -> None:
        """Forget a sequence that ended, as proposers and alarms do, too."""
        request, deltas = self._sequences.pop(sequence_id)
        del deltas.live[sequence_id]
        if not deltas.live:
            del self._callers[deltas.request_id]
        self.drafting.finish(request)
        self._alarms.finish(sequence_id)

    def _record(self, stats: StepStats) -> None:
        self.stats.add(stats)
        if self.on_step is not None:
            self.on_step(stats)

    def _sequence_requests(
        self, request_id: str, prompt: EncodedPrompt, params: SamplingParams, priority: int
    ) -> list[Request]:
        """Make the n sequences of a request, checked."""
        inputs = self.inputs
        inputs.check_params(params)
        stop_token_ids = inputs.stop_token_ids(params)
        bad_words_ids = inputs.bad_words_ids(params)
        prediction_ids = inputs.prediction_ids(params)
        grammar = inputs.grammar(params)
        if params.n > self.scheduler.config.max_waiting:
            raise RequestError(
                f"n is {params.n}, but at most max_waiting = {self.scheduler.config.max_waiting} "
                "sequences are queued",
                "n",
            )
        if not math.isfinite(priority):
            raise RequestError(f"priority must be a finite number, got {priority}", "priority")
        others = replace(params, prompt_logprobs=None)  # they would be the same n times
        requests = [
            Request(
                _sequence_id(request_id, index),
                prompt.token_ids,
                params if index == 0 else others,
                seed=inputs.seed(params, self._num_added, index),
                max_model_len=inputs.max_model_len,
                stop_token_ids=stop_token_ids,
                bad_words_ids=bad_words_ids,
                prediction_ids=prediction_ids,
                grammar=grammar.matcher(stop_token_ids) if grammar is not None else None,
                priority=priority,
                cache_salt=prompt.cache_salt,
            )
            for index in range(params.n)
        ]
        self.drafting.check(requests[0])
        self.scheduler.check_fits(requests[0])
        return requests


def _sequence_id(request_id: str, index: int) -> str:
    return f"{request_id}/{index}"


def _sequence_delta(index: int, booked: BookedWork, trace: DraftTrace | None) -> SequenceDelta:
    request, work, outcome, added = booked
    drafted = None
    if work.drafts is not None:
        num_drafted = len(outcome.drafted_ids)
        drafted = {work.drafts.source.value: num_drafted} if num_drafted else {}
    return SequenceDelta(
        index,
        added,
        _origins(outcome, work.drafts)[: len(added)],
        drafted,
        outcome.logprobs[: len(added)],
        trace,
        None if request.finish_reason is None else str(request.finish_reason),
        request.stop_reason,
        request.error,
    )


def _origins(outcome: WorkResult, drafts: DraftChoice | None) -> tuple[str, ...]:
    """Return one origin per emitted token, accepted drafts first."""
    if drafts is None:
        return (TargetChoice.PLAIN,)
    rows = outcome.accepted_rows
    # Row 0 of the parents is the root, so a drafted row has its place plus one there.
    is_whole = bool(rows) and rows[-1] + 1 not in outcome.drafted_parents
    last = TargetChoice.BONUS if is_whole else TargetChoice.RECOVERED
    return (*[drafts.source] * len(rows), last)


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
