"""Builds a RequestOutput from what the engine process reports, and finds its stop strings.

The same as engine.output_builder does beside the engine, without keeping the engine waiting.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tokenizers import Tokenizer

from outdraft.core.outputs import (
    CompletionOutput,
    DraftTrace,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SpeculationMetrics,
    TokenOrigin,
)
from outdraft.core.request import FinishReason
from outdraft.core.sampling import SamplingParams
from outdraft.engine.detokenizer import Detokenizer
from outdraft.engine.inputs import EncodedPrompt
from outdraft.server.client import TextDelta, Update
from outdraft.server.messages import DraftStep, LogprobRow, Progress, SequenceDelta


class RequestAssembly:
    """One request: its output, which grows by `add`, and what of it its reader has not seen."""

    def __init__(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._params = params
        self._tokenizer = tokenizer if params.detokenize else None
        prompt_ids: list[int] = prompt.token_ids.tolist()
        self.output = RequestOutput(
            request_id,
            prompt.text,
            prompt_ids,
            [CompletionOutput(index) for index in range(params.n)],
            finished=False,
            metrics=RequestMetrics(time.monotonic(), SpeculationMetrics(0)),
        )
        self._sequences = [
            _Sequence(completion, params, prompt_ids, self._tokenizer)
            for completion in self.output.outputs
        ]

    def add(self, progress: Progress) -> list[int]:
        """Book a report; the sequences that it brought to a stop string, which the engine has to be
        told of."""
        self._add_metrics(progress)
        drafts = iter(progress.drafted)
        stopped: list[int] = []
        for delta in progress.sequences:
            has_drafts = bool(delta.origins) and delta.origins[0] != TokenOrigin.PLAIN
            drafted = next(drafts) if has_drafts else None
            sequence = self._sequences[delta.index]
            if sequence.completion.finish_reason is not None:
                continue  # what the engine did before it heard of the stop string
            num_kept = sequence.add(delta)
            if drafted is not None:
                kept = Counter(delta.origins[:num_kept])  # the text may end inside a draft
                accepted = {source: kept[source] for source in drafted if source in kept}
                self.output.metrics.speculative_decoding.record(drafted, accepted)
            if sequence.completion.finish_reason is not None and delta.finish_reason is None:
                stopped.append(delta.index)
        if all(completion.finish_reason is not None for completion in self.output.outputs):
            self.output.finished = True
            self.output.metrics.finished_s = time.monotonic()
        return stopped

    def update(self) -> Update:
        """All that came since the last one."""
        deltas = [sequence.news() for sequence in self._sequences]
        return Update(self.output, [delta for delta in deltas if delta is not None])

    def _add_metrics(self, progress: Progress) -> None:
        metrics = self.output.metrics
        metrics.first_scheduled_s = progress.first_scheduled_s
        metrics.last_token_s = time.monotonic()
        metrics.first_token_s = metrics.first_token_s or metrics.last_token_s
        metrics.num_preemptions = progress.num_preemptions
        metrics.speculative_decoding.num_spec_tokens = progress.num_spec_tokens
        metrics.speculative_decoding.lossless = progress.lossless
        self.output.num_cached_tokens = progress.num_cached_tokens
        if progress.prompt_logprobs is not None:
            self.output.prompt_logprobs = [
                None if row is None else _entries(row, self._tokenizer)
                for row in progress.prompt_logprobs
            ]


class _Sequence:
    """One of the n sequences.

    Its completion is what was assembled; the `told` counts say how much of it the reader knows.
    """

    def __init__(
        self,
        completion: CompletionOutput,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.completion = completion
        self._params = params
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
        self._told_tokens = 0
        self._told_characters = 0
        self._is_end_told = False
        self._steps: list[DraftStep] = []  # that the reader does not know

    def add(self, delta: SequenceDelta) -> int:
        """Append a report; how many of its tokens belong to the text."""
        completion = self.completion
        num_kept, stop_string = self._detokenize(delta)
        completion.token_ids.extend(delta.token_ids[:num_kept])
        completion.origins.extend(TokenOrigin(origin) for origin in delta.origins[:num_kept])
        if delta.logprobs is not None:
            completion.logprobs = completion.logprobs or []
            completion.cumulative_logprob = completion.cumulative_logprob or 0.0
            for row in delta.logprobs[:num_kept]:
                completion.logprobs.append(_entries(row, self._tokenizer))
                completion.cumulative_logprob += row.logprob
        if delta.steps is not None:
            self._add_steps(delta.steps, num_kept)
        if stop_string is not None:
            completion.finish_reason = str(FinishReason.STOP)
            completion.stop_reason = stop_string
        elif delta.finish_reason is not None:
            completion.finish_reason = delta.finish_reason
            completion.stop_reason = delta.stop_reason
        if self._detokenizer is not None:
            if completion.finish_reason is not None:
                self._detokenizer.finish(at_stop_string=stop_string is not None)
                completion.text = self._detokenizer.text
            else:
                completion.text = self._detokenizer.settled_text
        return num_kept

    def news(self) -> TextDelta | None:
        """What came since it was asked last."""
        completion = self.completion
        first, has_ended = self._told_tokens, completion.finish_reason is not None
        if first == len(completion.token_ids) and has_ended == self._is_end_told:
            return None
        text = completion.text[self._told_characters :]
        steps, self._steps = self._steps, []
        self._told_tokens = len(completion.token_ids)
        self._told_characters = len(completion.text)
        self._is_end_told = has_ended
        return TextDelta(
            completion.index,
            text,
            completion.token_ids[first:],
            completion.origins[first:],
            None if completion.logprobs is None else completion.logprobs[first:],
            completion.finish_reason,
            completion.stop_reason,
            None if completion.trace is None else steps,
        )

    def _detokenize(self, delta: SequenceDelta) -> tuple[int, str | None]:
        """Tokens up to the one that completes a stop string, or all of them; and that string."""
        if self._detokenizer is None:
            return len(delta.token_ids), None
        num_before = len(self.completion.token_ids)
        num_new = len(delta.token_ids)
        for count, token_id in enumerate(delta.token_ids, start=1):
            found = self._detokenizer.push(token_id)
            is_stop_token = delta.finish_reason == FinishReason.STOP and count == num_new
            if (
                found is not None
                and not is_stop_token  # it comes first, as in core.request
                and num_before + count >= self._params.min_tokens
            ):
                return count, found
        return num_new, None

    def _add_steps(self, steps: Sequence[DraftStep], num_kept: int) -> None:
        self.completion.trace = self.completion.trace or []
        for step in steps:
            num_emitted = min(step.num_emitted, num_kept)
            num_kept -= num_emitted
            self._steps.append(
                DraftStep(
                    step.sources,
                    step.drafted_ids,
                    step.parents,
                    step.accepted_rows,
                    num_emitted,
                    step.seconds,
                )
            )
            self.completion.trace.append(
                DraftTrace(
                    tuple(step.sources),
                    tuple(step.drafted_ids),
                    tuple(step.parents),
                    tuple(step.accepted_rows),
                    num_emitted,
                )
            )


def engine_params(
    params: SamplingParams, prediction: Sequence[int] | None = None
) -> SamplingParams:
    """What the engine is told: texts are none of its business."""
    return replace(
        params,
        stop=None,
        include_stop_str_in_output=False,
        detokenize=False,
        prediction=prediction,
    )


def _entries(row: LogprobRow, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Token id -> Logprob, the chosen token first."""

    def decoded(token_id: int) -> str | None:
        return tokenizer.decode([token_id], False) if tokenizer is not None else None

    entries = {row.token_id: Logprob(row.logprob, row.rank, decoded(row.token_id))}
    for rank, (token_id, logprob) in enumerate(
        zip(row.top_ids, row.top_logprobs, strict=True), start=1
    ):
        if token_id not in entries:
            entries[token_id] = Logprob(logprob, rank, decoded(token_id))
    return entries
