# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# ruff: noqa: ANN001, ANN201, ANN202
# numba infers the types of these functions and specialises on them.
"""The compiled half of compiled_forward.py: a whole forward pass in one call.

At a few rows a step is as long as its calls are many; here the layers' own kernels call each other
without Python between them. It computes what CausalLM.forward does, which is its slow twin.

NOTE: numba's cache looks at this file only: after a change to a kernel that is called here, touch
this file too.

Dimension key: T rows, D hidden, H heads, G kv heads, C head size, I intermediate, E = (H + 2 G) C,
L layers, F fields of a layer, M positions, K tapped layers.
"""

from typing import NamedTuple

import numpy as np
from numba import carray, njit

from outdraft.attention.cpu_kernels import Batch, attend, write_rows
from outdraft.attention.cpu_simd import pointer
from outdraft.models.layers.cpu_kernels import (
    add_rms_norm,
    rms_norm,
    silu_mul,
    split_norm_rotate,
    split_rotate,
)
from outdraft.models.layers.linear_kernels import multiply_together

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
    final_norm: int
    block_size: int
    team: int  # as for multiply_together


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
def _vector(address, size):
    return carray(pointer(address), (size,), np.float32)


@njit(inline="always")
def _matrix(address, rows, columns):
    return carray(pointer(address), (rows, columns), np.float32)


@njit(inline="always")
def _longs(address, size):
    return carray(pointer(address), (size,), np.int64)


@njit(nogil=True, cache=True)
def forward(shape, rows, layers_LF, taps_K, tapped_KTD, out_TD):
    """out = the hidden states behind the final norm; keys and values go to the caches.

    tapped[k] = the residual stream behind the first taps[k] layers.
    """
    num_rows, hidden = rows.num_rows, shape.hidden
    heads, kv_heads, head_size = shape.num_heads, shape.num_kv_heads, shape.head_size
    residual_TD = np.empty((num_rows, hidden), np.float32)
    cos_sin_TC = np.empty((num_rows, head_size), np.float32)
    _look_up(shape, rows, residual_TD, cos_sin_TC)
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
    rms_norm(residual_TD, _vector(layers_LF[0, INPUT_NORM], hidden), shape.eps, x_TD)
    for index in range(num_layers):
        layer = layers_LF[index]
        _linear(shape.team, layer[QKV], layer[QKV_BIAS], x_TD, qkv_TE)
        if layer[Q_NORM] != 0:
            q_norm, k_norm = _vector(layer[Q_NORM], head_size), _vector(layer[K_NORM], head_size)
            split_norm_rotate(qkv_TE, cos_sin_TC, q_norm, k_norm, shape.eps, q_THC, k_TGC, v_TGC)
        else:
            split_rotate(qkv_TE, cos_sin_TC, q_THC, k_TGC, v_TGC)
        _attend(shape, rows, layer, q_THC, k_TGC, v_TGC, attended_THC)
        attended_TD = attended_THC.reshape((num_rows, heads * head_size))
        _linear(shape.team, layer[O], layer[O_BIAS], attended_TD, y_TD)
        add_rms_norm(y_TD, residual_TD, _vector(layer[POST_NORM], hidden), shape.eps, x_TD)
        _linear(shape.team, layer[GATE_UP], layer[GATE_UP_BIAS], x_TD, gate_up_T2I)
        silu_mul(gate_up_T2I, gated_TI)
        _linear(shape.team, layer[DOWN], layer[DOWN_BIAS], gated_TI, y_TD)
        is_last = index + 1 == num_layers
        next_norm = shape.final_norm if is_last else layers_LF[index + 1, INPUT_NORM]
        target_TD = out_TD if is_last else x_TD
        add_rms_norm(y_TD, residual_TD, _vector(next_norm, hidden), shape.eps, target_TD)
        _tap(index + 1, residual_TD, taps_K, tapped_KTD)


@njit
def _tap(num_layers, residual_TD, taps_K, tapped_KTD):
    for k in range(len(taps_K)):
        if taps_K[k] == num_layers:
            tapped_KTD[k] = residual_TD


@njit(nogil=True, cache=True)
def extend_chain(shape, rows_KF, layers_LF, head, vocab_size, ids_KB):
    """ids[k] = the best tokens behind ids[k - 1], one row a request; ids[0] is given.

    rows_KF has the fields of Rows for each pass; `head` is the address of the packed head.
    """
    num_rows = ids_KB.shape[1]
    hidden_BD = np.empty((num_rows, shape.hidden), np.float32)
    no_taps_K, nothing_KTD = np.empty(0, np.int64), np.empty((0, 0, 0), np.float32)
    for k in range(1, ids_KB.shape[0]):
        fields = rows_KF[k - 1]
        rows = Rows(
            ids_KB[k - 1].ctypes.data,
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
        forward(shape, rows, layers_LF, no_taps_K, nothing_KTD, hidden_BD)
        best_tokens(shape.team, head, vocab_size, hidden_BD, ids_KB[k])


@njit(nogil=True, cache=True)
def best_tokens(team, head, vocab_size, hidden_RD, ids_R):
    """ids = the tokens with the highest logits; `head` is the address of the packed head."""
    logits_RV = np.empty((len(ids_R), vocab_size), np.float32)
    _linear(team, head, 0, hidden_RD, logits_RV)
    for r in range(len(ids_R)):
        ids_R[r] = logits_RV[r].argmax()


@njit
def _look_up(shape, rows, residual_TD, cos_sin_TC):
    token_ids_T = _longs(rows.token_ids, rows.num_rows)
    positions_T = _longs(rows.positions, rows.num_rows)
    for t in range(rows.num_rows):
        source = shape.embedding + 4 * token_ids_T[t] * shape.hidden
        residual_TD[t] = _vector(source, shape.hidden)
        assert 0 <= positions_T[t] < shape.num_positions
        angles = shape.cos_sin + 4 * positions_T[t] * shape.head_size
        cos_sin_TC[t] = _vector(angles, shape.head_size)


@njit
def _linear(team, weights, bias, x_TD, out_TE):
    num_rows, num_inputs = x_TD.shape
    multiply_together(
        team,
        weights,
        bias,
        x_TD.ctypes.data,
        num_inputs,
        out_TE.ctypes.data,
        num_rows,
        num_inputs,
        out_TE.shape[1],
        False,
    )


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
    attend(batch, 0, 1)
