"""Builds a RequestOutput from deltas: its text, its stop strings, its log-probabilities.

The only place where text is made. RequestAssembly needs no engine, so a server uses it in another
process; Assembler uses it beside an engine in this one.
"""

import time
from collections import Counter, deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from outdraft.core.errors import CapacityError, GenerationError
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
        self._num_prompt_top = params.prompt_logprobs
        self._tokenizer = inputs.tokenizer if params.detokenize else None
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
        stop_token_ids = inputs.stop_token_ids(params)
        self._sequences = [
            _SequenceAssembly(completion, params, stop_token_ids, prompt_ids, self._tokenizer)
            for completion in self.output.outputs
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
            sequence = self._sequences[part.index]
            if sequence.completion.finish_reason is not None:
                continue
            gained = sequence.add(part)
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
                stopped.append(sequence.completion)
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
        if delta.prompt_logprobs is not None and self._num_prompt_top is not None:
            rows = [
                _entries(row, self._num_prompt_top, self._tokenizer)
                for row in delta.prompt_logprobs
            ]
            self.output.prompt_logprobs = [None, *rows]


class _SequenceAssembly:
    """Assembles the completion of one of the n sequences."""

    def __init__(
        self,
        completion: CompletionOutput,
        params: SamplingParams,
        stop_token_ids: frozenset[int],
        prompt_ids: Sequence[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.completion = completion
        self._params = params
        self._stop_token_ids = stop_token_ids
        self._tokenizer = tokenizer
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(
                tokenizer,
                params.stop_strings,
                prompt_ids=prompt_ids,
                skip_special_tokens=params.skip_special_tokens,
                include_stop_string=params.include_stop_str_in_output,
            )

    def add(self, part: SequenceDelta) -> CompletionOutput:
        """Append a delta; what the completion gained by it."""
        num_kept, stop_string = self._detokenize(part)
        gained = CompletionOutput(
            part.index,
            token_ids=list(part.token_ids[:num_kept]),
            origins=list(part.origins[:num_kept]),
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
            error=part.error,
        )
        if self._params.logprobs is not None:
            self._add_logprobs(gained, part.logprobs[:num_kept], self._params.logprobs)
        if part.trace is not None:
            gained.trace = [replace(part.trace, num_emitted=num_kept)]
        if stop_string is not None:
            gained.finish_reason, gained.stop_reason = str(FinishReason.STOP), stop_string
            gained.error = None
        if self._detokenizer is not None:
            text = self._detokenizer.settled_text
            if gained.finish_reason is not None:
                self._detokenizer.finish(at_stop_string=stop_string is not None)
                text = self._detokenizer.text
            gained.text = text[len(self.completion.text) :]
        self.completion.extend(gained)
        return gained

    def _detokenize(self, part: SequenceDelta) -> tuple[int, str | None]:
        """Count the tokens up to the one that completes a stop string, or all; and that string.

        A stop token ends the text for that reason, even if it completes a stop string, too. It is
        no more a part of the text than a stop string is.
        """
        if self._detokenizer is None:
            return len(part.token_ids), None
        shown = part.token_ids
        if not self._params.include_stop_str_in_output and self._ends_at_stop_token(part):
            shown = shown[:-1]
        first = len(self.completion.token_ids) + 1
        for count, token_id in enumerate(shown, start=first):
            found = self._detokenizer.push(token_id)
            counts = count >= self._params.min_tokens and token_id not in self._stop_token_ids
            if found is not None and counts:
                return count - first + 1, found
        return len(part.token_ids), None

    def _ends_at_stop_token(self, part: SequenceDelta) -> bool:
        is_stopped = part.finish_reason == FinishReason.STOP  # a grammar may be the reason, too
        return is_stopped and part.token_ids[-1] in self._stop_token_ids

    def _add_logprobs(
        self, gained: CompletionOutput, rows: Sequence[TokenLogprobs], num_top: int
    ) -> None:
        gained.logprobs = [_entries(row, num_top, self._tokenizer) for row in rows]
        before = self.completion.cumulative_logprob or 0.0
        gained.cumulative_logprob = sum((row.logprob for row in rows), before)


def _entries(row: TokenLogprobs, num_top: int, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Token id -> Logprob: the chosen token, then the `num_top` most likely ones."""

    def decoded(token_id: int) -> str | None:
        return tokenizer.decode([token_id], False) if tokenizer is not None else None

    entries = {row.token_id: Logprob(row.logprob, row.rank, decoded(row.token_id))}
    pairs = list(zip(row.top_ids, row.top_logprobs, strict=True))[:num_top]
    for rank, (token_id, logprob) in enumerate(pairs, start=1):
        if token_id not in entries:
            entries[token_id] = Logprob(logprob, rank, decoded(token_id))
    return entries


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
        """As Engine.add_request."""
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


def checked(output: RequestOutput | None) -> RequestOutput:
    """An output that has ended. Raises GenerationError if its request failed."""
    assert output is not None
    if output.error is not None:
        raise GenerationError(output.error)
    return output
