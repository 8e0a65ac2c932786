"""One level of trees with drawn tokens, for any device; `drawn_level_cpu` is its fast twin.

Dimension key: B requests, E nodes of the level above (1: the root), F new rows, C ranks of a
node's children (0: the drawn one), V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from outdraft.sampling.batch import SamplingBatch
from outdraft.sampling.noise import Purpose
from outdraft.sampling.sampler import sample_with_probs
from outdraft.spec.tree_level import (
    Children,
    NewRows,
    at_places,
    best_places,
    likeliest_children,
)

PARENT_SHIFT = 24  # an anchor of noise is committed tokens + (row of the parent << PARENT_SHIFT)

# What the drafter's own probabilities say about acceptance, fitted on the embedded pair. They only
# decide which nodes get the rows, so a bad fit costs speed.
DRAWN_BASE, DRAWN_SLOPE = 0.47, 0.45  # acceptance of one draw, by the drafter's best probability
RANKED_GAIN = 0.75  # of a likely token beside the draw: of what the draw would then not cover
OWN_BASE, OWN_SLOPE = 0.42, 0.53  # acceptance of a drawn token, by the root of its probability
NO_MASS = 1e-5  # less than this is what rounding leaves


@dataclass(frozen=True, slots=True)
class LevelTask:
    """Which rows are wanted.

    Attributes:
        num_rows: F.
        template_2F: int64; origins and ranks of the rows; None: where the most is expected.
        num_kept_B: int64; how many of them each request wants, anything below 0 for none; None:
            all do.
        depth: of the nodes above; 0: the root.
        first_above: row of the first of them; they follow each other.
        num_tokens_B: int64, committed tokens.
        sampling: the requests' parameters. Rows of greedy ones hold anything.
    """

    num_rows: int
    template_2F: Tensor | None
    num_kept_B: Tensor | None
    depth: int
    first_above: int
    num_tokens_B: Tensor
    sampling: SamplingBatch


@dataclass(frozen=True, slots=True)
class DrawnLevel:
    """The rows of a level. Those that a request does not want hold anything but their origins.

    Attributes:
        is_drawn_BF: bool.
        probs_BFV: float32, what the drawn rows were drawn from; the others' hold anything.
        weight_BF: float32, how likely each row is to be accepted; 0 where it is not wanted.
    """

    rows: NewRows
    is_drawn_BF: Tensor
    probs_BFV: Tensor
    weight_BF: Tensor


def draw_level(logits_BEV: Tensor, weight_BE: Tensor, task: LevelTask) -> DrawnLevel:
    """The rows behind the nodes whose logits these are; `weight_BE` as in DrawnLevel."""
    children = likeliest_children(logits_BEV, task.num_rows)
    if task.template_2F is None:
        origins_BF, ranks_BF = _spread(children, weight_BE, task.num_rows)
    else:
        origins_BF, ranks_BF = task.template_2F[:, None].expand(-1, len(logits_BEV), -1)
    is_kept_BF = _is_kept(ranks_BF, task.num_kept_B)
    num_ranked_BE = torch.zeros_like(weight_BE, dtype=torch.int64).scatter_add_(
        1, origins_BF, ((ranks_BF > 0) & is_kept_BF).long()
    )
    drawn_BE, probs_BEV, has_mass_BE = _draw(logits_BEV, children, num_ranked_BE, task)
    is_first_BF = ranks_BF == 0
    places_BF = (ranks_BF - 1).clamp_(min=0)
    token_ids_BF = torch.where(
        is_first_BF,
        drawn_BE.gather(1, origins_BF),
        at_places(children.token_ids_BEC, origins_BF, places_BF),
    )
    probs_BFV = probs_BEV.gather(1, origins_BF[:, :, None].expand(-1, -1, probs_BEV.shape[2]))
    own_BF = probs_BFV.gather(2, token_ids_BF[:, :, None])[:, :, 0]
    left_BE = 1 - _mass_of_first(children.probs_BEC, num_ranked_BE)
    share_BF = torch.where(
        is_first_BF,
        left_BE.gather(1, origins_BF) * (OWN_BASE + OWN_SLOPE * own_BF.sqrt()),
        at_places(children.probs_BEC, origins_BF, places_BF),
    )
    return DrawnLevel(
        NewRows(token_ids_BF, origins_BF),
        is_first_BF & has_mass_BE.gather(1, origins_BF) & is_kept_BF,
        probs_BFV,
        weight_BE.gather(1, origins_BF) * share_BF * is_kept_BF,
    )


def _is_kept(ranks_BF: Tensor, num_kept_B: Tensor | None) -> Tensor:
    if num_kept_B is None:
        return torch.ones_like(ranks_BF, dtype=torch.bool)
    return torch.arange(ranks_BF.shape[1], device=ranks_BF.device) < num_kept_B[:, None]


def _draw(
    logits_BEV: Tensor, children: Children, num_ranked_BE: Tensor, task: LevelTask
) -> tuple[Tensor, Tensor, Tensor]:
    """Of every node the drawn child [B, E], what it comes from [B, E, V], and whether there was
    anything to draw [B, E]; if not, the child is the first of the tokens without mass."""
    num_nodes, size = logits_BEV.shape[1:]
    next_BE1 = num_ranked_BE[:, :, None]
    has_mass_BE1 = children.logits_BEC.gather(2, next_BE1) > -torch.inf
    places_C = torch.arange(children.logits_BEC.shape[2], device=logits_BEV.device)
    is_out_BEC = (places_C < next_BE1) & has_mass_BE1
    outside_BEC = children.logits_BEC.masked_fill(is_out_BEC, -torch.inf)
    outside_BEV = logits_BEV.scatter(2, children.token_ids_BEC, outside_BEC)
    rows_E = torch.arange(num_nodes, device=logits_BEV.device) + task.first_above
    anchors_BE = task.num_tokens_B[:, None] + (rows_E << PARENT_SHIFT)
    drawn_R, probs_RV = sample_with_probs(
        outside_BEV.flatten(0, 1),
        task.sampling.seeds_B.repeat_interleave(num_nodes),
        (task.num_tokens_B + task.depth).repeat_interleave(num_nodes),
        task.sampling.is_greedy_B.repeat_interleave(num_nodes),
        Purpose.DRAFT,
        all_greedy=False,
        anchors_R=anchors_BE.flatten(),
    )
    spare_BE = children.token_ids_BEC.gather(2, next_BE1)[:, :, 0]
    has_mass_BE = has_mass_BE1[:, :, 0]
    drawn_BE = torch.where(has_mass_BE, drawn_R.view(-1, num_nodes), spare_BE)
    return drawn_BE, probs_RV.view(-1, num_nodes, size), has_mass_BE


def _spread(children: Children, weight_BE: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Origins and ranks of a level's rows, int64 [B, F]: those that raise the expected number of
    accepted rows most, the best first. A node's rows are its first ranks."""
    p_BEC = children.probs_BEC
    covered_BEC = p_BEC.cumsum(2)
    left_BEC = 1 - covered_BEC
    left_BEC = torch.where(left_BEC > NO_MASS, left_BEC, 0)
    before_BEC = (left_BEC + p_BEC).clamp_(min=torch.finfo(p_BEC.dtype).tiny)
    ranked_BEC = RANKED_GAIN * p_BEC * left_BEC / before_BEC
    drawn_BE1 = DRAWN_BASE + DRAWN_SLOPE * p_BEC[:, :, :1]
    gain_BEC = torch.cat([drawn_BE1, ranked_BEC[:, :, :-1]], dim=2).cummin(2).values
    num_ranks = gain_BEC.shape[2]
    places_BF = best_places((gain_BEC * weight_BE[:, :, None]).flatten(1), num_rows)
    return places_BF // num_ranks, places_BF % num_ranks


def _mass_of_first(probs_BEC: Tensor, count_BE: Tensor) -> Tensor:
    """[B, E]: what the first entries of each node sum up to."""
    places_C = torch.arange(probs_BEC.shape[2], device=probs_BEC.device)
    return (probs_BEC * (places_C < count_BE[:, :, None])).sum(2)
