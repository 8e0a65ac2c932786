# numba infers the types of these functions and specialises on them.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# ruff: noqa: ANN001, ANN201
"""The fast twin of `sampler` for the CPU: one call for all rows, none of which sees another.

Dimension key: R rows, V vocabulary.
"""

from outdraft.core.jit import njit
from outdraft.sampling.noise_cpu import sample_logits
from outdraft.sampling.row_kernels import argmax, softmax


@njit(cache=True, nogil=True)
def choose_row(logits_V, seed, position, anchor, is_greedy, purpose):
    """What `choose_rows` chooses in one row."""
    if is_greedy:
        return argmax(logits_V)
    return sample_logits(logits_V, seed, position, anchor, purpose)


@njit(cache=True, nogil=True)
def choose_rows(logits_RV, seeds_R, positions_R, anchors_R, is_greedy_R, purposes_R, ids_R) -> None:
    """Write the argmax of greedy rows, a sample of the others; float32, int64 and bool."""
    for row in range(logits_RV.shape[0]):
        ids_R[row] = choose_row(
            logits_RV[row],
            seeds_R[row],
            positions_R[row],
            anchors_R[row],
            is_greedy_R[row],
            purposes_R[row],
        )


@njit(cache=True, nogil=True)
def choose_rows_with_probs(
    logits_RV, seeds_R, positions_R, anchors_R, is_greedy_R, purposes_R, ids_R, probs_RV
) -> None:
    """`choose_rows`, and the softmax of every row."""
    choose_rows(logits_RV, seeds_R, positions_R, anchors_R, is_greedy_R, purposes_R, ids_R)
    for row in range(logits_RV.shape[0]):
        softmax(logits_RV[row], probs_RV[row])
