"""Puts the drafts of a step together: from the host, and from the draft model.

Dimension key: B requests that sample, M of them that the model drafts for, N drafts, V vocabulary.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from outdraft.attention.rows import to_device
from outdraft.core.draft import MAX_DRAFTS, Draft
from outdraft.core.plan import NO_DRAFT, Work
from outdraft.runner.device_state import state_row
from outdraft.spec.draft_batch import DraftBatch
from outdraft.spec.draft_model import DraftModelAsk, ModelDrafts


def host_drafts(works: Sequence[Work], device: torch.device) -> DraftBatch:
    """All drafts of a step; a chain of zeros holds the place of what the model will draft."""
    if all(work.drafts is None for work in works):
        return DraftBatch.empty(len(works), device)
    return DraftBatch.from_drafts([_draft_or_place(work) for work in works], device)


def draft_ask(work: Work) -> DraftModelAsk:
    assert work.drafts is not None
    return DraftModelAsk(
        state_row=state_row(work.request),
        num_tokens=work.request.num_tokens,
        num_computed=work.request.num_drafter_computed,
        num_drafts=work.drafts.num_model_drafts,
        block_ids=work.block_ids,
    )


def with_model_drafts(drafts: DraftBatch, asked: Sequence[int], made: ModelDrafts) -> DraftBatch:
    """`drafts` with the model's in the rows `asked`."""
    if len(asked) == drafts.num_requests:
        return _model_drafts(drafts, made)
    (rows_M,) = to_device([np.array(asked)], drafts.device)
    width = made.token_ids_BK.shape[1]
    token_ids_BN = drafts.token_ids_BN.clone()
    token_ids_BN[:, :width] = token_ids_BN[:, :width].index_copy(0, rows_M, made.token_ids_BK)
    if made.probs_BKV is None:
        return replace(drafts, token_ids_BN=token_ids_BN)
    assert made.is_sampled_B is not None, "probabilities without a mark of who was sampled"
    shape = (drafts.num_requests, drafts.width, made.probs_BKV.shape[-1])
    probs_BNV = made.probs_BKV.new_zeros(shape)
    probs_BNV[:, :width] = probs_BNV[:, :width].index_copy(0, rows_M, made.probs_BKV)
    return replace(
        drafts,
        token_ids_BN=token_ids_BN,
        probs_BNV=probs_BNV,
        is_sampled_B=drafts.is_sampled_B.index_copy(0, rows_M, made.is_sampled_B),
        any_sampled=True,
    )


def _model_drafts(drafts: DraftBatch, made: ModelDrafts) -> DraftBatch:
    """`drafts` where all of them are the model's."""
    if made.probs_BKV is None:
        return replace(drafts, token_ids_BN=made.token_ids_BK)
    assert made.is_sampled_B is not None, "probabilities without a mark of who was sampled"
    return replace(
        drafts,
        token_ids_BN=made.token_ids_BK,
        probs_BNV=made.probs_BKV,
        is_sampled_B=made.is_sampled_B,
        any_sampled=True,
        all_sampled=made.all_sampled,
    )


def _draft_or_place(work: Work) -> Draft:
    if work.drafts is None:
        return NO_DRAFT
    if work.drafts.num_model_drafts:
        return _place(work.drafts.num_model_drafts)
    return work.drafts.draft


@functools.lru_cache(maxsize=MAX_DRAFTS)
def _place(num_drafts: int) -> Draft:
    return Draft.chain([0] * num_drafts)
