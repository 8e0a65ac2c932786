"""The engine: requests in, one step at a time, outputs out. It waits for nobody and knows no I/O.

The life of a step: choose drafts, schedule, launch, collect, commit.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from outdraft.core.errors import RequestError
from outdraft.core.outputs import RequestOutput, SpeculationMetrics
from outdraft.core.plan import StepStats
from outdraft.core.request import FinishReason, Request
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.policy import DraftPolicy
from outdraft.engine.detokenizer import Detokenizer
from outdraft.engine.inputs import InputProcessor
from outdraft.engine.output_builder import OutputBuilder
from outdraft.engine.prompts import EncodedPrompt, Prompt
from outdraft.engine.stats import StatsTotal, step_stats
from outdraft.runner.executor import Executor
from outdraft.scheduling.scheduler import Scheduler


@dataclass(slots=True)
class _Sequence:
    """One of a caller's n sequences: what the scheduler runs, and where its tokens go.

    Attributes:
        may_draft: the proposers have not been told yet that it ended.
    """

    request: Request
    builder: OutputBuilder
    index: int
    may_draft: bool = True


class Engine:
    """Composes scheduler, draft policy and executor; owns what callers are given back.

    Not safe to use from several threads: AsyncEngine does that.
    """

    def __init__(
        self,
        inputs: InputProcessor,
        scheduler: Scheduler,
        drafting: DraftPolicy,
        executor: Executor,
        on_step: Callable[[StepStats], None] | None = None,
    ) -> None:
        self.inputs = inputs
        self.scheduler = scheduler
        self.drafting = drafting
        self.executor = executor
        self.stats = StatsTotal()
        self.on_step = on_step
        self._sequences: dict[str, _Sequence] = {}
        self._callers: dict[str, list[str]] = {}
        self._num_added = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def is_live(self, request_id: str) -> bool:
        """Whether a sequence of the request waits or runs."""
        return request_id in self._callers

    def running_requests(self) -> list[str]:
        """Ids of the requests with a sequence that runs, or that ended without being told."""
        waiting = {request.id for request in self.scheduler.waiting}
        return [
            request_id
            for request_id, sequences in self._callers.items()
            if not waiting.issuperset(sequences)
        ]

    def prepare(self, params: SamplingParams) -> None:
        """Do beforehand what of `add_request` may take seconds. Safe to use from any thread.

        Raises:
            RequestError: the parameters are wrong.
        """
        self.inputs.check_params(params)
        self.inputs.grammar(params)

    def check_request(self, prompt: Prompt, params: SamplingParams) -> EncodedPrompt:
        """The prompt as `add_request` takes it too, without making ids of it again.

        Raises:
            RequestError: such a request could never run. Nothing is queued either way.
        """
        encoded = self.inputs.encoded(prompt)
        self._sequence_requests("", encoded, params, priority=0)
        return encoded

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
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
        requests, detokenizers = self._sequence_requests(request_id, encoded, params, priority)
        builder = OutputBuilder(
            request_id,
            encoded.text,
            encoded.token_ids.tolist(),
            self.inputs.tokenizer if params.detokenize else None,
            detokenizers,
            SpeculationMetrics(
                self.drafting.most_drafts(requests[0]), lossless=self.drafting.config.is_lossless
            ),
        )
        for index, request in enumerate(requests):
            self.scheduler.add(request)
            self._sequences[request.id] = _Sequence(request, builder, index)
        self._callers[request_id] = [request.id for request in requests]
        self._num_added += 1

    def step(self) -> list[RequestOutput]:
        """Advance everything that runs by at least one token or prompt chunk; what changed.

        An output is the same object from step to step and grows: copy it to keep it.
        """
        started_s = time.perf_counter()
        scheduler = self.scheduler
        num_live = len(scheduler.running) + len(scheduler.waiting)
        choices = self.drafting.choose(
            scheduler.drafting_requests(), min(num_live, scheduler.config.max_num_seqs)
        )
        plan = self.scheduler.schedule(choices)
        if not plan.works:
            return []
        result = self.executor.collect(self.executor.launch(plan))
        booked = self.scheduler.commit(plan, result)
        changed: dict[str, RequestOutput] = {}
        ended: list[_Sequence] = []
        for work, outcome, added in booked:
            sequence = self._sequences[work.request.id]
            sequence.builder.start(work.request)
            sequence.builder.add(sequence.index, work, outcome, added)
            if work.drafts is not None:
                self.drafting.observe(work.drafts, len(outcome.accepted_rows))
            if work.request.finish_reason is not None:
                self._end_drafting(sequence)
                ended.append(sequence)
            if added:
                changed[sequence.builder.output.request_id] = sequence.builder.output
        self._record(
            step_stats(
                plan,
                booked,
                times=result.times,
                step_s=time.perf_counter() - started_s,
                num_waiting=len(self.scheduler.waiting),
                kv_usage=self.scheduler.pool.usage,
            )
        )
        for sequence in ended:  # last: had the step failed, whoever is not told could be aborted
            self._forget(sequence)
        return list(changed.values())

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request early and give back all it holds; None if it is unknown or has ended.

        After a step that failed: also one that ended in it, of which nobody was told.
        """
        sequences = [self._sequences[one] for one in self._callers.get(request_id, ())]
        for sequence in sequences:
            self.scheduler.abort(sequence.request.id)
            self._forget(sequence)
            self._end_drafting(sequence)
        for sequence in sequences:
            sequence.builder.abort(sequence.index)
        return sequences[0].builder.output if sequences else None

    def stop_sequence(self, request_id: str, index: int) -> None:
        """End one of a request's sequences because its reader found a stop string.

        Unlike an aborted one it is a whole text, which the proposers learn. Unknown ones are
        ignored.
        """
        sequence = self._sequences.get(_sequence_id(request_id, index))
        if sequence is None:
            return
        self.scheduler.finish(sequence.request, FinishReason.STOP)
        self._end_drafting(sequence)
        self._forget(sequence)
        sequence.builder.finish(index, FinishReason.STOP)

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not balance."""
        self.scheduler.check_invariants()
        live = {request.id for request in (*self.scheduler.running, *self.scheduler.waiting)}
        assert live == set(self._sequences)
        assert all(sequence.may_draft for sequence in self._sequences.values())
        assert live == {sequence for ids in self._callers.values() for sequence in ids}

    def _end_drafting(self, sequence: _Sequence) -> None:
        """Tell the proposers that a sequence ended, once."""
        if sequence.may_draft:
            sequence.may_draft = False
            self.drafting.finish(sequence.request)

    def _forget(self, sequence: _Sequence) -> None:
        del self._sequences[sequence.request.id]
        caller = sequence.builder.output.request_id
        self._callers[caller].remove(sequence.request.id)
        if not self._callers[caller]:
            del self._callers[caller]

    def _record(self, stats: StepStats) -> None:
        self.stats.add(stats)
        if self.on_step is not None:
            self.on_step(stats)

    def _detokenizer(self, prompt_ids: list[int], params: SamplingParams) -> Detokenizer | None:
        if self.inputs.tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(
            self.inputs.tokenizer,
            params.stop_strings,
            prompt_ids=prompt_ids,
            skip_special_tokens=params.skip_special_tokens,
            include_stop_string=params.include_stop_str_in_output,
        )

    def _sequence_requests(
        self, request_id: str, prompt: EncodedPrompt, params: SamplingParams, priority: int
    ) -> tuple[list[Request], list[Detokenizer | None]]:
        """The n sequences of a request, checked, and what makes text of them."""
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
        detokenizers = [self._detokenizer(prompt_ids, params) for _ in range(params.n)]
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
                find_stop_string=detokenizer.push if detokenizer is not None else None,
                priority=priority,
                cache_salt=prompt.cache_salt,
            )
            for index, detokenizer in enumerate(detokenizers)
        ]
        self.drafting.check(requests[0])
        self.scheduler.check_fits(requests[0])
        return requests, detokenizers


def _sequence_id(request_id: str, index: int) -> str:
    return f"{request_id}/{index}"
