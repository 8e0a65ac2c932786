# numba infers the types of these functions and specialises on them.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# ruff: noqa: ANN001, ANN202
"""The fast twin of `drawn_level` for float32 tensors on the CPU: one call for a level.

The twin draws tokens for all ranks of every node; here they are drawn only for ranks that get a
row. The results are the same.

Dimension key: B requests, E nodes of the level above (1: the root), F new rows, C ranks of a
node's children (in the order in which they are drawn), V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from outdraft.core.jit import njit
from outdraft.drafting.device.drawn_level import (
    DECAY,
    OWN_BASE,
    OWN_SLOPE,
    PARENT_SHIFT,
    RANK0_BASE,
    RANK0_SLOPE,
    SIDE_WEIGHT,
    DrawnLevel,
    LevelTask,
    side_shares,
)
from outdraft.drafting.device.tree_level import NewRows
from outdraft.sampling.noise import Purpose
from outdraft.sampling.noise_cpu import sample_logits
from outdraft.sampling.row_kernels import exp_below, maximum, softmax, total

_DRAFT = int(Purpose.DRAFT)
_NO_TEMPLATE = np.empty((2, 0), dtype=np.int64)


def draw_level_cpu(logits_BEV: Tensor, weight_BE: Tensor, task: LevelTask) -> DrawnLevel:
    """As `drawn_level.draw_level`."""
    num_requests, num_nodes, size = logits_BEV.shape
    num_ranks = ranks_of_level(num_nodes, task.num_rows, size)
    shape_BF = (num_requests, task.num_rows)
    token_ids_BF, origins_BF = np.zeros((2, *shape_BF), dtype=np.int64)
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
        np.array(side_shares(num_ranks), dtype=np.float32),
        token_ids_BF,
        origins_BF,
        is_drawn_BF,
        probs_BFV,
        weight_BF,
    )
    return DrawnLevel(
        NewRows(torch.from_numpy(token_ids_BF), torch.from_numpy(origins_BF)),
        torch.from_numpy(is_drawn_BF),
        torch.from_numpy(probs_BFV),
        torch.from_numpy(weight_BF),
    )


def ranks_of_level(num_nodes: int, num_rows: int, vocab_size: int) -> int:
    """C: ranks of a node that a level can need.

    Raises:
        ValueError: all of them are not enough.
    """
    num_ranks = min(num_rows, vocab_size)
    if num_nodes * num_ranks < num_rows:
        raise ValueError(f"{num_nodes * num_ranks} tokens cannot fill {num_rows} rows of a level")
    return num_ranks


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
    side_shares_C,
    token_ids_BF,
    origins_BF,
    is_drawn_BF,
    probs_BFV,
    weight_BF,
) -> None:
    for b in range(len(logits_BEV)):
        if is_greedy_B[b]:
            continue
        draw_rows(
            logits_BEV[b],
            weight_BE[b],
            template_2F,
            num_kept_B[b],
            depth,
            first_above,
            num_tokens_B[b],
            seeds_B[b],
            side_shares_C,
            token_ids_BF[b],
            origins_BF[b],
            is_drawn_BF[b],
            probs_BFV[b],
            weight_BF[b],
        )


@njit(cache=True, nogil=True)
def draw_rows(
    logits_EV,
    weight_E,
    template_2F,
    num_kept,
    depth,
    first_above,
    num_tokens,
    seed,
    side_shares_C,
    token_ids_F,
    origins_F,
    is_drawn_F,
    probs_FV,
    weight_F,
) -> None:
    """Write one request's rows of a level, the last five, as `draw_level` has them.

    The arguments are those of `LevelTask`; a template without columns is none. `side_shares_C` are
    those of all ranks but the first; more than the level can need change nothing. Ids, weights and
    what is drawn are 0 before.
    """
    num_nodes, size = logits_EV.shape
    num_rows = len(weight_F)
    gain_EC = np.empty((num_nodes, len(side_shares_C) + 1), dtype=np.float32)
    ids_EF = np.empty((num_nodes, num_rows), dtype=np.int64)
    buffer_V = np.empty(size, dtype=np.float32)
    ranks_F = np.empty(num_rows, dtype=np.int64)
    for node in range(num_nodes):
        _write_gains(logits_EV[node], weight_E[node], side_shares_C, buffer_V, gain_EC[node])
    if template_2F.shape[1] > 0:
        origins_F[:] = template_2F[0]
        ranks_F[:] = template_2F[1]
    else:
        _spread(gain_EC, origins_F, ranks_F)
    for row in range(max(0, min(num_kept, num_rows))):
        node, rank = origins_F[row], ranks_F[row]
        before_C = ids_EF[node, :rank]
        buffer_V[:] = logits_EV[node]
        for token in before_C:
            buffer_V[token] = -np.inf
        # All ranks share the noise of the node: the next best token is the next draw.
        anchor = num_tokens + ((first_above + node) << PARENT_SHIFT)
        token = sample_logits(buffer_V, seed, num_tokens + depth, anchor, _DRAFT)
        if buffer_V[token] > -np.inf:
            is_drawn_F[row] = True
            softmax(buffer_V, probs_FV[row])
            own = OWN_BASE + OWN_SLOPE * np.sqrt(probs_FV[row, token])
            first = weight_E[node] * own**DECAY
            weight_F[row] = first if rank == 0 else SIDE_WEIGHT * gain_EC[node, rank]
        else:
            token = _lowest_other(before_C)
        token_ids_F[row] = ids_EF[node, rank] = token


@njit(cache=True, nogil=True)
def _write_gains(logits_V, weight, side_shares_C, buffer_V, gain_C) -> None:
    """Write how many more accepted rows each rank of a node is expected to bring."""
    num_ranks = len(gain_C)
    num_with_mass = 0
    for token in range(len(logits_V)):
        num_with_mass += logits_V[token] > -np.inf
        if num_with_mass == num_ranks:
            break
    exp_below(logits_V, maximum(logits_V), buffer_V)
    first = RANK0_BASE + RANK0_SLOPE / total(buffer_V)
    gain_C[0] = weight * first**DECAY
    for rank in range(1, num_ranks):
        share = side_shares_C[rank - 1] if rank < num_with_mass else 0.0
        gain_C[rank] = weight * (1 - first) * share


@njit(cache=True, nogil=True)
def _lowest_other(ids_C):
    """The lowest id that is none of these."""
    for token in range(len(ids_C)):
        if not (ids_C == token).any():
            return token
    return len(ids_C)


@njit(cache=True, nogil=True)
def _spread(gain_EC, origins_F, ranks_F) -> None:
    """Write the origins and ranks of the rows that are expected to bring most."""
    num_nodes, num_ranks = gain_EC.shape
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
