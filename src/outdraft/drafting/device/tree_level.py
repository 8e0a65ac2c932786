"""One level of growing trees: what the builders of trees hand to each other.

Dimension key: B requests, E nodes of the level above (1: the root), F new rows, C ranks of a
node's children, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Children:
    """The likeliest tokens behind every node, best first.

    Attributes:
        token_ids_BEC: int64, distinct at each node.
        logits_BEC: processed logits; -inf where a token has no mass.
        probs_BEC: float32, their shares.
    """

    token_ids_BEC: Tensor
    logits_BEC: Tensor
    probs_BEC: Tensor


@dataclass(frozen=True, slots=True)
class NewRows:
    """The rows that were chosen for a level.

    Attributes:
        token_ids_BF: int64; any valid id where a request has no such row.
        origins_BF: int64, place of each row's parent in the level above.
    """

    token_ids_BF: Tensor
    origins_BF: Tensor


def likeliest_children(logits_BEV: Tensor, most: int) -> Children:
    """The `most` likeliest tokens behind every node, or all of a smaller vocabulary."""
    best = logits_BEV.topk(min(most, logits_BEV.shape[2]), dim=2)
    total_BE1 = logits_BEV.logsumexp(2, keepdim=True)
    return Children(best.indices, best.values, (best.values - total_BE1).exp().float())


def at_places(values_BEC: Tensor, origins_BF: Tensor, ranks_BF: Tensor) -> Tensor:
    """[B, F]: of the node at each origin, the entry of each rank."""
    return values_BEC.flatten(1).gather(1, origins_BF * values_BEC.shape[2] + ranks_BF)


def best_places(values_BP: Tensor, num_rows: int) -> Tensor:
    """int64 [B, F]: places of the largest values, the largest first, and equal ones in order.

    Raises:
        ValueError: there are fewer.
    """
    if values_BP.shape[1] < num_rows:
        raise ValueError(f"{values_BP.shape[1]} tokens cannot fill {num_rows} rows of a level")
    return torch.sort(values_BP, dim=1, descending=True, stable=True).indices[:, :num_rows]
