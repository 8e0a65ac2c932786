# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# ruff: noqa: ANN001, ANN201, ANN202
# numba infers the types of these functions and specialises on them.
"""What is in front of the layers of a compiled pass: how a network takes in its rows.

A language model reads tokens, EAGLE tokens and states; the slow twins are CausalLM and the entries
of eagle_layers.py.

Dimension key: T rows, D hidden, X inputs of layer 0: D, or 2 D.
"""

from typing import NamedTuple

import numpy as np
from numba import carray

from outdraft.attention.cpu_simd import pointer
from outdraft.core.jit import njit
from outdraft.models.layers.cpu_kernels import rms_norm
from outdraft.models.layers.linear_kernels import multiply_together


class Entry(NamedTuple):
    """Addresses, 0 for what a network does not have.

    With an `fc` it is EAGLE's: layer 0 reads one state made of both; else EAGLE-3's, where it
    reads them side by side.
    """

    reads_states: bool = False
    token_norm: int = 0  # a language model's: the input norm of layer 0
    state_norm: int = 0
    fc: int = 0
    fc_bias: int = 0
    input_norm: int = 0  # behind the fc
    adds_to_normed: bool = False  # the layers add to the normed state rather than to the state


@njit(inline="always")
def vector(address, size):
    """float32 [size] at an address."""
    return carray(pointer(address), (size,), np.float32)


@njit
def linear(team, weights, bias, x_TD, out_TE):
    """out = x W^T + b, with addresses of packed weights."""
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
def enter(entry, team, eps, states_TD, residual_TD):
    """[T, X] of what layer 0 reads; the residual, the embedded tokens before, is what it adds to.

    `states_TD` is read only if the network reads states, and is left as it is.
    """
    num_rows, size = residual_TD.shape
    token_TD = _normed(entry.token_norm, eps, residual_TD)
    if not entry.reads_states:
        return token_TD
    state_TD = _normed(entry.state_norm, eps, states_TD)
    pair_TX = np.empty((num_rows, 2 * size), np.float32)
    pair_TX[:, :size] = token_TD
    pair_TX[:, size:] = state_TD
    if entry.fc == 0:
        residual_TD[:] = state_TD if entry.adds_to_normed else states_TD
        return pair_TX
    linear(team, entry.fc, entry.fc_bias, pair_TX, residual_TD)
    return _normed(entry.input_norm, eps, residual_TD)


@njit
def _normed(weight, eps, x_TD):
    """A new array; without a norm a copy."""
    out_TD = np.empty_like(x_TD)
    if weight == 0:
        out_TD[:] = x_TD
    else:
        rms_norm(x_TD, vector(weight, x_TD.shape[1]), eps, out_TD)
    return out_TD
