"""Builds a caller's RequestOutput from the sequences that the scheduler runs for it."""

import time
from collections import Counter
from collections.abc import Iterable

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
from outdraft.core.plan import DraftChoice, TokenLogprobs, Work, WorkResult
from outdraft.core.request import FinishReason, Request
from outdraft.engine.detokenizer import Detokenizer


class OutputBuilder:
    """One caller's request: its n sequences, their texts, and its metrics."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: list[int],
        tokenizer: Tokenizer | None,
        detokenizers: list[Detokenizer | None],
        speculation: SpeculationMetrics,
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizers = detokenizers
        self._running = len(detokenizers)
        self.output = RequestOutput(
            request_id,
            prompt,
            prompt_ids,
            [CompletionOutput(index) for index in range(len(detokenizers))],
            finished=False,
            metrics=RequestMetrics(time.monotonic(), speculation),
        )

    def start(self, request: Request) -> None:
        """A sequence was scheduled for the first time."""
        if self.output.metrics.first_scheduled_s is None:
            self.output.metrics.first_scheduled_s = time.monotonic()
            self.output.num_cached_tokens = request.num_cached

    def add(
        self,
        index: int,
        work: Work,
        outcome: WorkResult,
        added: tuple[int, ...],
    ) -> None:
        """Book one step of the index-th sequence; `added` are the tokens that were kept."""
        request, drafts = work.request, work.drafts
        metrics = self.output.metrics
        metrics.num_preemptions = max(metrics.num_preemptions, request.num_preemptions)
        if request.params.prompt_logprobs is not None:  # the first sequence's only
            self._add_prompt_logprobs(work.start, outcome, request.params.prompt_logprobs)
        if not added:
            return
        metrics.last_token_s = time.monotonic()
        metrics.first_token_s = metrics.first_token_s or metrics.last_token_s
        completion = self.output.outputs[index]
        completion.token_ids.extend(added)
        completion.origins.extend(_origins(outcome, drafts)[: len(added)])
        if drafts is not None:
            kept = outcome.accepted_rows[: len(added)]  # the text may end inside a draft
            metrics.speculative_decoding.record(
                _by_source(drafts, range(len(outcome.drafted_ids))), _by_source(drafts, kept)
            )
        if request.params.speculation.trace:
            completion.trace = completion.trace or []
            completion.trace.append(_trace(outcome, drafts, len(added)))
        if request.params.logprobs is not None:
            self._add_logprobs(completion, outcome.logprobs[: len(added)], request.params.logprobs)
        detokenizer = self._detokenizers[index]
        if detokenizer is not None:
            completion.text = detokenizer.settled_text
        if request.finish_reason is not None:
            self.finish(index, request.finish_reason, request.stop_reason)

    def abort(self, index: int) -> None:
        """The index-th sequence was ended early; nothing happens if it had ended by itself."""
        if self.output.outputs[index].finish_reason is None:
            self.finish(index, FinishReason.ABORT)

    def finish(
        self, index: int, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """The index-th sequence ended."""
        completion = self.output.outputs[index]
        completion.finish_reason = str(reason)
        completion.stop_reason = stop_reason
        detokenizer = self._detokenizers[index]
        if detokenizer is not None:
            detokenizer.finish(at_stop_string=isinstance(stop_reason, str))
            completion.text = detokenizer.text
        self._running -= 1
        if self._running == 0:
            self.output.finished = True
            self.output.metrics.finished_s = time.monotonic()

    def _add_logprobs(
        self, completion: CompletionOutput, rows: tuple[TokenLogprobs, ...], num_top: int
    ) -> None:
        completion.logprobs = completion.logprobs or []
        completion.cumulative_logprob = completion.cumulative_logprob or 0.0
        for row in rows:
            completion.logprobs.append(self._row(row, num_top))
            completion.cumulative_logprob += row.logprob

    def _add_prompt_logprobs(self, start: int, outcome: WorkResult, num_top: int) -> None:
        if self.output.prompt_logprobs is None:
            self.output.prompt_logprobs = [None]
        rows = [self._row(row, num_top) for row in outcome.prompt_logprobs]
        # A preempted prompt is computed again: the same positions get the same values.
        self.output.prompt_logprobs[start + 1 : start + 1 + len(rows)] = rows

    def _row(self, row: TokenLogprobs, num_top: int) -> dict[int, Logprob]:
        entries = {row.token_id: Logprob(row.logprob, row.rank, self._token(row.token_id))}
        pairs = list(zip(row.top_ids, row.top_logprobs, strict=True))[:num_top]
        for rank, (token_id, logprob) in enumerate(pairs, start=1):
            entries.setdefault(token_id, Logprob(logprob, rank, self._token(token_id)))
        return entries

    def _token(self, token_id: int) -> str | None:
        return self._tokenizer.decode([token_id], False) if self._tokenizer else None


def _origins(outcome: WorkResult, drafts: DraftChoice | None) -> list[TokenOrigin]:
    """How each emitted token came, accepted drafts first."""
    if drafts is None:
        return [TokenOrigin.PLAIN]
    accepted = [TokenOrigin(str(drafts.source_of(row))) for row in outcome.accepted_rows]
    # Row 0 of the parents is the root, so a drafted row has its place plus one there.
    is_whole = bool(accepted) and outcome.accepted_rows[-1] + 1 not in outcome.drafted_parents
    return [*accepted, TokenOrigin.BONUS if is_whole else TokenOrigin.RECOVERED]


def _by_source(drafts: DraftChoice, rows: Iterable[int]) -> dict[str, int]:
    return dict(Counter(str(drafts.source_of(row)) for row in rows))


def _trace(outcome: WorkResult, drafts: DraftChoice | None, num_emitted: int) -> DraftTrace:
    if drafts is None:
        return DraftTrace((), (), (), (), num_emitted)
    return DraftTrace(
        tuple(str(drafts.source_of(row)) for row in range(len(outcome.drafted_ids))),
        outcome.drafted_ids,
        outcome.drafted_parents,
        outcome.accepted_rows,
        num_emitted,
    )
