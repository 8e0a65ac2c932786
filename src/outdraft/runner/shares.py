"""The shares of the ranks in a step, and the join of their integers.

A draft group drafts for the requests that it owns. Its ranks choose the drafts and verify them,
each a part: the rank has what the drafts were drawn from. All of it follows from the plan, so that
no rank has to ask.

Dimension key: B requests that sample, M of them that the network drafts for, K and N most drafts of
one of them, C columns of integers, R rows whose logits are needed, V vocabulary, J rows of
log-probabilities, S columns of the vocabulary that one rank has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.plan import Work
from outdraft.distributed.group import RankGroup, Ranks
from outdraft.drafting.device.asks import TargetStates
from outdraft.kernels.data.drafts import DraftBatch, Verdict, widened
from outdraft.kernels.data.logits import Scores
from outdraft.kernels.decoder_ops import Choice
from outdraft.kernels.ops import Kernels
from outdraft.runner.logprobs import LogprobRows, most_logprobs
from outdraft.runner.results import as_int64, from_int64
from outdraft.runner.state import RequestSlot


@dataclass(frozen=True, slots=True)
class Shares:
    """The works of a step that sample, by the rank that chooses their drafts and verifies them.

    Attributes:
        ranks: places of the works of each rank.
        num_rows: rows of each work whose logits are needed.
    """

    ranks: tuple[tuple[int, ...], ...]
    num_rows: tuple[int, ...]

    @classmethod
    def of(cls, works: Sequence[Work], ranks: Ranks) -> "Shares":
        """The requests of a group are cut into parts of its ranks, in batch order."""
        groups: list[list[int]] = [[] for _ in range(ranks.num_draft_groups)]
        for place, work in enumerate(works):
            groups[work.owner].append(place)
        size = ranks.draft.size
        parts = [
            tuple(group[len(group) * member // size : len(group) * (member + 1) // size])
            for group in groups
            for member in range(size)
        ]
        num_rows = tuple([1 + work.num_drafts for work in works])
        return cls(tuple(parts), num_rows)


def joined_rows(
    group: RankGroup, parts: Sequence[Tensor], places: Sequence[Sequence[int]]
) -> list[Tensor]:
    """The rows of all ranks, sorted by place. They travel as one tensor of int64.

    Args:
        parts: of this rank; all but the number of rows is the same on all ranks.
        places: of each rank's rows.
    """
    columns = [part[:, None] if part.dim() == 1 else part for part in parts]
    packed_JC = torch.cat([as_int64(part) for part in columns], dim=1)
    packed_JC = group.join_rows(packed_JC, [len(rows) for rows in places])
    order = np.argsort(np.array([row for rows in places for row in rows], dtype=np.int64))
    (order_J,) = to_device([order], packed_JC.device)
    joined = packed_JC.index_select(0, order_J).split([part.shape[1] for part in columns], dim=1)
    return [
        from_int64(joined_JC.contiguous(), part.dtype).view(len(order), *part.shape[1:])
        for joined_JC, part in zip(joined, parts, strict=True)
    ]


def network_drafts_of_all(
    made: DraftBatch | None,
    works: Sequence[Work],
    places: Sequence[Sequence[int]],
    group: RankGroup,
    device: torch.device,
) -> DraftBatch:
    """The network's drafts of all ranks, without the probabilities that they were drawn from.

    Args:
        made: by this rank; None: no request's.
        works: of all ranks that the network drafts for.
        places: of each rank's works.
    """
    width = max(work.num_model_drafts for work in works)
    has_rules = any(work.drafts and work.drafts.stop is not None for work in works)
    made = made or DraftBatch.empty(0, device)
    margins_BL = made.margins_BL
    if margins_BL is None:
        margins_BL = torch.empty(made.num_requests, 0, device=device)
    parts = [
        widened(made.token_ids_BN, width, -1),
        widened(made.parents_BN, width, 0),
        made.num_drafts_B,
        widened(margins_BL, width if has_rules else 0, torch.nan),
    ]
    ids_MK, parents_MK, num_drafts_M, margins_ML = joined_rows(group, parts, places)
    are_trees = any(work.drafts and work.drafts.is_device_tree for work in works)
    return DraftBatch(
        ids_MK,
        parents_MK,
        num_drafts_M,
        is_chain=not are_trees,
        sampled_trees=are_trees,
        margins_BL=margins_ML if has_rules else None,
    )


def joined_choice(own: Choice, shares: Shares, group: RankGroup) -> Choice:
    """The choice of all requests, in their order; `own`: of those of this rank."""
    width, device = own.verdict.rows_BN.shape[1], own.is_finite_R.device
    num_rows = [shares.num_rows[place] for place in shares.ranks[group.rank]]
    finite_BN1 = own.is_finite_R.new_ones(len(num_rows), width + 1)
    own_R, places_R = to_device(
        [_padded_places(num_rows, width), _padded_places(shares.num_rows, width)], device
    )
    finite_BN1.view(-1).index_copy_(0, own_R, own.is_finite_R)
    *verdict, finite_BN1 = joined_rows(group, [*own.verdict, finite_BN1], shares.ranks)
    return Choice(Verdict(*verdict), finite_BN1.flatten().index_select(0, places_R))


def owned_states(states: TargetStates, works: Sequence[Work], owner: int) -> TargetStates:
    """The states of the works of one draft group.

    Args:
        works: of the step, in the order of its rows.
    """
    is_own_W = np.array([work.owner == owner for work in works], dtype=np.bool_)
    if is_own_W.all():
        return states
    counts_W = np.array([work.num_rows for work in works])
    own_counts_W, starts_W = counts_W[is_own_W], (counts_W.cumsum() - counts_W)[is_own_W]
    own_starts_W = own_counts_W.cumsum() - own_counts_W
    firsts = dict(zip(starts_W.tolist(), own_starts_W.tolist(), strict=True))
    rows, kept = np.flatnonzero(is_own_W.repeat(counts_W)), np.flatnonzero(is_own_W)
    arrays = [rows, kept, own_starts_W - starts_W]
    rows_T, kept_W, shifts_W = to_device(arrays, states.places_T.device)
    return TargetStates(
        states.hidden_TD.index_select(0, rows_T),
        states.tapped_TKD.index_select(0, rows_T),
        states.places_T.index_select(0, rows_T),
        states.last_rows_W.index_select(0, kept_W) + shifts_W,
        states.last_places_W.index_select(0, kept_W),
        states.token_ids_SL,
        [(text, firsts[row]) for text, row in states.reads if row in firsts],
    )


def _padded_places(num_rows: Sequence[int], width: int) -> np.ndarray:
    """int64 [R]: places of flat rows in a table with width + 1 rows for each request."""
    places = [b * (width + 1) + np.arange(count) for b, count in enumerate(num_rows)]
    return np.concatenate(places) if places else np.zeros(0, dtype=np.int64)


def joined_scores(
    kernels: Kernels,
    logits_RS: Tensor,
    vocab_size: int,
    chosen_R: Tensor,
    num_top: int,
    group: RankGroup,
) -> Scores:
    """Score tokens (see `score_tokens`); each rank scores a part of the rows."""
    cuts = [len(chosen_R) * rank // group.size for rank in range(group.size + 1)]
    places = [range(start, end) for start, end in pairwise(cuts)]
    logits_RV = group.turn(logits_RS, [len(rows) for rows in places])[:, :vocab_size]
    del logits_RS  # as large as what they became
    own_R = chosen_R[cuts[group.rank] : cuts[group.rank + 1]]
    own = kernels.score_tokens(logits_RV, own_R, num_top, None)
    return Scores(*joined_rows(group, _widened(own, num_top), places))


def joined_logprobs(
    emitted: LogprobRows | None,
    slots: Sequence[RequestSlot],
    shares: Shares,
    width: int,
    group: RankGroup,
    device: torch.device,
) -> LogprobRows:
    """The rows of `emitted_logprobs` of all ranks, in the order of the requests.

    Args:
        emitted: of this rank's requests; None: none of them asked.
        slots: of all requests.
        width: places of the drafts of each request.
    """
    counts: list[int] = []
    for slot in slots:
        has_rows = slot.params.logprobs is not None
        counts.append((width * (1 + slot.params.speculation.trace) + 1) * has_rows)
    most = most_logprobs(slots)
    if emitted is None:
        ids_JK = torch.zeros(0, most, dtype=torch.int64, device=device)
        ids_J = ids_JK.sum(1)
        emitted = LogprobRows((), ids_J, Scores(ids_J.float(), ids_J, ids_JK, ids_JK.float()))
    parts = [emitted.token_ids_J, *_widened(emitted.scores, most)]
    rows = [flat_rows(counts, part).tolist() for part in shares.ranks]
    token_ids_J, *scores = joined_rows(group, parts, rows)
    return LogprobRows(tuple(counts), token_ids_J, Scores(*scores))


def flat_rows(counts: Sequence[int], places: Sequence[int]) -> np.ndarray:
    """int64: the flat rows of some works; `counts`: of all works."""
    starts = np.cumsum([0, *counts])
    rows = [np.arange(starts[place], starts[place + 1]) for place in places]
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)


def _widened(scores: Scores, num_top: int) -> Scores:
    """These scores with `num_top` best tokens; missing ones are zeros."""
    ids_JK, logprobs_JK = scores.top_ids_RK, scores.top_logprobs_RK
    return scores._replace(
        top_ids_RK=widened(ids_JK, num_top, 0), top_logprobs_RK=widened(logprobs_JK, num_top, 0)
    )
