# numba infers the types of these functions and specialises on them.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# ruff: noqa: ANN001, ANN201, ANN202
"""The walk through one tree, for `verify_cpu`: as `verify_tree.verify_tree` and `match_draft`.

Dimension key: N drafts of the request, N1 = N + 1, V vocabulary.
"""

import numpy as np

from outdraft.core.jit import njit
from outdraft.sampling.noise import Purpose
from outdraft.sampling.noise_cpu import sample_logits
from outdraft.sampling.row_kernels import softmax
from outdraft.sampling.sampler_cpu import choose_row
from outdraft.verification.verify_chain_cpu import (
    TINY,
    coin,
    recovered_token,
    subtract,
    subtract_one,
)

_SAMPLE = int(Purpose.SAMPLE)


@njit(cache=True)
def child_of(drafted_N, parents_N, num_drafts, row, choice):
    """The draft after `row` that is the choice, -1 if there is none."""
    # A parent precedes its children; of siblings with the same token the first is taken.
    for draft in range(row, num_drafts):
        if parents_N[draft] == row and drafted_N[draft] == choice:
            return draft
    return -1


@njit(cache=True)
def deepest(parents_BN, num_drafts_B):
    """How many levels the deepest tree has below its root."""
    most = 0
    depth_N1 = np.zeros(parents_BN.shape[1] + 1, dtype=np.int64)
    for b in range(len(num_drafts_B)):
        for draft in range(num_drafts_B[b]):
            depth_N1[draft + 1] = depth_N1[parents_BN[b, draft]] + 1
            most = max(most, depth_N1[draft + 1])
    return most


@njit(cache=True)
def _next_child(parents_N, row, first):
    """The first draft from `first` on that continues `row`, -1 if there is none."""
    for draft in range(first, len(parents_N)):
        if parents_N[draft] == row:
            return draft
    return -1


@njit(cache=True, nogil=True)
def match_tree(rows_NV, drafted_N, parents_N, seed, num_tokens, is_greedy, token_ids_N1, rows_N):
    """Write the path of the target's own choices through one draft; how many they are."""
    row, emitted = 0, 0
    while True:
        position = num_tokens + emitted
        choice = choose_row(rows_NV[row], seed, position, 0, is_greedy, _SAMPLE)
        token_ids_N1[emitted] = choice
        emitted += 1
        child = child_of(drafted_N, parents_N, len(drafted_N), row, choice)
        if child < 0:
            return emitted
        rows_N[emitted - 1] = child
        row = child + 1


@njit(cache=True, nogil=True)
def walk_tree(
    rows_NV,
    drafted_N,
    parents_N,
    is_sampled_N,
    probs_NV,
    seed,
    num_tokens,
    rests_DV,
    token_ids_N1,
    rows_N,
):
    """Write the path of traversal verification through one draft; how many tokens it has.

    Goes down to the first leaf, and back as long as coins refuse; looks only at rows on its way.

    Args:
        rests_DV: scratch, one row more than the tree has levels: what is left of the target at
            the rows of the path.
    """
    row_D = np.zeros(len(rests_DV), dtype=np.int64)
    next_D = np.zeros(len(rests_DV), dtype=np.int64)  # the draft from which on to look for children
    weight_D = np.ones(len(rests_DV))
    factor_D = np.ones(len(rests_DV))  # times the rest as it stands: the rest times the weight
    depth = 0
    while True:
        row = row_D[depth]
        can_go_on = weight_D[depth] > 0
        child = _next_child(parents_N, row, next_D[depth]) if can_go_on else -1
        if child >= 0:
            if next_D[depth] == row:
                softmax(rows_NV[row], rests_DV[depth])
            next_D[depth] = child + 1
            token = drafted_N[child]
            q = np.float64(probs_NV[child, token]) if is_sampled_N[child] else 1.0
            weight = 0.0
            if q >= 0:  # it is NaN where the drafter is broken
                weight = min(1.0, factor_D[depth] * rests_DV[depth, token] / max(q, TINY))
            rows_N[depth] = child
            depth += 1
            row_D[depth], next_D[depth] = child + 1, child + 1
            weight_D[depth], factor_D[depth] = weight, weight
        elif depth == 0 or coin(seed, num_tokens, row - 1) < weight_D[depth]:
            break
        else:
            depth -= 1
            child = row - 1
            rest_V, factor = rests_DV[depth], np.float32(factor_D[depth])
            if is_sampled_N[child]:
                left = subtract(rest_V, probs_NV[child], factor)
            else:
                left = subtract_one(rest_V, drafted_N[child], factor)
            whole = left + (1.0 - weight_D[depth])
            factor_D[depth] = 1.0 / whole if whole > 0 else 0.0
            weight_D[depth] = left * factor_D[depth]
    for place in range(depth):
        token_ids_N1[place] = drafted_N[rows_N[place]]
    rows_N[depth:] = -1
    position, row = num_tokens + depth, row_D[depth]
    if next_D[depth] == row:
        token_ids_N1[depth] = sample_logits(rows_NV[row], seed, position, 0, _SAMPLE)
    else:
        token_ids_N1[depth] = recovered_token(rows_NV[row], rests_DV[depth], seed, position)
    return depth + 1
