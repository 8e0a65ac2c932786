# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201
# Triton infers the types of kernels and specialises on them. A launch takes more than their
# parameters.
"""A level of chains: its tokens are drawn in one launch. The readable operation draws levels of
more than one row.

Dimension key: B requests, E nodes of the level above, Q splits of a vocabulary, V vocabulary, W
blocks of four neighbouring ids, or ids of a split.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from outdraft.kernels.data.noise import Purpose
from outdraft.kernels.draft_ops import (
    DECAY,
    OWN_BASE,
    OWN_SLOPE,
    PARENT_SHIFT,
    DrawnLevel,
    LevelTask,
)
from outdraft.kernels.torch import drawn_level
from outdraft.kernels.triton.noise import MASK, gumbel, gumbel_of_word, philox

_TILE = 256  # blocks of four ids
_LOW = tl.constexpr(drawn_level.LOW)
NO_ID = tl.constexpr(1 << 62)  # after all others


def draw_level(logits_BEV: Tensor, weight_BE: Tensor, task: LevelTask) -> DrawnLevel:
    num_requests, num_nodes, size = logits_BEV.shape
    is_chain = num_nodes == task.num_rows == 1
    if not is_chain or logits_BEV.dtype != torch.float32 or num_requests == 0:
        return drawn_level.draw_level(logits_BEV, weight_BE, task, gumbel)
    logits_BV = logits_BEV[:, 0].contiguous()
    num_splits, device = triton.cdiv(size, 4 * _TILE), logits_BV.device
    values_BQ = torch.empty(num_requests, num_splits, device=device)
    ids_BQ = torch.empty_like(values_BQ, dtype=torch.int64)
    draw_parts[(num_requests, num_splits)](
        logits_BV,
        task.seeds_B.contiguous(),
        task.positions_B.contiguous(),
        task.num_tokens_B.contiguous(),
        values_BQ,
        ids_BQ,
        size,
        task.first_above << PARENT_SHIFT,
        int(Purpose.DRAFT),
        TILE=_TILE,
        enable_fp_fusion=False,
    )
    token_ids_B1 = ids_BQ.gather(1, values_BQ.argmax(1, keepdim=True))
    probs_BV = logits_BV.softmax(1)
    own_B1 = probs_BV.gather(1, token_ids_B1)
    has_mass_B1 = logits_BV.gather(1, token_ids_B1) > -torch.inf
    is_drawn_B1 = has_mass_B1 & (task.num_kept_B[:, None] > 0)
    return DrawnLevel(
        token_ids_BF=token_ids_B1,
        origins_BF=torch.zeros_like(token_ids_B1),
        is_drawn_BF=is_drawn_B1,
        probs_BFV=probs_BV[:, None],
        weight_BF=weight_BE * (OWN_BASE + OWN_SLOPE * own_B1.sqrt()) ** DECAY * is_drawn_B1,
    )


@triton.jit
def best(value_W, token_W):
    """The largest value, and the lowest id that has it."""
    largest = tl.max(value_W)
    return largest, tl.min(tl.where(value_W == largest, token_W, NO_ID))


@triton.jit
def better(value, token, other_value, other_token):
    """The larger value; of equal ones that of the lower id."""
    takes = (other_value > value) | ((other_value == value) & (other_token < token))
    return tl.where(takes, other_value, value), tl.where(takes, other_token, token)


@triton.jit(
    do_not_specialize=["size", "first_anchor", "purpose"],
    do_not_specialize_on_alignment=["seeds", "positions", "num_tokens"],
)
def draw_parts(
    logits,  # float32 [B, size]
    seeds,
    positions,
    num_tokens,
    best_values,  # float32 [B, Q]
    best_ids,  # int64
    size,
    first_anchor,
    purpose,
    TILE: tl.constexpr,  # blocks of a split
):
    """The largest sum of logit and noise of each split. Grid: [B, Q].

    A token without mass has something lower for a sum, the more so the higher its id.
    """
    request, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block_W = (split * TILE + tl.arange(0, TILE)).to(tl.int64)
    position, length = tl.load(positions + request), tl.load(num_tokens + request)
    anchor = (length + first_anchor) & MASK
    words = philox(block_W, position & MASK, anchor, purpose, tl.load(seeds + request))
    least = float("-inf")
    value, token = least, tl.full((), NO_ID, tl.int64)
    for part in tl.static_range(4):
        id_W = block_W * 4 + part
        logit_W = tl.load(logits + request * size + id_W, mask=id_W < size, other=least)
        low_W = (id_W + 1).to(tl.float32) * _LOW
        key_W = tl.where(logit_W > least, logit_W + gumbel_of_word(words[part]), low_W)
        own_value, own_token = best(tl.where(id_W < size, key_W, least), id_W)
        value, token = better(value, token, own_value, own_token)
    place = request * tl.num_programs(1) + split
    tl.store(best_values + place, value)
    tl.store(best_ids + place, token)
