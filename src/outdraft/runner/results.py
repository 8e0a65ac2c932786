"""The results of a step, brought to the host in one copy.

Dimension key: B requests that sample, N most drafts of one of them, R flat rows as in
`data.drafts`, L levels of a network, J rows of log-probabilities.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from outdraft.core.plan import StepPlan, TokenLogprobs, WorkResult
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.decoder_ops import Choice
from outdraft.runner.logprobs import LogprobRows


class VerifiedRows(Struct, frozen=True):
    """The verdicts on the drafts of a step.

    Attributes:
        choice: of all requests, however they choose. A row is finite if the target's raw logits
            there are numbers to choose by.
    """

    choice: Choice
    drafts: DraftBatch


class StepCopies(Struct, frozen=True):
    """A copy that is under way, and how to split it again.

    Attributes:
        packed: on a GPU, one int64 tensor on the host, floats as their bits; else the tensors.
        shapes: of the tensors in order, if they are packed.
        has_margins: live rules' margins are among them.
        arrived: set on a GPU when the copy is complete.
    """

    packed: list[Tensor]
    shapes: tuple[torch.Size, ...]
    has_margins: bool
    emitted: LogprobRows | None
    prompt: LogprobRows | None
    arrived: torch.cuda.Event | None


def to_host(
    verified: VerifiedRows | None,
    emitted: LogprobRows | None,
    prompt: LogprobRows | None,
    device: torch.device,
) -> StepCopies:
    """Start the one copy of a step; waits for nothing."""
    tensors: list[Tensor] = []
    margins_BL = None
    if verified is not None:
        choice, drafts = verified.choice, verified.drafts
        verdict = choice.verdict
        tensors += [choice.is_finite_R, verdict.token_ids_BN1, verdict.rows_BN]
        tensors += [drafts.token_ids_BN, drafts.parents_BN]
        margins_BL = drafts.margins_BL
        tensors += [margins_BL] if margins_BL is not None else []
    for rows in (emitted, prompt):
        if rows is not None:
            tensors += [rows.token_ids_J, *rows.scores]
    rest = margins_BL is not None, emitted, prompt
    if device.type == "cpu":
        return StepCopies(tensors, (), *rest, None)
    shapes = tuple(tensor.shape for tensor in tensors)
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    packed = torch.cat([nothing, *(_as_int64(tensor).flatten() for tensor in tensors)])
    host = torch.empty(packed.shape, dtype=torch.int64, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    arrived = torch.cuda.Event()  # also where nothing is copied: the clock is read after it
    arrived.record()
    return StepCopies([host], shapes, *rest, arrived)


def work_results(plan: StepPlan, copies: StepCopies) -> tuple[WorkResult, ...]:
    """Results in the order of the plan's works, once the copy has arrived.

    Args:
        plan: with the rows that the target read.
    """
    if copies.arrived is not None:
        copies.arrived.synchronize()
    tensors = _unpack(copies)
    if not tensors:
        return tuple([WorkResult() for _ in plan.works])
    is_finite_R: list[bool] = []
    verdicts: list[list[list[int]]] = []
    if any(work.samples for work in plan.works):
        is_finite_R, *verdicts = [one.tolist() for one in tensors[:5]]
        tensors = tensors[5:]
    margins, emitted_logs, prompt_logs = _extras(copies, tensors)
    are_finite = all(is_finite_R)
    results: list[WorkResult] = []
    place = root = 0
    for number, work in enumerate(plan.works):
        prompt = tuple(prompt_logs[number]) if prompt_logs is not None else ()
        if not work.samples:
            results.append(WorkResult(prompt_logprobs=prompt))
            continue
        emitted, accepted, drafted, parents = [rows[place] for rows in verdicts]
        num_drafts = work.num_drafts
        drafted_ids, rows = _leading(drafted[:num_drafts]), _leading(accepted)
        # Each token was chosen after the root or after an accepted draft. From the first row
        # without finite logits on, tokens mean nothing.
        num_valid = len(rows) + 1
        if not are_finite:
            path = (0, *(row + 1 for row in rows))
            is_lost = (at for at, row in enumerate(path) if not is_finite_R[root + row])
            num_valid = next(is_lost, num_valid)
        token_ids = _leading(emitted)[:num_valid]
        logs = emitted_logs[place] if emitted_logs is not None else []
        results.append(
            WorkResult(
                token_ids,
                rows[: max(0, num_valid - 1)],
                drafted_ids,
                tuple(parents[: len(drafted_ids)]),
                tuple(logs[: len(token_ids)]),
                prompt,
                tuple([row.logprob for row in logs[len(emitted) :][: len(drafted_ids)]]),
                num_valid > 0,
                margins[place] if margins is not None else None,
            )
        )
        place += 1
        root += 1 + num_drafts
    return tuple(results)


class _Extras(NamedTuple):
    """Results that few steps have, in the order of the works that sample; None: there are none.

    Attributes:
        prompts: in the order of all works.
    """

    margins: list[tuple[float, ...] | None] | None = None
    emitted: list[list[TokenLogprobs]] | None = None
    prompts: list[list[TokenLogprobs]] | None = None


_NO_EXTRAS = _Extras()


def _extras(copies: StepCopies, tensors: Sequence[Tensor]) -> _Extras:
    """Unpack the tensors after those of the verdicts."""
    if not tensors:
        return _NO_EXTRAS
    arrays = (one.numpy() for one in tensors)  # in this order:
    margins = _margins(next(arrays)) if copies.has_margins else None
    emitted = _log_rows(copies.emitted.counts, arrays) if copies.emitted is not None else None
    prompts = _log_rows(copies.prompt.counts, arrays) if copies.prompt is not None else None
    return _Extras(margins, emitted, prompts)


def _as_int64(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return tensor.double().view(torch.int64)
    return tensor.long()


def _unpack(copies: StepCopies) -> list[Tensor]:
    if copies.arrived is None:
        return copies.packed
    parts = copies.packed[0].split([shape.numel() for shape in copies.shapes])
    return [part.view(shape) for part, shape in zip(parts, copies.shapes, strict=True)]


def _margins(margins_BL: np.ndarray) -> list[tuple[float, ...] | None]:
    """The margins of each request; None: it has no rule."""
    if margins_BL.dtype == np.int64:  # the bits of what travelled in one piece
        margins_BL = margins_BL.view(np.float64).astype(np.float32)
    found = [tuple([one for one in row if one == one]) for row in margins_BL.tolist()]
    return [row or None for row in found]


def _leading(row: Sequence[int]) -> tuple[int, ...]:
    """The ids before the padding."""
    return tuple([value for value in row if value >= 0])


def _log_rows(counts: Sequence[int], arrays: Iterator[np.ndarray]) -> list[list[TokenLogprobs]]:
    """The log-probabilities of each work, from the next 5 arrays."""
    token_ids, logprobs, ranks, top_ids, top_logprobs = itertools.islice(arrays, 5)
    if logprobs.dtype == np.int64:  # the bits of what travelled in one piece
        logprobs, top_logprobs = logprobs.view(np.float64), top_logprobs.view(np.float64)
    best = map(tuple, top_ids.tolist()), map(tuple, top_logprobs.tolist())
    rows = map(TokenLogprobs, token_ids.tolist(), logprobs.tolist(), ranks.tolist(), *best)
    return [list(itertools.islice(rows, count)) for count in counts]
