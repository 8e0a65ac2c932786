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
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.plan import Work
from outdraft.distributed.group import RankGroup, Ranks
from outdraft.drafting.device.asks import TargetStates
from outdraft.kernels.data.drafts import DraftBatch, Verdict
from outdraft.kernels.data.logits import Scores
from outdraft.kernels.ops import Kernels
from outdraft.runner.logprobs import LogprobRows
from outdraft.runner.results import as_int64
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

    def rows_of(self, places: Sequence[int]) -> np.ndarray:
        """int64: flat rows of these works."""
        starts = np.cumsum([0, *self.num_rows])
        rows = [np.arange(starts[place], starts[place + 1]) for place in places]
        return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)

    @property
    def by_rank(self) -> list[int]:
        """Places of all works, rank after rank."""
        return [place for part in self.ranks for place in part]


def back_in_order(places: Sequence[int], device: torch.device) -> Tensor:
    """int64: the indices that sort rows, given in the order of `places`, by place."""
    (order,) = to_device([np.argsort(np.array(places, dtype=np.int64))], device)
    return order


def packed_drafts(made: DraftBatch | None, works: Sequence[Work], device: torch.device) -> Tensor:
    """int64 [M, C]: drafts that travel, one row of integers for each request; None: no request's.

    Args:
        works: of all ranks that the network drafts for.
    """
    width, num_levels = _drafted_columns(works)
    if made is None:
        return torch.zeros(0, 2 * width + 1 + num_levels, dtype=torch.int64, device=device)
    parts = [
        _wide(made.token_ids_BN, width, -1),
        _wide(made.parents_BN, width, 0),
        made.num_drafts_B[:, None],
    ]
    if num_levels:
        margins_BL = made.margins_BL
        if margins_BL is None:
            margins_BL = torch.empty(len(made.token_ids_BN), 0, device=device)
        parts.append(as_int64(_wide(margins_BL, num_levels, torch.nan)))
    return torch.cat(parts, dim=1)


def unpacked_drafts(rows_MC: Tensor, works: Sequence[Work]) -> DraftBatch:
    """The drafts of these works, without the probabilities that they were drawn from."""
    width, num_levels = _drafted_columns(works)
    sizes = [width, width, 1, num_levels]
    ids_MK, parents_MK, numbers_M1, bits_ML = rows_MC.split(sizes, dim=1)
    margins_ML = bits_ML.contiguous().view(torch.float64).float()
    are_trees = any(work.drafts and work.drafts.is_device_tree for work in works)
    return DraftBatch(
        ids_MK.contiguous(),
        parents_MK.contiguous(),
        numbers_M1[:, 0].contiguous(),
        is_chain=not are_trees,
        sampled_trees=are_trees,
        margins_BL=margins_ML if num_levels else None,
    )


def _drafted_columns(works: Sequence[Work]) -> tuple[int, int]:
    """K, and the levels that live rules may have looked at; 0: there are no such rules."""
    width = max(work.num_model_drafts for work in works)
    has_rules = any(work.drafts and work.drafts.stop is not None for work in works)
    return width, width if has_rules else 0


def packed_verdict(verdict: Verdict, is_finite_R: Tensor, num_rows: Sequence[int]) -> Tensor:
    """int64 [B, 3 * N + 3]: emitted ids, their number, accepted rows, and which rows are finite.

    Args:
        num_rows: of each request, in `is_finite_R`.
    """
    width = verdict.rows_BN.shape[1]
    finite_BN1 = is_finite_R.new_ones(len(num_rows), width + 1)
    (places_R,) = to_device([_padded_places(num_rows, width)], is_finite_R.device)
    finite_BN1.view(-1).index_copy_(0, places_R, is_finite_R)
    parts = [verdict.token_ids_BN1, verdict.num_emitted_B[:, None], verdict.rows_BN, finite_BN1]
    return torch.cat([as_int64(part) for part in parts], dim=1)


def unpacked_verdict(
    packed_BC: Tensor, width: int, num_rows: Sequence[int]
) -> tuple[Verdict, Tensor]:
    """A verdict and bool [R], of all requests in their order."""
    sizes = [width + 1, 1, width, width + 1]
    ids_BN1, numbers_B1, rows_BN, finite_BN1 = packed_BC.split(sizes, dim=1)
    (places_R,) = to_device([_padded_places(num_rows, width)], packed_BC.device)
    is_finite_R = finite_BN1.reshape(-1).index_select(0, places_R).bool()
    verdict = Verdict(ids_BN1.contiguous(), numbers_B1[:, 0].contiguous(), rows_BN.contiguous())
    return verdict, is_finite_R


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


def _wide(tensor_BK: Tensor, width: int, padding: float) -> Tensor:
    missing = width - tensor_BK.shape[1]
    return torch.nn.functional.pad(tensor_BK, (0, missing), value=padding) if missing else tensor_BK


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
    counts = [end - start for start, end in pairwise(cuts)]
    logits_RV = group.turn(logits_RS, counts)[:, :vocab_size]
    del logits_RS  # as large as what they became
    own_R = chosen_R[cuts[group.rank] : cuts[group.rank + 1]]
    packed_RC = _packed(kernels.score_tokens(logits_RV, own_R, num_top, None), num_top)
    return _unpacked(group.join_rows(packed_RC, counts), num_top)


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
    most = max(slot.params.logprobs or 0 for slot in slots)
    packed_JC = torch.zeros(0, 3 + 2 * most, dtype=torch.int64, device=device)
    if emitted is not None:
        packed_JC = torch.cat([emitted.token_ids_J[:, None], _packed(emitted.scores, most)], dim=1)
    rank_counts = [sum([counts[place] for place in part]) for part in shares.ranks]
    packed_JC = group.join_rows(packed_JC, rank_counts)
    starts = accumulate([counts[place] for place in shares.by_rank], initial=0)
    firsts = dict(zip(shares.by_rank, starts, strict=False))
    rows = [row for b, count in enumerate(counts) for row in range(firsts[b], firsts[b] + count)]
    (order,) = to_device([np.array(rows, dtype=np.int64)], device)
    packed_JC = packed_JC.index_select(0, order)
    scores = _unpacked(packed_JC[:, 1:].contiguous(), most)
    return LogprobRows(tuple(counts), packed_JC[:, 0].contiguous(), scores)


def _packed(scores: Scores, num_top: int) -> Tensor:
    """int64 [J, 2 + 2 * num_top]: floats as their bits; missing best tokens are zeros."""
    logprob_J, rank_J, top_ids_JK, top_JK = scores
    missing = num_top - top_ids_JK.shape[1]
    floats_JC = torch.cat([logprob_J[:, None], torch.nn.functional.pad(top_JK, (0, missing))], 1)
    ids_JC = torch.nn.functional.pad(top_ids_JK, (0, missing))
    return torch.cat([as_int64(floats_JC), rank_J[:, None], ids_JC], dim=1)


def _unpacked(packed_JC: Tensor, num_top: int) -> Scores:
    bits_JC, ranks_J1, ids_JK = packed_JC.split([1 + num_top, 1, num_top], dim=1)
    floats_JC = bits_JC.contiguous().view(torch.float64).float()
    return Scores(floats_JC[:, 0], ranks_J1[:, 0], ids_JK, floats_JC[:, 1:])
