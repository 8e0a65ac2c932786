"""Joins the drafts of a step: those of the host, and those of the network.

Dimension key: B requests that sample, M of them that the model drafts for, N drafts, V vocabulary.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.draft import MAX_DRAFTS, Draft
from outdraft.core.plan import NO_DRAFT, DraftChoice, Work
from outdraft.drafting.device.model_drafts import DraftModelAsk, ModelDrafts
from outdraft.runner.step_rows import state_row
from outdraft.verification.draft_batch import DraftBatch


def host_drafts(works: Sequence[Work], device: torch.device) -> DraftBatch:
    """All drafts of a step; a chain of zeros stands where the network will draft."""
    if all(work.drafts is None for work in works):
        return DraftBatch.empty(len(works), device)
    return DraftBatch.from_drafts([_draft_or_place(work) for work in works], device)


def draft_ask(work: Work) -> DraftModelAsk:
    choice = _choice(work)
    return DraftModelAsk(
        state_row=state_row(work.request),
        num_tokens=work.request.num_tokens,
        num_computed=work.request.num_drafter_computed,
        num_drafts=choice.num_model_drafts,
        block_ids=work.block_ids,
        continued=choice.draft.token_ids,
    )


def with_model_drafts(
    drafts: DraftBatch, works: Sequence[Work], asked: Sequence[int], made: ModelDrafts
) -> DraftBatch:
    """`drafts` with the network's in the rows `asked`, behind what the host drafted there."""
    starts = [len(_choice(works[row]).draft) for row in asked]
    if len(asked) == drafts.num_requests and not any(starts):
        return _model_drafts(drafts, made)
    rows_M, starts_M = to_device([np.array(asked), np.array(starts)], drafts.device)
    merged = replace(
        drafts, token_ids_BN=_merged(drafts.token_ids_BN, rows_M, starts_M, made.token_ids_BK)
    )
    if made.parents_BK is not None:
        parents_BN = _merged(drafts.parents_BN, rows_M, starts_M, made.parents_BK)
        merged = replace(merged, parents_BN=parents_BN, is_chain=False, sampled_trees=True)
    if made.probs_BKV is None:
        return merged
    assert made.is_sampled_BK is not None, "probabilities without a mark of who was sampled"
    nothing_BNV = made.probs_BKV.new_zeros(
        (drafts.num_requests, drafts.width, made.probs_BKV.shape[-1])
    )
    return replace(
        merged,
        probs_BNV=_merged(nothing_BNV, rows_M, starts_M, made.probs_BKV),
        is_sampled_BN=_merged(drafts.is_sampled_BN, rows_M, starts_M, made.is_sampled_BK),
        any_sampled=True,
    )


def _model_drafts(drafts: DraftBatch, made: ModelDrafts) -> DraftBatch:
    """`drafts` where all of them are the model's."""
    merged = replace(drafts, token_ids_BN=made.token_ids_BK)
    if made.parents_BK is not None:
        merged = replace(merged, parents_BN=made.parents_BK, is_chain=False, sampled_trees=True)
    if made.probs_BKV is None:
        return merged
    assert made.is_sampled_BK is not None, "probabilities without a mark of who was sampled"
    return replace(
        merged,
        probs_BNV=made.probs_BKV,
        is_sampled_BN=made.is_sampled_BK,
        any_sampled=True,
        all_sampled=made.all_sampled,
    )


def _merged(whole_BN: Tensor, rows_M: Tensor, starts_M: Tensor, made_MK: Tensor) -> Tensor:
    """A copy of `whole_BN` with `made_MK` in the rows `rows_M`, from the columns `starts_M` on."""
    width, num_made = whole_BN.shape[1], made_MK.shape[1]
    # Some requests wanted fewer drafts. Their surplus may stand past the end and is cut off.
    room = whole_BN.new_zeros((whole_BN.shape[0], num_made, *whole_BN.shape[2:]))
    result_BN = torch.cat([whole_BN, room], dim=1)
    columns_MK = starts_M[:, None] + torch.arange(num_made, device=whole_BN.device)
    result_BN[rows_M[:, None], columns_MK] = made_MK
    return result_BN[:, :width]


def _choice(work: Work) -> DraftChoice:
    assert work.drafts is not None
    return work.drafts


def _draft_or_place(work: Work) -> Draft:
    if work.drafts is None:
        return NO_DRAFT
    number = work.drafts.num_model_drafts
    if number == 0:
        return work.drafts.draft
    if len(work.drafts.draft) == 0:
        return _place(number)
    return Draft.chain([*work.drafts.draft.token_ids, *[0] * number])


@functools.lru_cache(maxsize=MAX_DRAFTS)
def _place(num_drafts: int) -> Draft:
    return Draft.chain([0] * num_drafts)
