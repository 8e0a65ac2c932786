# pyright: reportCallIssue=false, reportArgumentType=false
# A launch takes more than the parameters of the kernel.
"""Levels of drafts, matched chains and new tokens of texts on a GPU, by the kernels of
draft_kernels.py: one launch or two where the readable operations are dozens. Trees that are no
chains go to these.

Dimension key: B requests, E nodes of the level above, F rows of a level, N most drafts or new
tokens of a request, Q splits of a vocabulary, R flat rows, V vocabulary, S texts, L tokens.
"""

import torch
import triton
from torch import Tensor

from outdraft.kernels.data.drafts import DraftBatch, Verdict
from outdraft.kernels.data.noise import Purpose
from outdraft.kernels.draft_ops import (
    DECAY,
    OWN_BASE,
    OWN_SLOPE,
    PARENT_SHIFT,
    DraftStart,
    DrawnLevel,
    LevelTask,
)
from outdraft.kernels.torch import drawn_level, verification
from outdraft.kernels.triton import draft_kernels as kernels
from outdraft.kernels.triton.noise import GUMBEL, gumbel

_TILE = 256  # blocks of four ids


def place_level(
    ancestors_BF: Tensor, first_row: int, num_drafts_B: Tensor, start: DraftStart
) -> tuple[Tensor, Tensor, Tensor]:
    num_requests, num_rows = ancestors_BF.shape
    own, positions, slots = (
        torch.empty(num_requests * num_rows, dtype=torch.int64, device=ancestors_BF.device)
        for _ in range(3)
    )
    if len(own):
        kernels.place_rows_of_level[(num_requests,)](
            ancestors_BF.contiguous(),
            num_drafts_B.contiguous(),
            start.contexts_B.contiguous(),
            start.block_table_BP,
            own,
            positions,
            slots,
            first_row,
            start.block_table_BP.stride(0),
            NUM_ROWS=num_rows,
            BLOCK_SIZE=start.block_size,
            WIDTH=triton.next_power_of_2(num_rows),
        )
    return own, positions, slots


def draw_level(logits_BEV: Tensor, weight_BE: Tensor, task: LevelTask) -> DrawnLevel:
    num_requests, num_nodes, size = logits_BEV.shape
    is_chain = num_nodes == task.num_rows == 1
    if not is_chain or logits_BEV.dtype != torch.float32 or num_requests == 0:
        return drawn_level.draw_level(logits_BEV, weight_BE, task, gumbel)
    logits_BV = logits_BEV[:, 0].contiguous()
    num_splits, device = triton.cdiv(size, 4 * _TILE), logits_BV.device
    values, tops, totals = (torch.empty(num_requests, num_splits, device=device) for _ in range(3))
    ids = torch.empty(num_requests, num_splits, dtype=torch.int64, device=device)
    kernels.draw_parts[(num_requests, num_splits)](
        logits_BV,
        task.seeds_B.contiguous(),
        task.positions_B.contiguous(),
        task.num_tokens_B.contiguous(),
        values,
        ids,
        tops,
        totals,
        size,
        task.first_above << PARENT_SHIFT,
        int(Purpose.DRAFT),
        TILE=_TILE,
        LOW=drawn_level.LOW,
        **GUMBEL,
    )
    level = DrawnLevel(
        token_ids_BF=torch.empty(num_requests, 1, dtype=torch.int64, device=device),
        origins_BF=torch.zeros(num_requests, 1, dtype=torch.int64, device=device),
        is_drawn_BF=torch.empty(num_requests, 1, dtype=torch.bool, device=device),
        probs_BFV=torch.empty(num_requests, 1, size, device=device),
        weight_BF=torch.empty(num_requests, 1, device=device),
    )
    kernels.draw_whole[(num_requests, num_splits)](
        logits_BV,
        weight_BE.contiguous(),
        task.num_kept_B.contiguous(),
        values,
        ids,
        tops,
        totals,
        level.probs_BFV,
        level.token_ids_BF,
        level.is_drawn_BF,
        level.weight_BF,
        size,
        NUM_SPLITS=num_splits,
        SPLITS=triton.next_power_of_2(num_splits),
        TILE=4 * _TILE,
        BASE=OWN_BASE,
        SLOPE=OWN_SLOPE,
        DECAY=DECAY,
    )
    return level


def match(choices_R: Tensor, drafts: DraftBatch) -> Verdict:
    number, width = drafts.num_requests, drafts.width
    if not drafts.is_chain or number == 0:
        return verification.match(choices_R, drafts)
    verdict = Verdict(
        choices_R.new_empty(number, width + 1),
        choices_R.new_empty(number),
        choices_R.new_empty(number, width),
    )
    kernels.match_chains[(number,)](
        choices_R.contiguous(),
        drafts.token_ids_BN.contiguous(),
        drafts.num_drafts_B.contiguous(),
        verdict.token_ids_BN1,
        verdict.num_emitted_B,
        verdict.rows_BN,
        width,
        WIDTH=triton.next_power_of_2(width + 1),
    )
    return verdict


def append_token_ids(
    texts_SL: Tensor, state_rows_B: Tensor, starts_B: Tensor, token_ids_BN: Tensor
) -> None:
    num_requests, width = token_ids_BN.shape
    if num_requests == 0 or width == 0:
        return
    kernels.append_ids[(num_requests,)](
        texts_SL,
        state_rows_B.contiguous(),
        starts_B.contiguous(),
        token_ids_BN.contiguous(),
        texts_SL.shape[1],
        width,
        WIDTH=triton.next_power_of_2(width),
    )
