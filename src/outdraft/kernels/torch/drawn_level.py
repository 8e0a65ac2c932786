"""One level of trees with drawn tokens; whole trees by such levels.

Dimension key: B requests, E nodes of the level above (1: the root), F new rows, C ranks of a
node's children (in the order in which they are drawn), V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.data.noise import Gumbel, NoiseKeys, Purpose
from outdraft.kernels.draft_ops import (
    DECAY,
    OWN_BASE,
    OWN_SLOPE,
    PARENT_SHIFT,
    RANK0_BASE,
    RANK0_SLOPE,
    SIDE_WEIGHT,
    DrawnLevel,
    Growth,
    LevelTask,
    TreeLevels,
    best_places,
    side_shares,
)
from outdraft.kernels.torch.noise import gumbel

LOW = -(2.0**100)  # below all sums of logits and noise; times any id it is finite in float32


def grow(
    levels: TreeLevels, growth: Growth, by_levels: Callable[[TreeLevels, Growth], DraftBatch]
) -> DraftBatch:
    """Grow drafts from a drafter's logits, level by level; new drafts.

    Args:
        levels: of one rank; their logits are float32 or float64.
        by_levels: gives the same drafts by the other operations.

    Raises:
        ValueError: the vocabulary cannot fill a level.
    """
    return by_levels(levels, growth)


def draw_level(
    logits_BEV: Tensor, weight_BE: Tensor, task: LevelTask, gumbel: Gumbel = gumbel
) -> DrawnLevel:
    """Draw the rows of one level of growing trees, without replacement after each node.

    The rows go where the most accepted tokens are expected, before anything is drawn. New tensors.

    Args:
        logits_BEV: processed, float32 or float64, after the nodes of the level above.
        weight_BE: as in DrawnLevel, of the nodes.
        gumbel: another implementation makes the same bits faster.

    Raises:
        ValueError: the vocabulary cannot fill the level.
    """
    num_ranks = min(task.num_rows, logits_BEV.shape[2])
    gain_BEC = _gains(logits_BEV, weight_BE, num_ranks)
    places_BF = best_places(gain_BEC.flatten(1), task.num_rows)
    origins_BF, ranks_BF = places_BF // num_ranks, places_BF % num_ranks
    drawn_BEC = _draw(logits_BEV, num_ranks, task, gumbel)
    token_ids_BF = drawn_BEC.flatten(1).gather(1, places_BF)
    left_BFV = _without_lower_ranks(logits_BEV, drawn_BEC, origins_BF, ranks_BF)
    probs_BFV = torch.softmax(left_BFV, dim=2, dtype=torch.float32)
    at_token_BF1 = token_ids_BF[:, :, None]
    has_mass_BF = left_BFV.gather(2, at_token_BF1)[:, :, 0] > -torch.inf
    rows_F = torch.arange(task.num_rows, device=logits_BEV.device)
    is_drawn_BF = has_mass_BF & (rows_F < task.num_kept_B[:, None])
    own_BF = probs_BFV.gather(2, at_token_BF1)[:, :, 0]
    first_BF = weight_BE.gather(1, origins_BF) * (OWN_BASE + OWN_SLOPE * own_BF.sqrt()) ** DECAY
    side_BF = SIDE_WEIGHT * gain_BEC.flatten(1).gather(1, places_BF)
    weight_BF = torch.where(ranks_BF == 0, first_BF, side_BF) * is_drawn_BF
    return DrawnLevel(token_ids_BF, origins_BF, is_drawn_BF, probs_BFV, weight_BF)


def _gains(logits_BEV: Tensor, weight_BE: Tensor, num_ranks: int) -> Tensor:
    """float32 [B, E, C]: how many more accepted rows each rank is expected to bring. A higher rank
    brings less, so the best rows of a node are its first ranks."""
    best_BE = (logits_BEV.amax(2) - logits_BEV.logsumexp(2)).exp().float()
    first_BE = RANK0_BASE + RANK0_SLOPE * best_BE
    side_BE = weight_BE * (1 - first_BE)
    sides = [side_BE * share for share in side_shares(num_ranks)]
    gain_BEC = torch.stack([weight_BE * first_BE**DECAY, *sides], dim=2)
    num_with_mass_BE = (logits_BEV > -torch.inf).sum(2)
    ranks_C = torch.arange(num_ranks, device=logits_BEV.device)
    return gain_BEC * (ranks_C < num_with_mass_BE[:, :, None])


def _draw(logits_BEV: Tensor, num_ranks: int, task: LevelTask, gumbel: Gumbel) -> Tensor:
    """int64 [B, E, C]: for every node the tokens of the largest logits + noise, the largest first.
    That draws without replacement. Tokens without mass come last, the lowest id first."""
    num_nodes, size = logits_BEV.shape[1:]
    rows_E = torch.arange(num_nodes, device=logits_BEV.device) + task.first_above
    anchors_BE = task.num_tokens_B[:, None] + (rows_E << PARENT_SHIFT)
    keys = NoiseKeys.of(
        task.seeds_B.repeat_interleave(num_nodes),
        task.positions_B.repeat_interleave(num_nodes),
        Purpose.DRAFT,
        anchors_BE.flatten(),
    )
    noise_RV = gumbel(keys, size)
    low_V = LOW * torch.arange(1, size + 1, device=logits_BEV.device)
    keys_BEV = torch.where(
        logits_BEV > -torch.inf, logits_BEV + noise_RV.view_as(logits_BEV), low_V
    )
    return keys_BEV.topk(num_ranks, dim=2).indices


def _without_lower_ranks(
    logits_BEV: Tensor, drawn_BEC: Tensor, origins_BF: Tensor, ranks_BF: Tensor
) -> Tensor:
    """[B, F, V]: the logits that each row was drawn from: its node's, without the tokens of lower
    ranks. Where these have left nothing, they are all of the node's."""
    origins_BF1 = origins_BF[:, :, None]
    logits_BFV = logits_BEV.gather(1, origins_BF1.expand(-1, -1, logits_BEV.shape[2]))
    drawn_BFC = drawn_BEC.gather(1, origins_BF1.expand(-1, -1, drawn_BEC.shape[2]))
    drawn_logits_BFC = logits_BFV.gather(2, drawn_BFC)
    has_mass_BF1 = drawn_logits_BFC.gather(2, ranks_BF[:, :, None]) > -torch.inf
    ranks_C = torch.arange(drawn_BEC.shape[2], device=logits_BEV.device)
    is_out_BFC = (ranks_C < ranks_BF[:, :, None]) & has_mass_BF1
    return logits_BFV.scatter_(2, drawn_BFC, drawn_logits_BFC.masked_fill(is_out_BFC, -torch.inf))
