# numba infers the types of these functions and specialises on them.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportCallIssue=false
# ruff: noqa: ANN001
"""Drawn chains of a network with a compiled pass: all passes, and all draws, in one call.

The fast twin of the loop in `NetworkProposer`. That loop calls the same kernels one by one from
Python, so the results are the same.

Dimension key: K drafts, B requests, D the network's state, V vocabulary, F fields of a pass, R
rows.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outdraft.core.jit import njit
from outdraft.drafting.device.draft_sampling import draft_noise
from outdraft.models.compiled_forward import CompiledChain
from outdraft.models.forward_kernels import draft_logits, read_chosen, spread_logits
from outdraft.sampling.batch import SamplingBatch
from outdraft.sampling.processors_cpu import process_rows
from outdraft.sampling.sampler_cpu import choose_rows_with_probs


def can_draw_chain(sampling: SamplingBatch) -> bool:
    """Whether compiled code can do everything that these requests need done to their logits."""
    return sampling.allowed is None and sampling.bias is None and not sampling.all_greedy


class Parameters(NamedTuple):
    """What `process_rows` needs beside the logits; arrays as it reads them."""

    temperature_B: np.ndarray
    least_B: np.ndarray
    top_k_B: np.ndarray
    top_p_B: np.ndarray
    needs_min_p: bool


def parameters_of(sampling: SamplingBatch) -> Parameters:
    """The parameters of a batch for which `can_draw_chain` is true."""
    min_p_B = sampling.min_p_B
    return Parameters(
        np.ascontiguousarray(sampling.temperature_B.numpy()),
        np.ascontiguousarray((min_p_B.log() if sampling.needs_min_p else min_p_B).numpy()),
        np.ascontiguousarray(sampling.top_k_B.numpy()),
        np.ascontiguousarray(sampling.top_p_B.numpy()),
        sampling.needs_min_p,
    )


def draw_chain_cpu(
    chain: CompiledChain,
    states_BD: Tensor,
    positions_KB: Tensor,
    num_tokens_B: Tensor,
    sampling: SamplingBatch,
) -> tuple[Tensor, Tensor]:
    """Drafts, int64 [B, K], and float32 [B, K, V] what they were drawn from.

    As `draft_sampling.sample_drafts` behind the states, and then behind each pass of the chain.

    Args:
        positions_KB, num_tokens_B: int64, text positions of the drafts, committed tokens.
        sampling: as `drafting_parameters` leaves it; see `can_draw_chain`.
    """
    num_passes, num_requests = positions_KB.shape
    ids_KB = np.empty((num_passes, num_requests), dtype=np.int64)
    probs_KBV = np.empty((num_passes, num_requests, sampling.vocab_size), dtype=np.float32)
    purposes_B, anchors_B = draft_noise(sampling.shares_noise_B, num_tokens_B)
    _draw_chain(
        chain.shape,
        chain.rows_KF,
        chain.layers_LF,
        chain.head,
        states_BD.numpy().copy(),
        np.ascontiguousarray(positions_KB.numpy()),
        np.ascontiguousarray(anchors_B.numpy()),
        np.ascontiguousarray(sampling.seeds_B.numpy()),
        np.ascontiguousarray(sampling.is_greedy_B.numpy()),
        parameters_of(sampling),
        np.ascontiguousarray(purposes_B.numpy()),
        ids_KB,
        probs_KBV,
    )
    ids_BK = torch.from_numpy(ids_KB).T.contiguous()
    return ids_BK, torch.from_numpy(probs_KBV).transpose(0, 1).contiguous()


@njit(cache=True, nogil=True)
def _draw_chain(
    shape,
    rows_KF,
    layers_LF,
    head,
    states_BD,
    positions_KB,
    anchors_B,
    seeds_B,
    is_greedy_B,
    parameters,
    purposes_B,
    ids_KB,
    probs_KBV,
) -> None:
    num_requests, vocab_size = probs_KBV.shape[1:]
    requests_B = np.arange(num_requests)
    processed_BV = np.empty((num_requests, vocab_size), dtype=np.float32)
    for k in range(len(ids_KB)):
        if k > 0:
            read_chosen(shape, rows_KF[k - 1], layers_LF, ids_KB[k - 1], states_BD)
        process_states(shape, head, states_BD, requests_B, parameters, processed_BV)
        choose_rows_with_probs(
            processed_BV,
            seeds_B,
            positions_KB[k],
            anchors_B,
            is_greedy_B,
            purposes_B,
            ids_KB[k],
            probs_KBV[k],
        )


@njit
def process_states(shape, head, states_RD, request_R, parameters, processed_RV) -> None:
    """Write the processed logits behind the states; `request_R`: whose each of them is."""
    logits_RV = draft_logits(shape, head, states_RD)
    if head.draft_ids != 0:
        spread_RV = np.empty_like(processed_RV)
        spread_logits(head, logits_RV, spread_RV)
        logits_RV = spread_RV
    process_rows(
        logits_RV,
        request_R,
        parameters.temperature_B,
        parameters.least_B,
        parameters.top_k_B,
        parameters.top_p_B,
        parameters.needs_min_p,
        processed_RV,
    )
