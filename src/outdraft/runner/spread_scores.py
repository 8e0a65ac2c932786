"""Log-probabilities of rows that several ranks have: each scores its own, then all know all.

Dimension key: J rows with log-probabilities, R rows, S columns of the vocabulary that one rank has,
K best tokens.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.distributed.group import RankGroup
from outdraft.kernels.data.logits import Scores
from outdraft.kernels.ops import Kernels
from outdraft.runner.logprobs import LogprobRows
from outdraft.runner.shares import Shares
from outdraft.runner.state import RequestSlot


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
        has_rows = slot.rules.logprobs is not None
        counts.append((width * (1 + slot.rules.is_traced) + 1) * has_rows)
    most = max(slot.rules.logprobs or 0 for slot in slots)
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
    return torch.cat([floats_JC.double().view(torch.int64), rank_J[:, None], ids_JC], dim=1)


def _unpacked(packed_JC: Tensor, num_top: int) -> Scores:
    bits_JC, ranks_J1, ids_JK = packed_JC.split([1 + num_top, 1, num_top], dim=1)
    floats_JC = bits_JC.contiguous().view(torch.float64).float()
    return Scores(floats_JC[:, 0], ranks_J1[:, 0], ids_JK, floats_JC[:, 1:])
