"""The results of a step, brought to the host in one copy.

Dimension key: B requests that sample, N most drafts of one of them, R flat rows as in
`data.drafts`, L levels of a network, J rows of log-probabilities.
"""

import operator
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outdraft.core.plan import PhaseTimes, StepPlan, TokenLogprobs, WorkResult
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.decoder_ops import Choice
from outdraft.kernels.ops import WarmUps
from outdraft.runner.logprobs import LogprobRows


class HostCopy:
    """Tensors on their way to the host: from a GPU in one copy, as int64, floats as their bits.

    Starting it waits for nothing.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """`device`: of the tensors, of which there may be none."""
        self._kinds = [(one.shape, one.dtype) for one in tensors]
        self._tensors, self._arrived = list(tensors), None
        if device.type == "cpu":
            return
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        packed = torch.cat([nothing, *(as_int64(one).flatten() for one in tensors)])
        host = torch.empty(packed.shape, dtype=torch.int64, pin_memory=True)
        self._tensors = [host.copy_(packed, non_blocking=True)]
        self._arrived = torch.cuda.Event()  # also where nothing is copied: the clock is read then
        self._arrived.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host, once they have arrived."""
        if self._arrived is None:
            return self._tensors
        self._arrived.synchronize()
        parts = self._tensors[0].split([shape.numel() for shape, _ in self._kinds])
        return [
            from_int64(part, dtype).view(shape)
            for part, (shape, dtype) in zip(parts, self._kinds, strict=True)
        ]


class PhaseClock:
    """Marks in the order they were set; `times` after the device has passed them all.

    On a GPU the marks are events that are read after the step has been collected, so taking the
    time never waits for the device.
    """

    def __init__(self, device: torch.device, warm_ups: WarmUps) -> None:
        """`warm_ups`: of the kernels; a step is marked as first if their count grows in it."""
        self.device = device
        # The stream is looked up once: that takes longer than to record an event.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._marks: list[Any] = []  # seconds, or events of a GPU
        self._warm_ups, self._count_before = warm_ups, warm_ups.count
        self._is_first = False

    def mark(self) -> None:
        """Begin a phase, or end the last one: drafting, the target's pass, the rest, and maybe
        keeping states."""
        if self._stream is None:
            self._marks.append(time.perf_counter())
        else:
            self._marks.append(self._stream.record_event(torch.cuda.Event(enable_timing=True)))
        self._is_first = self._warm_ups.count != self._count_before

    def times(self) -> PhaseTimes:
        """The phases between the marks."""
        between = operator.sub if self._stream is None else _event_seconds
        draft_s, verify_s, sample_s, *kept = map(between, self._marks[1:], self._marks)
        keep_s = sum(kept)
        return PhaseTimes(draft_s, verify_s, sample_s + keep_s, keep_s, self._is_first)


class PendingStep(NamedTuple):
    """A step that was launched and verified; its tensors may not be computed yet.

    Attributes:
        plan: with the rows that the target reads.
        copy: of the tensors that `to_host` lists.
        emitted, prompt: rows of log-probabilities of each work; None: no work asked.
    """

    plan: StepPlan
    clock: PhaseClock
    copy: HostCopy
    has_margins: bool
    emitted: Sequence[int] | None
    prompt: Sequence[int] | None


def to_host(
    plan: StepPlan,
    choice: Choice | None,
    drafts: DraftBatch | None,
    emitted: LogprobRows | None,
    prompt: LogprobRows | None,
    clock: PhaseClock,
) -> PendingStep:
    """Start the one copy of a step; `choice` and `drafts` are None if no request samples."""
    tensors: list[Tensor] = []
    margins_BL = None
    if choice is not None and drafts is not None:
        margins_BL, verdict = drafts.margins_BL, choice.verdict
        tensors += [choice.is_finite_R, verdict.token_ids_BN1, verdict.rows_BN]
        tensors += [drafts.token_ids_BN, drafts.parents_BN]
        tensors += [margins_BL] if margins_BL is not None else []
    for rows in (emitted, prompt):
        if rows is not None:
            tensors += [rows.token_ids_J, *rows.scores]
    counts = (None if rows is None else rows.counts for rows in (emitted, prompt))
    copy = HostCopy(tensors, clock.device)
    return PendingStep(plan, clock, copy, margins_BL is not None, *counts)


def work_results(step: PendingStep) -> tuple[WorkResult, ...]:
    """Results in the order of the plan's works, once the copy has arrived."""
    plan = step.plan
    arrived: Iterator[Any] = map(Tensor.tolist, step.copy.wait())  # in the order of `to_host`
    num_sampling = sum(work.samples for work in plan.works)
    is_finite_R, *rows_of = islice(arrived, 5) if num_sampling else [()] * 5
    margins: list[list[float]] = next(arrived) if step.has_margins else [[]] * num_sampling
    emitted_logs = _log_rows(step.emitted or [0] * num_sampling, arrived)
    prompt_logs = _log_rows(step.prompt or [0] * len(plan.works), arrived)
    finite, sampled = iter(is_finite_R), zip(*rows_of, margins, emitted_logs, strict=False)
    results: list[WorkResult] = []
    for work, prompt in zip(plan.works, prompt_logs, strict=True):
        if not work.samples:
            results.append(WorkResult(prompt_logprobs=prompt))
            continue
        emitted, accepted, drafted, parents, margins_L, logs = next(sampled)
        is_finite = list(islice(finite, 1 + work.num_drafts))
        drafted_ids, rows = _leading(drafted[: work.num_drafts]), _leading(accepted)
        # Each token was chosen after the root or after an accepted draft. From the first row
        # without finite logits on, tokens mean nothing.
        path = (0, *(row + 1 for row in rows))
        num_valid = next((at for at, row in enumerate(path) if not is_finite[row]), len(path))
        token_ids = _leading(emitted)[:num_valid]
        results.append(
            WorkResult(
                token_ids,
                rows[: max(0, num_valid - 1)],
                drafted_ids,
                tuple(parents[: len(drafted_ids)]),
                logs[: len(token_ids)],
                prompt,
                tuple([row.logprob for row in logs[len(emitted) :][: len(drafted_ids)]]),
                num_valid > 0,
                tuple([one for one in margins_L if one == one]) or None,
            )
        )
    return tuple(results)


def as_int64(tensor: Tensor) -> Tensor:
    """Whole numbers, or the bits of numbers as float64."""
    if tensor.is_floating_point():
        return tensor.double().view(torch.int64)
    return tensor.long()


def from_int64(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The contiguous numbers of `as_int64` as they were."""
    return (numbers.view(torch.float64) if dtype.is_floating_point else numbers).to(dtype)


def _leading(row: Sequence[int]) -> tuple[int, ...]:
    """The ids before the padding."""
    return tuple([value for value in row if value >= 0])


def _log_rows(counts: Sequence[int], arrived: Iterator[Any]) -> list[tuple[TokenLogprobs, ...]]:
    """The log-probabilities of each work, from the next 5 tensors; of none if none has any."""
    if not any(counts):
        return [()] * len(counts)
    token_ids, logprobs, ranks, top_ids, top_logprobs = islice(arrived, 5)
    best = map(tuple, top_ids), map(tuple, top_logprobs)
    rows = map(TokenLogprobs, token_ids, logprobs, ranks, *best)
    return [tuple(islice(rows, count)) for count in counts]


def _event_seconds(stop: torch.cuda.Event, start: torch.cuda.Event) -> float:
    return start.elapsed_time(stop) / 1000
