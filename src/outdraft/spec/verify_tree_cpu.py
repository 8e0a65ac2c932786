# numba infers the types of these functions and specialises on them.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# ruff: noqa: ANN001, ANN201, ANN202
"""The walk down one tree, for `verify_cpu`: as `verify_tree.verify_tree` and `verify.match_draft`.

NOTE: numba's cache looks at the file of the calling kernel only: after a change here, touch the
files that import it too.

Dimension key: N drafts of the request, N1 = N + 1, V vocabulary.
"""

import numpy as np
from numba import njit

from outdraft.sampling.noise import Purpose
from outdraft.sampling.noise_cpu import sample_logits
from outdraft.sampling.row_kernels import softmax
from outdraft.sampling.sampler_cpu import choose_row
from outdraft.spec.verify_chain_cpu import coin, recovered_token, subtract

_SAMPLE = int(Purpose.SAMPLE)
_ONE = np.float32(1)


@njit(cache=True)
def child_of(drafted_N, parents_N, num_drafts, row, choice):
    """The draft after `row` that is the choice, -1 if there is none."""
    # A parent precedes its children; of siblings with the same token the first is taken.
    for draft in range(row, num_drafts):
        if parents_N[draft] == row and drafted_N[draft] == choice:
            return draft
    return -1


@njit(cache=True)
def _fixed_child(drafted_N, parents_N, is_sampled_N, row, choice):
    """`child_of` among the deterministic drafts."""
    for draft in range(row, len(drafted_N)):
        is_child = parents_N[draft] == row and not is_sampled_N[draft]
        if is_child and drafted_N[draft] == choice:
            return draft
    return -1


@njit(cache=True)
def _sampled_child(parents_N, is_sampled_N, row):
    """The draft after `row` that was sampled, -1 if there is none."""
    for draft in range(row, len(parents_N)):
        if parents_N[draft] == row and is_sampled_N[draft]:
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
    buffer_V,
    token_ids_N1,
    rows_N,
):
    """Write the path of the tree rule through one draft; how many tokens it has."""
    row, emitted = 0, 0
    while True:
        position = num_tokens + emitted
        child = _sampled_child(parents_N, is_sampled_N, row)
        if child < 0:
            token = sample_logits(rows_NV[row], seed, position, 0, _SAMPLE)
            child = _fixed_child(drafted_N, parents_N, is_sampled_N, row, token)
        else:
            token = drafted_N[child]
            softmax(rows_NV[row], buffer_V)
            if not coin(seed, num_tokens, emitted) * probs_NV[child, token] < buffer_V[token]:
                subtract(buffer_V, probs_NV[child], _ONE)
                token = recovered_token(rows_NV[row], buffer_V, seed, position)
                child = _fixed_child(drafted_N, parents_N, is_sampled_N, row, token)
        token_ids_N1[emitted] = token
        emitted += 1
        if child < 0:
            return emitted
        rows_N[emitted - 1] = child
        row = child + 1
