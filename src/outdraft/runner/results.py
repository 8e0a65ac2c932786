"""The results of a step, brought to the host in one copy.

Dimension key: B requests that sample, N most drafts of one of them, R flat rows as in
`data.drafts`, L levels of a network, J rows of log-probabilities.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outdraft.core.plan import StepPlan, TokenLogprobs, WorkResult
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.decoder_ops import Choice
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
            (part.view(torch.float64) if dtype.is_floating_point else part).to(dtype).view(shape)
            for part, (shape, dtype) in zip(parts, self._kinds, strict=True)
        ]


class StepCopies(NamedTuple):
    """The results of a step on their way to the host.

    Attributes:
        copy: of the tensors that `to_host` lists.
        emitted, prompt: rows of log-probabilities of each work; None: no work asked.
    """

    copy: HostCopy
    has_margins: bool
    emitted: Sequence[int] | None
    prompt: Sequence[int] | None


def to_host(
    choice: Choice | None,
    drafts: DraftBatch | None,
    emitted: LogprobRows | None,
    prompt: LogprobRows | None,
    device: torch.device,
) -> StepCopies:
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
    return StepCopies(HostCopy(tensors, device), margins_BL is not None, *counts)


def work_results(plan: StepPlan, copies: StepCopies) -> tuple[WorkResult, ...]:
    """Results in the order of the plan's works, once the copy has arrived.

    Args:
        plan: with the rows that the target read.
    """
    arrived: Iterator[Any] = map(Tensor.tolist, copies.copy.wait())  # in the order of `to_host`
    num_sampling = sum(work.samples for work in plan.works)
    is_finite_R, *rows_of = islice(arrived, 5) if num_sampling else [()] * 5
    margins: list[list[float]] = next(arrived) if copies.has_margins else [[]] * num_sampling
    emitted_logs = _log_rows(copies.emitted or [0] * num_sampling, arrived)
    prompt_logs = _log_rows(copies.prompt or [0] * len(plan.works), arrived)
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
