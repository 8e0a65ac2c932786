"""What a request gained since it was last reported, from the output that its engine grows."""

from collections.abc import Mapping

from outdraft.core.outputs import CompletionOutput, Logprob, RequestOutput
from outdraft.server.messages import DraftStep, LogprobRow, Progress, SequenceDelta


class ProgressReporter:
    """Remembers how much of one request was told."""

    def __init__(self) -> None:
        self._num_tokens: list[int] = []
        self._num_traced: list[int] = []
        self._is_ended: list[bool] = []
        self._num_spec_steps = 0
        self._is_prompt_told = False

    def report(self, output: RequestOutput, step_s: float) -> Progress:
        """All that is new; `step_s` is how long the step took that brought it."""
        if not self._num_tokens:
            self._num_tokens = [0] * len(output.outputs)
            self._num_traced = [0] * len(output.outputs)
            self._is_ended = [False] * len(output.outputs)
        metrics = output.metrics
        speculation = metrics.speculative_decoding
        first, self._num_spec_steps = self._num_spec_steps, speculation.num_spec_steps
        deltas = [self._delta(completion, step_s) for completion in output.outputs]
        return Progress(
            output.request_id,
            [delta for delta in deltas if delta is not None],
            output.finished,
            first_scheduled_s=metrics.first_scheduled_s,
            num_cached_tokens=output.num_cached_tokens,
            num_preemptions=metrics.num_preemptions,
            num_spec_tokens=speculation.num_spec_tokens,
            lossless=speculation.lossless,
            drafted=[dict(step) for step in speculation.per_step_drafted_by_source[first:]],
            prompt_logprobs=self._prompt_rows(output),
        )

    def _delta(self, completion: CompletionOutput, step_s: float) -> SequenceDelta | None:
        index = completion.index
        first, self._num_tokens[index] = self._num_tokens[index], len(completion.token_ids)
        is_ended = completion.finish_reason is not None
        if self._is_ended[index] or (first == len(completion.token_ids) and not is_ended):
            return None
        self._is_ended[index] = is_ended
        rows = completion.logprobs
        stop_reason = completion.stop_reason
        assert not isinstance(stop_reason, str), "stop strings are found by the reader"
        return SequenceDelta(
            index,
            completion.token_ids[first:],
            [str(origin) for origin in completion.origins[first:]],
            None if rows is None else [_row(row) for row in rows[first:]],
            completion.finish_reason,
            stop_reason,
            self._trace(completion, step_s),
        )

    def _trace(self, completion: CompletionOutput, step_s: float) -> list[DraftStep] | None:
        if completion.trace is None:
            return None
        first, self._num_traced[completion.index] = (
            self._num_traced[completion.index],
            len(completion.trace),
        )
        return [
            DraftStep(
                list(step.sources),
                list(step.drafted_ids),
                list(step.parents),
                list(step.accepted_rows),
                step.num_emitted,
                step_s,
            )
            for step in completion.trace[first:]
        ]

    def _prompt_rows(self, output: RequestOutput) -> list[LogprobRow | None] | None:
        if self._is_prompt_told or output.prompt_logprobs is None:
            return None
        self._is_prompt_told = True
        return [None if row is None else _row(row) for row in output.prompt_logprobs]


def _row(entries: Mapping[int, Logprob]) -> LogprobRow:
    """The chosen token comes first; the others by their place among the most likely.

    Where a place is missing, the chosen token has it.
    """
    (token_id, chosen), *others = entries.items()
    top: list[tuple[int, float]] = []
    for other_id, other in others:
        if other.rank > len(top) + 1:
            top.append((token_id, chosen.logprob))
        top.append((other_id, other.logprob))
    return LogprobRow(
        token_id, chosen.logprob, chosen.rank, [i for i, _ in top], [value for _, value in top]
    )
