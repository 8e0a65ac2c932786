# numba infers the types of these functions and specialises on them.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# ruff: noqa: ANN001
"""The fast twin of `drawn_level` for float32 tensors on the CPU: one call for a level.

It draws only where a row asks for it.

Dimension key: B requests, E nodes of the level above (1: the root), F new rows, C ranks of a
node's children (0: the drawn one), V vocabulary.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from outdraft.sampling.noise import Purpose
from outdraft.sampling.noise_cpu import sample_logits
from outdraft.sampling.row_kernels import exp_below, maximum, softmax, total
from outdraft.spec.drawn_level import (
    DRAWN_BASE,
    DRAWN_SLOPE,
    NO_MASS,
    OWN_BASE,
    OWN_SLOPE,
    PARENT_SHIFT,
    RANKED_GAIN,
    DrawnLevel,
    LevelTask,
)
from outdraft.spec.tree_level import NewRows

_DRAFT = int(Purpose.DRAFT)
_NO_TEMPLATE = np.empty((2, 0), dtype=np.int64)


def draw_level_cpu(logits_BEV: Tensor, weight_BE: Tensor, task: LevelTask) -> DrawnLevel:
    """As `drawn_level.draw_level`."""
    num_requests, num_nodes, size = logits_BEV.shape
    num_ranks = min(task.num_rows, size)
    if num_nodes * num_ranks < task.num_rows:
        raise ValueError(
            f"{num_nodes * num_ranks} tokens cannot fill {task.num_rows} rows of a level"
        )
    shape_BF = (num_requests, task.num_rows)
    places_2BF = np.zeros((2, *shape_BF), dtype=np.int64)
    is_drawn_BF = np.zeros(shape_BF, dtype=np.bool_)
    probs_BFV = np.empty((*shape_BF, size), dtype=np.float32)
    weight_BF = np.zeros(shape_BF, dtype=np.float32)
    num_kept_B = (
        np.full(num_requests, task.num_rows)
        if task.num_kept_B is None
        else np.ascontiguousarray(task.num_kept_B.numpy())
    )
    _draw_level(
        logits_BEV.contiguous().numpy(),
        np.ascontiguousarray(weight_BE.numpy()),
        _NO_TEMPLATE if task.template_2F is None else task.template_2F.numpy(),
        num_kept_B,
        task.depth,
        task.first_above,
        np.ascontiguousarray(task.num_tokens_B.numpy()),
        np.ascontiguousarray(task.sampling.seeds_B.numpy()),
        np.ascontiguousarray(task.sampling.is_greedy_B.numpy()),
        num_ranks,
        places_2BF,
        is_drawn_BF,
        probs_BFV,
        weight_BF,
    )
    token_ids_BF, origins_BF = torch.from_numpy(places_2BF)
    return DrawnLevel(
        NewRows(token_ids_BF, origins_BF),
        torch.from_numpy(is_drawn_BF),
        torch.from_numpy(probs_BFV),
        torch.from_numpy(weight_BF),
    )


@njit(cache=True, nogil=True)
def _draw_level(
    logits_BEV,
    weight_BE,
    template_2F,
    num_kept_B,
    depth,
    first_above,
    num_tokens_B,
    seeds_B,
    is_greedy_B,
    num_ranks,
    places_2BF,
    is_drawn_BF,
    probs_BFV,
    weight_BF,
) -> None:
    num_nodes, size = logits_BEV.shape[1:]
    ids_EC = np.empty((num_nodes, num_ranks), dtype=np.int64)
    shares_EC = np.empty((num_nodes, num_ranks), dtype=np.float32)
    num_ranked_E = np.empty(num_nodes, dtype=np.int64)
    buffer_V = np.empty(size, dtype=np.float32)
    ranks_F = np.empty(weight_BF.shape[1], dtype=np.int64)
    for b in range(len(logits_BEV)):
        if is_greedy_B[b]:
            continue
        for node in range(num_nodes):
            _likeliest(logits_BEV[b, node], buffer_V, ids_EC[node], shares_EC[node])
        origins_F = places_2BF[1, b]
        if template_2F.shape[1] > 0:
            origins_F[:] = template_2F[0]
            ranks_F[:] = template_2F[1]
        else:
            _spread(shares_EC, weight_BE[b], origins_F, ranks_F)
        num_kept = max(0, min(num_kept_B[b], len(ranks_F)))
        num_ranked_E[:] = 0
        for row in range(num_kept):
            if ranks_F[row] > 0:
                num_ranked_E[origins_F[row]] += 1
        for row in range(num_kept):
            node, rank = origins_F[row], ranks_F[row]
            if rank > 0:
                places_2BF[0, b, row] = ids_EC[node, rank - 1]
                weight_BF[b, row] = weight_BE[b, node] * shares_EC[node, rank - 1]
                continue
            num_ranked = num_ranked_E[node]
            left = np.float32(1)
            for at in range(num_ranked):
                left -= shares_EC[node, at]
            own = np.float32(0)
            token = ids_EC[node, num_ranked]
            if logits_BEV[b, node, token] > -np.inf:
                buffer_V[:] = logits_BEV[b, node]
                for at in range(num_ranked):
                    buffer_V[ids_EC[node, at]] = -np.inf
                anchor = num_tokens_B[b] + ((first_above + node) << PARENT_SHIFT)
                token = sample_logits(buffer_V, seeds_B[b], num_tokens_B[b] + depth, anchor, _DRAFT)
                softmax(buffer_V, probs_BFV[b, row])
                own = probs_BFV[b, row, token]
                is_drawn_BF[b, row] = True
            places_2BF[0, b, row] = token
            weight_BF[b, row] = weight_BE[b, node] * left * (OWN_BASE + OWN_SLOPE * np.sqrt(own))


@njit(cache=True, nogil=True)
def _likeliest(logits_V, buffer_V, ids_C, shares_C) -> None:
    """Write the likeliest tokens, the lowest id of equals first, and their shares."""
    num_ranks, found = len(ids_C), 0
    for token in range(len(logits_V)):
        if found == num_ranks and not logits_V[token] > logits_V[ids_C[found - 1]]:
            continue
        at = found if found < num_ranks else found - 1
        found = at + 1
        while at > 0 and logits_V[token] > logits_V[ids_C[at - 1]]:
            ids_C[at] = ids_C[at - 1]
            at -= 1
        ids_C[at] = token
    exp_below(logits_V, maximum(logits_V), buffer_V)
    whole = total(buffer_V)
    for at in range(num_ranks):
        shares_C[at] = buffer_V[ids_C[at]] / whole


@njit(cache=True, nogil=True)
def _spread(shares_EC, weight_E, origins_F, ranks_F) -> None:
    """Write the origins and ranks of the rows of which most is expected."""
    num_nodes, num_ranks = shares_EC.shape
    gain_EC = np.empty((num_nodes, num_ranks), dtype=np.float32)
    for node in range(num_nodes):
        gain = DRAWN_BASE + DRAWN_SLOPE * shares_EC[node, 0]
        gain_EC[node, 0] = gain * weight_E[node]
        covered = 0.0
        for rank in range(1, num_ranks):
            share = shares_EC[node, rank - 1]
            covered += share
            left = 1.0 - covered
            gain = min(gain, RANKED_GAIN * share * left / (left + share) if left > NO_MASS else 0.0)
            gain_EC[node, rank] = gain * weight_E[node]
    next_E = np.zeros(num_nodes, dtype=np.int64)
    for row in range(len(origins_F)):
        best = -1
        for node in range(num_nodes):
            if next_E[node] == num_ranks:
                continue
            if best < 0 or gain_EC[node, next_E[node]] > gain_EC[best, next_E[best]]:
                best = node
        origins_F[row], ranks_F[row] = best, next_E[best]
        next_E[best] += 1
