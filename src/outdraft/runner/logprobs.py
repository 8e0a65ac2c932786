"""Log-probabilities of emitted and of prompt tokens, for the requests that asked for them.

Dimension key: J rows with log-probabilities, K the most that any request asked for, R logits rows,
B requests that sample, N1 places for emitted tokens, T rows, D hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.plan import Work
from outdraft.kernels.data.drafts import DraftBatch, Verdict, row_index_BN1
from outdraft.kernels.data.logits import Scores, concatenated
from outdraft.kernels.ops import Kernels
from outdraft.runner.state import RequestSlot, Slots

PROMPT_ROWS = 32  # most rows of logits at the same time


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Raw log-probabilities (before any sampling parameter), flat over requests and places.

    Attributes:
        counts: rows of each work of the step, in order; their sum is J.
        token_ids_J: int64.
        scores: of these tokens.
    """

    counts: tuple[int, ...]
    token_ids_J: Tensor
    scores: Scores


def wants_logprobs(slots: Sequence[RequestSlot]) -> bool:
    """A request asked for log-probabilities of its output."""
    return any(slot.params.logprobs is not None for slot in slots)


def most_logprobs(slots: Sequence[RequestSlot]) -> int:
    """K: the most that any request asked for of its output."""
    return max(slot.params.logprobs or 0 for slot in slots)


def emitted_logprobs(
    kernels: Kernels,
    slots: Sequence[RequestSlot],
    logits_RV: Tensor,
    drafts: DraftBatch,
    verdict: Verdict,
    num_top: int,
) -> LogprobRows | None:
    """One row for each place of an emitted token, padding included; None if no request asked.

    A request with a trace also has a row for each place of a drafted token: the log-probability
    that the target gave it after its parent.

    Args:
        num_top: K.
    """
    asking = [b for b, slot in enumerate(slots) if slot.params.logprobs is not None]
    if not asking:
        return None
    traced = [slots[b].params.speculation.trace for b in asking]
    places = [drafts.width * (1 + is_traced) + 1 for is_traced in traced]
    kept = [a * (2 * drafts.width + 1) + np.arange(count) for a, count in enumerate(places)]
    rows_B, kept_J = to_device([np.array(asking), np.concatenate(kept)], logits_RV.device)
    # The i-th emitted token was chosen after the i-th row of the accepted path, root first.
    path_BN1 = torch.nn.functional.pad(verdict.rows_BN[rows_B] + 1, (1, 0)).clamp_min(0)
    parents_BN = torch.where(drafts.is_draft_BN, drafts.parents_BN, 0)[rows_B]
    behind = torch.cat([path_BN1, parents_BN], dim=1)
    chosen = torch.cat([verdict.token_ids_BN1[rows_B], drafts.token_ids_BN[rows_B]], dim=1)
    flat_J = row_index_BN1(drafts)[rows_B].gather(1, behind).flatten()[kept_J]
    chosen_J = chosen.clamp_min(0).flatten()[kept_J]
    counts = dict(zip(asking, places, strict=True))
    return LogprobRows(
        tuple(counts.get(b, 0) for b in range(len(slots))),
        chosen_J,
        kernels.score_tokens(logits_RV, chosen_J, num_top, flat_J),
    )


def concatenated_rows(
    parts: Sequence[LogprobRows | None], sizes: Sequence[int]
) -> LogprobRows | None:
    """Join the rows of all parts of a step's requests; None if no request asked.

    Args:
        sizes: requests of each part.
    """
    there = [one for one in parts if one is not None]
    if not there:
        return None
    counts: list[int] = []
    for one, size in zip(parts, sizes, strict=True):
        counts += [0] * size if one is None else one.counts
    token_ids_J = torch.cat([one.token_ids_J for one in there])
    return LogprobRows(tuple(counts), token_ids_J, concatenated([one.scores for one in there]))


def prompt_logprobs(
    works: Sequence[Work],
    slots: Slots,
    hidden_TD: Tensor,
    scored: Callable[[Tensor, Tensor, int], Scores],
    num_rows: int,
) -> LogprobRows | None:
    """One row for each prompt position computed now whose next token is in the prompt.

    Args:
        scored: does the work of `score_tokens`, from hidden states [R, D].
        num_rows: that are scored at the same time.
    """
    counts = [_num_prompt_rows(work, slots[work.slot]) for work in works]
    if not any(counts):
        return None
    starts = accumulate([work.num_rows for work in works], initial=0)
    rows = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=False)]
    next_ids = [
        slots[work.slot].token_ids[work.start + 1 :][:count].astype(np.int64)
        for work, count in zip(works, counts, strict=True)
    ]
    rows_J, next_J = to_device([np.concatenate(rows), np.concatenate(next_ids)], hidden_TD.device)
    asking = [slots[work.slot] for work, count in zip(works, counts, strict=True) if count]
    most = max(slot.params.prompt_logprobs or 0 for slot in asking)
    slices = [
        scored(hidden_TD[some_J], chosen_J, most)
        for some_J, chosen_J in zip(rows_J.split(num_rows), next_J.split(num_rows), strict=True)
    ]
    return LogprobRows(tuple(counts), next_J, concatenated(slices))


def wants_prompt_logprobs(works: Sequence[Work], slots: Slots) -> bool:
    """`prompt_logprobs` reads states of these rows."""
    return any(_num_prompt_rows(work, slots[work.slot]) for work in works)


def _num_prompt_rows(work: Work, slot: RequestSlot) -> int:
    if slot.params.prompt_logprobs is None:
        return 0
    left = slot.num_prompt - 1 - work.start
    return max(0, min(work.num_new, left))
