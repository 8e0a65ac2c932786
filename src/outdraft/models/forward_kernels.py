# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# ruff: noqa: ANN001, ANN201, ANN202
# numba infers the types of these functions and specialises on them.
"""The compiled half of compiled_forward.py: a whole forward pass in one call.

At a few rows the time of a step is that of its calls. Here the layers' own kernels call each other
without Python between them. The slow twins are CausalLM and EagleNetwork, which compute the same
layer by layer.

Dimension key: T rows, R rows that need logits, B requests of one row, D hidden, H heads, G kv
heads, C head size, I intermediate, E = (H + 2 G) C, L layers, F fields of a layer, or of a pass, M
positions, K tapped layers, or passes, N the head's own vocabulary.
"""

from typing import NamedTuple

import numpy as np
from numba import carray

from outdraft.attention.cpu_kernels import Batch, attend, write_rows
from outdraft.attention.cpu_simd import pointer
from outdraft.core.jit import njit
from outdraft.models.entry_kernels import Entry, enter, linear, vector
from outdraft.models.layers.cpu_kernels import (
    add_rms_norm,
    rms_norm,
    silu_mul,
    split_norm_rotate,
    split_rotate,
)

# Fields of a layer: addresses, 0 for what it does not have, and the window.
INPUT_NORM, POST_NORM, Q_NORM, K_NORM = 0, 1, 2, 3
QKV, QKV_BIAS, O, O_BIAS, GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS = 4, 5, 6, 7, 8, 9, 10, 11  # noqa: E741
K_CACHE, V_CACHE, WINDOW = 12, 13, 14
NUM_FIELDS = 15


class Shape(NamedTuple):
    """What is the same for all layers."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    eps: float
    scale: float
    embedding: int  # address of float32 [V, D]
    cos_sin: int  # address of float32 [M, C]
    num_positions: int
    final_norm: int  # of what a pass returns; 0: none
    block_size: int
    team: int  # as for multiply_together
    entry: Entry


class Head(NamedTuple):
    """From states to logits."""

    weights: int  # address, packed
    num_outputs: int  # N
    norm: int  # address, 0: none
    draft_ids: int  # address of int64 [N], the target's ids of the outputs; 0: the same ids


class Rows(NamedTuple):
    """One call: addresses of token ids and of AttentionMetadata's tensors, then numbers."""

    token_ids: int
    positions: int
    slots: int
    query_start: int
    context_lens: int
    num_causal: int
    ancestors: int
    block_table: int
    num_rows: int
    num_requests: int
    table_stride: int


@njit(inline="always")
def _longs(address, size):
    return carray(pointer(address), (size,), np.int64)


@njit(nogil=True, cache=True)
def forward(shape, rows, layers_LF, states_TD, taps_K, tapped_KTD, out_TD):
    """out = the states of the rows; keys and values go to the caches.

    tapped[k] = the residual stream behind the first taps[k] layers. `states_TD` as for `enter`.
    """
    num_rows, hidden = rows.num_rows, shape.hidden
    heads, kv_heads, head_size = shape.num_heads, shape.num_kv_heads, shape.head_size
    residual_TD = np.empty((num_rows, hidden), np.float32)
    cos_sin_TC = np.empty((num_rows, head_size), np.float32)
    _look_up(shape, rows, residual_TD, cos_sin_TC)
    x_TX = enter(shape.entry, shape.team, shape.eps, states_TD, residual_TD)
    x_TD = np.empty((num_rows, hidden), np.float32)
    y_TD = np.empty((num_rows, hidden), np.float32)
    qkv_TE = np.empty((num_rows, (heads + 2 * kv_heads) * head_size), np.float32)
    q_THC = np.empty((num_rows, heads, head_size), np.float32)
    k_TGC = np.empty((num_rows, kv_heads, head_size), np.float32)
    v_TGC = np.empty((num_rows, kv_heads, head_size), np.float32)
    attended_THC = np.zeros((num_rows, heads, head_size), np.float32)
    gate_up_T2I = np.empty((num_rows, 2 * shape.intermediate), np.float32)
    gated_TI = np.empty((num_rows, shape.intermediate), np.float32)
    num_layers = layers_LF.shape[0]
    _tap(0, residual_TD, taps_K, tapped_KTD)
    for index in range(num_layers):
        layer = layers_LF[index]
        linear(shape.team, layer[QKV], layer[QKV_BIAS], x_TX if index == 0 else x_TD, qkv_TE)
        if layer[Q_NORM] != 0:
            q_norm, k_norm = vector(layer[Q_NORM], head_size), vector(layer[K_NORM], head_size)
            split_norm_rotate(qkv_TE, cos_sin_TC, q_norm, k_norm, shape.eps, q_THC, k_TGC, v_TGC)
        else:
            split_rotate(qkv_TE, cos_sin_TC, q_THC, k_TGC, v_TGC)
        _attend(shape, rows, layer, q_THC, k_TGC, v_TGC, attended_THC)
        attended_TD = attended_THC.reshape((num_rows, heads * head_size))
        linear(shape.team, layer[O], layer[O_BIAS], attended_TD, y_TD)
        add_rms_norm(y_TD, residual_TD, vector(layer[POST_NORM], hidden), shape.eps, x_TD)
        linear(shape.team, layer[GATE_UP], layer[GATE_UP_BIAS], x_TD, gate_up_T2I)
        silu_mul(gate_up_T2I, gated_TI)
        linear(shape.team, layer[DOWN], layer[DOWN_BIAS], gated_TI, y_TD)
        is_last = index + 1 == num_layers
        next_norm = shape.final_norm if is_last else layers_LF[index + 1, INPUT_NORM]
        if next_norm != 0:
            target_TD = out_TD if is_last else x_TD
            add_rms_norm(y_TD, residual_TD, vector(next_norm, hidden), shape.eps, target_TD)
        else:
            residual_TD += y_TD
            out_TD[:] = residual_TD
        _tap(index + 1, residual_TD, taps_K, tapped_KTD)


