# numba infers the types of these functions and specialises on them.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# ruff: noqa: ANN001
"""The fast twin of `verify` for tensors on the CPU: one walk instead of many operators.

A walk looks at a row of the target only when it comes to it, and chooses nothing elsewhere.

Dimension key: R flat rows, B requests, N most drafts of any request, N1 = N + 1, V vocabulary.
"""

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from outdraft.core.jit import njit
from outdraft.sampling.batch import SamplingBatch
from outdraft.verification.draft_batch import DraftBatch
from outdraft.verification.verify import Verdict
from outdraft.verification.verify_chain_cpu import accept_tokens, last_token
from outdraft.verification.verify_tree_cpu import child_of, deepest, match_tree, walk_tree

_NO_PROBS = np.empty((0, 0, 0), dtype=np.float32)


class Rule(IntEnum):
    """How drafts with sampled rows are verified, of requests that draw; all others are matched.

    BLOCK is traversal verification, which is block verification where a tree is a chain. TOKEN is
    a rule of chains: trees are verified by BLOCK then.
    """

    MATCH = 0
    TOKEN = 1
    BLOCK = 2


_MATCH, _TOKEN = int(Rule.MATCH), int(Rule.TOKEN)


def request_R_cpu(drafts: DraftBatch, num_rows: int) -> Tensor:
    """As `draft_batch.request_R`."""
    request_R = np.empty(num_rows, dtype=np.int64)
    _fill_requests(drafts.num_drafts_B.numpy(), request_R)
    return torch.from_numpy(request_R)


def verify_cpu(
    processed_RV: Tensor,
    drafts: DraftBatch,
    sampling: SamplingBatch,
    num_tokens_B: Tensor,
    rule: Rule,
) -> Verdict:
    """The verdict on processed logits, float32 on the CPU, of a batch of any mixture.

    As matching with `sampler.choose`, `verify.rejection_sample`, `verify.block_verify` or
    `verify_tree.verify_tree`, with the noise of the same keys.
    """
    num_requests, width = drafts.num_requests, drafts.width
    token_ids_BN1 = np.empty((num_requests, width + 1), dtype=np.int64)
    rows_BN = np.empty((num_requests, width), dtype=np.int64)
    num_emitted_B = np.empty(num_requests, dtype=np.int64)
    probs_BNV = _NO_PROBS if drafts.probs_BNV is None else drafts.probs_BNV.numpy()
    _verify(
        processed_RV.contiguous().numpy(),
        np.ascontiguousarray(drafts.token_ids_BN.numpy()),
        np.ascontiguousarray(drafts.parents_BN.numpy()),
        np.ascontiguousarray(drafts.num_drafts_B.numpy()),
        np.ascontiguousarray(probs_BNV),
        np.ascontiguousarray(drafts.is_sampled_BN.numpy()),
        np.ascontiguousarray(sampling.is_greedy_B.numpy()),
        np.ascontiguousarray(sampling.draws_B.numpy()),
        np.ascontiguousarray(sampling.seeds_B.numpy()),
        np.ascontiguousarray(num_tokens_B.numpy()),
        int(rule),
        drafts.sampled_trees,
        token_ids_BN1,
        rows_BN,
        num_emitted_B,
    )
    return Verdict(
        torch.from_numpy(token_ids_BN1), torch.from_numpy(num_emitted_B), torch.from_numpy(rows_BN)
    )


def match_draft_cpu(choices_R: Tensor, drafts: DraftBatch) -> Verdict:
    """As `match_draft(choices_R[row_index_BN1(drafts)], drafts)`; all tensors int64 on the CPU."""
    num_requests, width = drafts.num_requests, drafts.width
    token_ids_BN1 = np.empty((num_requests, width + 1), dtype=np.int64)
    rows_BN = np.empty((num_requests, width), dtype=np.int64)
    num_emitted_B = np.empty(num_requests, dtype=np.int64)
    _walk(
        choices_R.numpy(),
        drafts.token_ids_BN.numpy(),
        drafts.parents_BN.numpy(),
        drafts.num_drafts_B.numpy(),
        token_ids_BN1,
        rows_BN,
        num_emitted_B,
    )
    return Verdict(
        torch.from_numpy(token_ids_BN1), torch.from_numpy(num_emitted_B), torch.from_numpy(rows_BN)
    )


@njit(cache=True)
def _walk(
    choices_R, drafted_BN, parents_BN, num_drafts_B, token_ids_BN1, rows_BN, num_emitted_B
) -> None:
    token_ids_BN1[:] = -1
    rows_BN[:] = -1
    root = 0
    for b in range(len(num_drafts_B)):
        row, emitted = 0, 0
        while True:
            choice = choices_R[root + row]
            token_ids_BN1[b, emitted] = choice
            emitted += 1
            child = child_of(drafted_BN[b], parents_BN[b], num_drafts_B[b], row, choice)
            if child < 0:
                break
            rows_BN[b, emitted - 1] = child
            row = child + 1
        num_emitted_B[b] = emitted
        root += num_drafts_B[b] + 1


@njit(cache=True)
def _fill_requests(num_drafts_B, request_R) -> None:
    start = 0
    for b in range(len(num_drafts_B)):
        end = min(start + num_drafts_B[b] + 1, len(request_R))
        request_R[start:end] = b
        start = end
    request_R[start:] = len(num_drafts_B) - 1  # the padding counts as the last request's


@njit(cache=True, nogil=True)
def _verify(
    logits_RV,
    drafted_BN,
    parents_BN,
    num_drafts_B,
    probs_BNV,
    is_sampled_BN,
    is_greedy_B,
    draws_B,
    seeds_B,
    num_tokens_B,
    rule,
    sampled_trees,
    token_ids_BN1,
    rows_BN,
    num_emitted_B,
) -> None:
    token_ids_BN1[:] = -1
    rows_BN[:] = -1
    num_levels = deepest(parents_BN, num_drafts_B)
    rests_DV = np.empty((num_levels + 1, logits_RV.shape[1]), dtype=np.float32)
    root = 0
    for b in range(len(num_drafts_B)):
        num_drafts, seed, num_tokens = num_drafts_B[b], seeds_B[b], num_tokens_B[b]
        rows_NV = logits_RV[root : root + num_drafts + 1]
        root += num_drafts + 1
        drafted_N, parents_N = drafted_BN[b, :num_drafts], parents_BN[b, :num_drafts]
        is_sampled_N = is_sampled_BN[b, :num_drafts]
        emitted_N1, rows_N = token_ids_BN1[b], rows_BN[b]
        if rule == _MATCH or not draws_B[b] or not np.any(is_sampled_N):
            num_emitted_B[b] = match_tree(
                rows_NV,
                drafted_N,
                parents_N,
                seed,
                num_tokens,
                is_greedy_B[b],
                emitted_N1,
                rows_N,
            )
            continue
        probs_NV = probs_BNV[b]
        if rule == _TOKEN and not sampled_trees:
            chain = (rows_NV, drafted_N, is_sampled_N, probs_NV)
            accepted = accept_tokens(*chain, seed, num_tokens, rests_DV[0])
            for place in range(accepted):
                emitted_N1[place] = drafted_N[place]
                rows_N[place] = place
            emitted_N1[accepted] = last_token(*chain, accepted, seed, num_tokens, rests_DV[0])
            num_emitted_B[b] = accepted + 1
            continue
        num_emitted_B[b] = walk_tree(
            rows_NV,
            drafted_N,
            parents_N,
            is_sampled_N,
            probs_NV,
            seed,
            num_tokens,
            rests_DV,
            emitted_N1,
            rows_N,
        )
