"""Joins the drafts of a step: the host's and the network's.

A live rule may end a network's draft early, before rows are laid out: `as_drafted` leaves them out.

Dimension key: B requests that sample, M of them that the model drafts for, N drafts, L levels, V
vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.plan import NO_DRAFT, StepPlan, Work
from outdraft.drafting.device.asks import DraftModelAsk
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.runner.results import HostCopy
from outdraft.runner.state import RequestSlot, Slots


def spread_rows(states_RD: Tensor, rows_R: Tensor, num_rows: int) -> Tensor:
    """[T, D]: the states in their rows of the pass, rising; zeros in all others."""
    return states_RD.new_zeros((num_rows, states_RD.shape[1])).index_copy_(0, rows_R, states_RD)


def chunk_reads(works: Sequence[Work], slots: Slots) -> list[tuple[DraftModelAsk, int]]:
    """Chunks of the works that a drafter reads now; see `TargetStates.reads`."""
    reads: list[tuple[DraftModelAsk, int]] = []
    first = 0
    for work in works:
        if work.num_drafter_new:
            slot = slots[work.slot]
            text = DraftModelAsk(
                state_row=work.slot,
                num_tokens=work.start + work.num_drafter_new + 1,  # it reads ahead
                num_computed=work.start,
                num_drafts=0,
                block_ids=slot.drafter_block_ids,
                num_missing=slot.gap.num_tokens,
            )
            reads.append((text, first))
        first += work.num_rows
    return reads


def draft_ask(work: Work, slot: RequestSlot) -> DraftModelAsk:
    choice = work.drafts
    assert choice is not None
    return DraftModelAsk(
        state_row=work.slot,
        num_tokens=work.num_tokens,
        num_computed=work.num_drafter_computed,
        num_drafts=choice.num_model_drafts,
        block_ids=slot.drafter_block_ids,
        levels=choice.levels,
        stop=choice.stop,
        num_missing=slot.gap.num_tokens,
    )


def num_host_rows(works: Sequence[Work]) -> int:
    """Rows of drafts of the host."""
    return sum(len(work.drafts.draft) for work in works if work.drafts is not None)


def copy_of_drafted(works: Sequence[Work], slots: Slots, drafts: DraftBatch) -> HostCopy | None:
    """Start to copy the network's drafts to the host, if a grammar needs them: int64 [2, B, N], ids
    and parents. Its reader waits for the drafting, not for the target's pass."""
    asking = [slots[work.slot].params for work in works if work.num_model_drafts]
    if all(params.structured is None for params in asking):
        return None
    return HostCopy([torch.stack([drafts.token_ids_BN, drafts.parents_BN])], drafts.device)


def as_drafted(plan: StepPlan, drafts: DraftBatch) -> StepPlan:
    """The plan without the rows that live rules have left out; waits for the drafts if one may."""
    choices = [work.drafts for work in plan.works if work.drafts is not None]
    if not any(choice.stop is not None and choice.stop.may_end for choice in choices):
        return plan
    numbers = drafts.num_drafts_B.tolist()
    if numbers == [work.num_drafts for work in plan.works if work.samples]:
        return plan
    counts = iter(numbers)
    works = list[Work]()
    for work in plan.works:
        count = next(counts) if work.samples else 0
        if work.drafts is not None and count < work.num_drafts:
            works.append(work._replace(drafts=work.drafts.truncated(count)))
        else:
            works.append(work)
    return replace(plan, works=tuple(works))


def host_drafts(works: Sequence[Work], device: torch.device) -> DraftBatch:
    """The host's drafts of the works, on the device."""
    if not any(work.drafts and len(work.drafts.draft) for work in works):
        return DraftBatch.empty(len(works), device)
    drafts = [NO_DRAFT if work.drafts is None else work.drafts.draft for work in works]
    return DraftBatch.from_drafts(drafts, device)


def joined_drafts(
    works: Sequence[Work], asked: Sequence[int], made: DraftBatch, device: torch.device
) -> DraftBatch:
    """All drafts of a step: the network's for the requests `asked`, the host's for others."""
    if len(asked) == len(works):
        return made
    host = host_drafts(works, device)
    prob_rows = np.full(len(works), -1)
    prob_rows[asked] = np.arange(len(asked))
    rows_M, prob_rows_B, num_drafts_B = to_device(
        [np.array(asked), prob_rows, np.array([work.num_drafts for work in works])], device
    )
    width = max(work.num_drafts for work in works)

    def merged(host_BN: Tensor | None, made_MK: Tensor, padding: int = 0) -> Tensor:
        num_made = min(width, made_MK.shape[1])
        whole_BN = made_MK.new_full((len(works), width, *made_MK.shape[2:]), padding)
        if host_BN is not None:
            whole_BN[:, : host_BN.shape[1]] = host_BN
        whole_BN[rows_M, :num_made] = made_MK[:, :num_made]
        return whole_BN

    margins_BL = None
    if made.margins_BL is not None:
        num_drafts_B[rows_M] = made.num_drafts_B
        margins_BL = made.margins_BL.new_full((len(works), made.margins_BL.shape[1]), torch.nan)
        margins_BL[rows_M] = made.margins_BL
    is_sampled_BN = made.is_sampled_BN
    return DraftBatch(
        token_ids_BN=merged(host.token_ids_BN, made.token_ids_BN, -1),
        parents_BN=merged(host.parents_BN, made.parents_BN),
        num_drafts_B=num_drafts_B,
        probs_BNV=made.probs_BNV,
        prob_rows_B=prob_rows_B if made.probs_BNV is not None else None,
        is_sampled_BN=None if is_sampled_BN is None else merged(None, is_sampled_BN),
        is_chain=host.is_chain and made.is_chain,
        sampled_trees=made.sampled_trees,
        margins_BL=margins_BL,
    )
