"""The engine: requests in, one step at a time, deltas out. It never waits and has no I/O.

It handles ids only: RequestAssembly makes text of them, beside the engine or in another process.

The life of a step: choose drafts, schedule, launch, collect, commit.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from msgspec import structs

from outdraft.core.errors import RequestError
from outdraft.core.outputs import RequestDelta
from outdraft.core.plan import StepResult, StepStats
from outdraft.core.request import Request, ScheduledStep
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.policy import DraftPolicy
from outdraft.engine.alarms import SourceAlarms
from outdraft.engine.deltas import RequestDeltas
from outdraft.engine.inputs import EncodedPrompt, InputProcessor, Prompt
from outdraft.engine.stats import StatsTotal, step_stats
from outdraft.runner.model_runner import LaunchedStep
from outdraft.runner.parallel_runner import StepRunner
from outdraft.scheduling.scheduler import Scheduler, allowed_tokens, plan_step


@dataclass(slots=True)
class _LiveSequence:
    """One of a caller's n sequences: the scheduler's request, and the deltas of its tokens.

    Attributes:
        may_draft: False: it ended, and the proposers have forgotten it.
    """

    request: Request
    deltas: RequestDeltas
    index: int
    may_draft: bool = True


class WatchedRanks(Protocol):
    """Processes that an engine cannot do without."""

    def watch(self, on_death: Callable[[], None]) -> None:
        """Call a function, in another thread, when one of them has ended by itself."""
        ...

    def check(self) -> None:
        """Raise RanksError if the engine cannot go on."""
        ...

    def num_moves(self) -> int:
        """Count this rank's messages to them and its collectives. Any thread may call it."""
        ...

    def end(self) -> None:
        """End them all, and with them the engine."""
        ...


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
        ranks: WatchedRanks | None = None,
    ) -> None:
        self.inputs = inputs
        self.scheduler = scheduler
        self.drafting = drafting
        self.runner = runner
        self.stats = StatsTotal()
        self.on_step: Callable[[StepStats], None] | None = None
        self.ranks = ranks
        self._sequences: dict[str, _LiveSequence] = {}
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
            [request.id for request in requests],
            self.drafting.most_drafts(requests[0]),
            lossless=self.drafting.config.is_lossless,
        )
        for index, request in enumerate(requests):
            self.scheduler.add(request)
            self._sequences[request.id] = _LiveSequence(request, deltas, index)
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
        ended: list[_LiveSequence] = []
        booked_s = time.perf_counter() - started_s
        decision, granted = self.drafting.decided, self.drafting.granted
        for one in booked:
            sequence = self._sequences[one.request.id]
            choice = granted.get(one.request.id)
            sequence.deltas.add(sequence.index, one, booked_s, decision, choice)
            if one.request.finish_reason is not None:
                ended.append(sequence)
            if one.added or one.request.finish_reason is not None:
                grown[sequence.deltas.request_id] = sequence.deltas
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
        for sequence in ended:
            self._end_drafting(sequence)
        self._record(stats)
        taken = [deltas.take() for deltas in grown.values()]
        for sequence in ended:  # last: after a step that failed, callers can abort them
            self._forget(sequence)
        return taken

    def abort(self, request_id: str) -> None:
        """End a request early and give back all it holds; unknown ones are ignored.

        After a step that failed: also one that ended in it, of which no delta came.
        """
        caller = self._callers.get(request_id)
        for sequence_id in list(caller.live) if caller is not None else ():
            sequence = self._sequences[sequence_id]
            self.scheduler.abort(sequence_id)
            self._forget(sequence)
            self._end_drafting(sequence)

    def stop_sequence(self, request_id: str, index: int, num_tokens: int) -> None:
        """End one of a request's sequences because its reader found a stop string.

        The text ends with the first `num_tokens` tokens of its output. Unlike an aborted one it
        is a whole text, which the proposers learn. Unknown ones are ignored.
        """
        sequence = self._sequences.get(_sequence_id(request_id, index))
        if sequence is None:
            return
        self.scheduler.stop(sequence.request, num_tokens)
        self._end_drafting(sequence)
        self._forget(sequence)

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not balance."""
        self.scheduler.check_invariants()
        live = {request.id for request in (*self.scheduler.running, *self.scheduler.waiting)}
        assert live == set(self._sequences)
        assert all(sequence.may_draft for sequence in self._sequences.values())
        assert live == {one for deltas in self._callers.values() for one in deltas.live}

    def _run(self, step: ScheduledStep) -> StepResult:
        """Compute a step and wait for it; masks are made while the target reads."""
        pending = self.runner.launch(step.plan)
        if isinstance(pending, LaunchedStep):
            drafted = self.runner.drafted(pending)
            allowed = allowed_tokens(step, drafted, self.inputs.vocab_size)
            pending = self.runner.verify(pending, allowed)
        return self.runner.collect(pending)

    def _end_drafting(self, sequence: _LiveSequence) -> None:
        """Make proposers and alarms forget a sequence that ended, once."""
        if sequence.may_draft:
            sequence.may_draft = False
            self.drafting.finish(sequence.request)
            self._alarms.finish(sequence.request.id)

    def _forget(self, sequence: _LiveSequence) -> None:
        del self._sequences[sequence.request.id]
        sequence.deltas.live.remove(sequence.request.id)
        if not sequence.deltas.live:
            del self._callers[sequence.deltas.request_id]

    def _record(self, stats: StepStats) -> None:
        self.stats.add(stats)
        if self.on_step is not None:
            self.on_step(stats)

    def _sequence_requests(
        self, request_id: str, prompt: EncodedPrompt, params: SamplingParams, priority: int
    ) -> list[Request]:
        """Make the n sequences of a request, checked."""
        self.inputs.check_params(params)
        stop_token_ids = self.inputs.stop_token_ids(params)
        bad_words_ids = self.inputs.bad_words_ids(params)
        prediction_ids = self.inputs.prediction_ids(params)
        grammar = self.inputs.grammar(params)
        if params.n > self.scheduler.config.max_waiting:
            raise RequestError(
                f"n is {params.n}, but at most max_waiting = {self.scheduler.config.max_waiting} "
                "sequences are queued",
                "n",
            )
        if not math.isfinite(priority):
            raise RequestError(f"priority must be a finite number, got {priority}", "priority")
        prompt_ids: list[int] = prompt.token_ids.tolist()
        others = replace(params, prompt_logprobs=None)  # they would be the same n times
        requests = [
            Request(
                _sequence_id(request_id, index),
                prompt_ids,
                params if index == 0 else others,
                seed=self.inputs.seed(params, self._num_added, index),
                max_model_len=self.inputs.max_model_len,
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
