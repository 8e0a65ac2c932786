"""Builds a RequestOutput from deltas: its text, its stop strings, its log-probabilities.

The only place where text is made. RequestAssembly needs no engine, so a server uses it in another
process; Assembler uses it beside an engine in this one.
"""

import time
from collections import Counter, deque
from collections.abc import Generator, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from outdraft.core.errors import CapacityError
from outdraft.core.outputs import (
    CompletionOutput,
    Logprob,
    RequestDelta,
    RequestMetrics,
    RequestOutput,
    SequenceDelta,
    SpeculationMetrics,
)
from outdraft.core.plan import TokenLogprobs
from outdraft.core.recorded import RecordedStep
from outdraft.core.request import FinishReason
from outdraft.core.sampling import SamplingParams
from outdraft.engine.inputs import EncodedPrompt, InputProcessor, Prompt
from outdraft.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from outdraft.engine.engine import Engine  # imports torch

Queued = tuple[str, Prompt, SamplingParams, int]  # arguments of Assembler.add_request


class RequestAssembly:
    """Assembles the output of one request, which grows by `add`.

    Attributes:
        steps: of each sequence, if it keeps them: those that brought tokens.
    """

    def __init__(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        inputs: InputProcessor,
        *,
        keeps_steps: bool = False,
    ) -> None:
        self._params = params
        self._stop_token_ids = inputs.stop_token_ids(params)
        prompt_ids: list[int] = prompt.token_ids.tolist()
        self.output = RequestOutput(
            request_id,
            prompt.text,
            prompt_ids,
            [CompletionOutput(index) for index in range(params.n)],
            finished=False,
            metrics=RequestMetrics(time.monotonic(), SpeculationMetrics(0)),
        )
        self.steps: list[list[RecordedStep]] = [[] for _ in range(params.n)] if keeps_steps else []
        self._tokenizer = inputs.tokenizer if params.detokenize else None
        self._detokenizers: list[Detokenizer] = []  # of the sequences; none: no text is made
        if self._tokenizer is not None:
            self._detokenizers = [
                Detokenizer(
                    self._tokenizer,
                    params.stop_strings,
                    prompt_ids=prompt_ids,
                    skip_special_tokens=params.skip_special_tokens,
                    include_stop_string=params.include_stop_str_in_output,
                )
                for _ in range(params.n)
            ]

    def add(self, delta: RequestDelta) -> tuple[list[CompletionOutput], list[CompletionOutput]]:
        """Book a delta: what each sequence gained by it, and the completions that a stop string
        has ended.

        The engine goes on with these until `Engine.stop_sequence` is called; what it makes until
        then is dropped here.
        """
        self._add_metrics(delta)
        all_gained: list[CompletionOutput] = []
        stopped: list[CompletionOutput] = []
        for part in delta.sequences:
            completion = self.output.outputs[part.index]
            if completion.finish_reason is not None:
                continue
            gained = self._gained(completion, part)
            completion.extend(gained)
            all_gained.append(gained)
            num_kept = len(gained.token_ids)
            accepted: dict[str, int] = {}
            if part.drafted is not None:
                # The text may end inside a draft.
                kept: Counter[str] = Counter(part.origins[:num_kept])
                accepted = {source: kept[source] for source in part.drafted if source in kept}
                self.output.metrics.speculative_decoding.record(part.drafted, accepted)
            if self.steps and num_kept:
                step = RecordedStep(num_kept, part.drafted or {}, accepted)
                self.steps[part.index].append(step)
            if gained.finish_reason is not None and part.finish_reason is None:
                stopped.append(completion)
        if all(completion.finish_reason is not None for completion in self.output.outputs):
            self.output.finished = True
            self.output.metrics.finished_s = time.monotonic()
        return all_gained, stopped

    def _add_metrics(self, delta: RequestDelta) -> None:
        metrics = self.output.metrics
        metrics.first_scheduled_s = delta.first_scheduled_s
        if any(part.token_ids for part in delta.sequences):
            metrics.last_token_s = time.monotonic()
            metrics.first_token_s = metrics.first_token_s or metrics.last_token_s
        metrics.num_preemptions = delta.num_preemptions
        metrics.speculative_decoding.num_spec_tokens = delta.num_spec_tokens
        metrics.speculative_decoding.lossless = delta.lossless
        self.output.num_cached_tokens = delta.num_cached_tokens
        num_top = self._params.prompt_logprobs
        if delta.prompt_logprobs is not None and num_top is not None:
            rows = [self._entries(row, num_top) for row in delta.prompt_logprobs]
            self.output.prompt_logprobs = [None, *rows]

    def _gained(self, completion: CompletionOutput, part: SequenceDelta) -> CompletionOutput:
        """The gain of a completion by a delta."""
        num_kept, stop_string = self._detokenize(completion, part)
        gained = CompletionOutput(
            part.index,
            token_ids=list(part.token_ids[:num_kept]),
            origins=list(part.origins[:num_kept]),
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
            error=part.error,
        )
        if self._params.logprobs is not None:
            rows = part.logprobs[:num_kept]
            gained.logprobs = [self._entries(row, self._params.logprobs) for row in rows]
            before = completion.cumulative_logprob or 0.0
            gained.cumulative_logprob = sum((row.logprob for row in rows), before)
        if part.trace is not None:
            gained.trace = [replace(part.trace, num_emitted=num_kept)]
        if stop_string is not None:
            gained.finish_reason, gained.stop_reason = str(FinishReason.STOP), stop_string
            gained.error = None
        if self._detokenizers:
            detokenizer = self._detokenizers[part.index]
            text = detokenizer.settled_text
            if gained.finish_reason is not None:
                detokenizer.finish(at_stop_string=stop_string is not None)
                text = detokenizer.text
            gained.text = text[len(completion.text) :]
        return gained

    def _detokenize(
        self, completion: CompletionOutput, part: SequenceDelta
    ) -> tuple[int, str | None]:
        """Count the tokens up to the one that completes a stop string, or all; and that string.

        A stop token ends the text for that reason, even if it completes a stop string, too. It is
        no more a part of the text than a stop string is.
        """
        shown = part.token_ids if self._detokenizers else ()
        is_stopped = part.finish_reason == FinishReason.STOP  # a grammar may be the reason, too
        is_shown = self._params.include_stop_str_in_output
        if is_stopped and not is_shown and part.token_ids[-1] in self._stop_token_ids:
            shown = shown[:-1]
        for count, token_id in enumerate(shown, start=1):
            found = self._detokenizers[part.index].push(token_id)
            may_end = len(completion.token_ids) + count >= self._params.min_tokens
            if found is not None and may_end and token_id not in self._stop_token_ids:
                return count, found
        return len(part.token_ids), None

    def _entries(self, row: TokenLogprobs, num_top: int) -> dict[int, Logprob]:
        """Token id -> Logprob: the chosen token, then the `num_top` most likely ones."""
        top = zip(row.top_ids, row.top_logprobs, range(1, num_top + 1), strict=False)
        entries = {row.token_id: Logprob(row.logprob, row.rank, self._decoded(row.token_id))}
        for token_id, logprob, rank in top:
            if token_id not in entries:
                entries[token_id] = Logprob(logprob, rank, self._decoded(token_id))
        return entries

    def _decoded(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([token_id], False)


class Assembler:
    """Adds requests to an engine and assembles what its steps bring them.

    As little safe to use from several threads as the engine. Deltas of requests that others added
    are dropped.
    """

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._assemblies: dict[str, RequestAssembly] = {}

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0
    ) -> None:
        """Queue a request. Raises RequestError, CapacityError: it was not accepted."""
        inputs = self._engine.inputs
        encoded = inputs.encoded(prompt)
        self._engine.add_request(request_id, encoded, params, priority)
        self._assemblies[request_id] = RequestAssembly(request_id, encoded, params, inputs)

    def run(self, requests: Iterable[Queued]) -> Generator[list[RequestOutput]]:
        """Queue requests, as fast as there is room, and step until nothing is left to do.

        Each step gives what `step` does. The requests end with the generator, if not before.
        """
        queue = deque(requests)
        request_ids = [request_id for request_id, *_ in queue]
        try:
            while queue or self._engine.has_work:
                with suppress(CapacityError):
                    while queue:
                        self.add_request(*queue[0])
                        queue.popleft()
                yield self.step()
        finally:
            for request_id in request_ids:
                self.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Step the engine; the outputs that grew.

        An output is the same object from step to step and grows: copy it to keep it.
        """
        deltas = self._engine.step()
        outputs = [self._grow(delta) for delta in deltas if delta.request_id in self._assemblies]
        for output in outputs:  # last: had this failed, `started_requests` would name them
            if output.finished:
                del self._assemblies[output.request_id]
        return outputs

    def started_requests(self) -> list[str]:
        """Ids of the requests that run, or whose last output `step` has not returned."""
        started = set(self._engine.running_requests())
        return [
            request_id
            for request_id in self._assemblies
            if request_id in started or not self._engine.is_live(request_id)
        ]

    def abort(self, request_id: str) -> None:
        """End a request early and give back all it holds; unknown ones are ignored."""
        self._assemblies.pop(request_id, None)
        self._engine.abort(request_id)

    def _grow(self, delta: RequestDelta) -> RequestOutput:
        assembly = self._assemblies[delta.request_id]
        _, stopped = assembly.add(delta)
        for completion in stopped:
            num_tokens = len(completion.token_ids)
            self._engine.stop_sequence(delta.request_id, completion.index, num_tokens)
        return assembly.output