@njit
def _tap(num_layers, residual_TD, taps_K, tapped_KTD):
    for k in range(len(taps_K)):
        if taps_K[k] == num_layers:
            tapped_KTD[k] = residual_TD


@njit(nogil=True, cache=True)
def extend_chain(shape, rows_KF, layers_LF, head, states_BD, ids_KB):
    """ids[k] = the best tokens behind ids[k - 1], one row a request; ids[0] is given.

    rows_KF has the fields of Rows for each pass, whose token ids these are. `states_BD` are those
    behind which ids[0] were chosen; they are overwritten.
    """
    is_finite_B = np.empty(len(states_BD), np.bool_)
    for k in range(1, len(ids_KB)):
        read_chosen(shape, rows_KF[k - 1], layers_LF, ids_KB[k - 1], states_BD)
        best_tokens(shape, head, states_BD, ids_KB[k], is_finite_B)


@njit
def read_chosen(shape, fields, layers_LF, ids_B, states_BD):
    """A pass over one token of each request, whose state replaces that of the token before.

    `fields` are those of Rows, but for the token ids.
    """
    rows = Rows(
        ids_B.ctypes.data,
        fields[1],
        fields[2],
        fields[3],
        fields[4],
        fields[5],
        fields[6],
        fields[7],
        fields[8],
        fields[9],
        fields[10],
    )
    no_taps_K, nothing_KTD = np.empty(0, np.int64), np.empty((0, 0, 0), np.float32)
    # `enter` is done with the old states before the new ones are written.
    forward(shape, rows, layers_LF, states_BD, no_taps_K, nothing_KTD, states_BD)


@njit(nogil=True, cache=True)
def best_tokens(shape, head, states_RD, ids_R, is_finite_R):
    """ids = the tokens with the highest logits, as the target numbers them; whether that logit is
    finite. A NaN counts as the highest."""
    logits_RN = draft_logits(shape, head, states_RD)
    for r in range(len(ids_R)):
        best = logits_RN[r].argmax()
        is_finite_R[r] = np.isfinite(logits_RN[r, best])
        ids_R[r] = best if head.draft_ids == 0 else _longs(head.draft_ids, head.num_outputs)[best]


@njit
def draft_logits(shape, head, states_RD):
    """[R, N]."""
    logits_RN = np.empty((len(states_RD), head.num_outputs), np.float32)
    if head.norm == 0:
        linear(shape.team, head.weights, 0, states_RD, logits_RN)
        return logits_RN
    normed_RD = np.empty_like(states_RD)
    rms_norm(states_RD, vector(head.norm, shape.hidden), shape.eps, normed_RD)
    linear(shape.team, head.weights, 0, normed_RD, logits_RN)
    return logits_RN


@njit
def spread_logits(head, logits_RN, logits_RV):
    """Logits over the target's vocabulary, -inf where the head has no such token."""
    logits_RV[:] = -np.inf
    ids_N = _longs(head.draft_ids, head.num_outputs)
    for r in range(len(logits_RN)):
        for n in range(head.num_outputs):
            logits_RV[r, ids_N[n]] = logits_RN[r, n]


@njit
def _look_up(shape, rows, residual_TD, cos_sin_TC):
    token_ids_T = _longs(rows.token_ids, rows.num_rows)
    positions_T = _longs(rows.positions, rows.num_rows)
    for t in range(rows.num_rows):
        source = shape.embedding + 4 * token_ids_T[t] * shape.hidden
        residual_TD[t] = vector(source, shape.hidden)
        assert 0 <= positions_T[t] < shape.num_positions
        angles = shape.cos_sin + 4 * positions_T[t] * shape.head_size
        cos_sin_TC[t] = vector(angles, shape.head_size)


@njit
def _attend(shape, rows, layer, q_THC, k_TGC, v_TGC, out_THC):
    heads, kv_heads, head_size = shape.num_heads, shape.num_kv_heads, shape.head_size
    size = kv_heads * head_size
    for new, cached in ((k_TGC, layer[K_CACHE]), (v_TGC, layer[V_CACHE])):
        write_rows(new.ctypes.data, size, False, cached, False, rows.slots, rows.num_rows, size)
    batch = Batch(
        q_THC.ctypes.data,
        out_THC.ctypes.data,
        layer[K_CACHE],
        layer[V_CACHE],
        rows.query_start,
        rows.context_lens,
        rows.num_causal,
        rows.ancestors,
        rows.positions,
        rows.block_table,
        rows.num_requests,
        rows.num_rows,
        heads,
        kv_heads,
        head_size,
        shape.block_size,
        heads * head_size,
        rows.table_stride,
        layer[WINDOW],
        shape.scale,
        False,
        False,
    )
    attend(batch, 0, 1, 0)
