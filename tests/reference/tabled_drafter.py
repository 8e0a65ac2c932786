"""A drafter, and a target, that are tables of random distributions, one for every prefix.

Dimension key: B requests, E nodes, V vocabulary, X prefixes of one length.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from outdraft.core.sampling import SamplingParams
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.data.sampling import SamplingBatch
from outdraft.kernels.draft_ops import Frontier
from tests.sampling_batches import batch_of_params


class TabledModel:
    """Distributions after every prefix of at most `depth` tokens; a prefix is its number in base
    V, the first token in front."""

    def __init__(self, seed: int, vocab_size: int, depth: int, zeros: float = 0.0) -> None:
        """`zeros`: share of tokens without any mass; one of them at least has some."""
        rng = np.random.default_rng(seed)
        self.vocab_size = vocab_size
        self.logits_XV: list[Tensor] = []
        for length in range(depth + 1):
            table_XV = rng.normal(0, 1.5, (vocab_size**length, vocab_size))
            is_zero_XV = rng.random(table_XV.shape) < zeros
            is_zero_XV[np.arange(len(table_XV)), rng.integers(0, vocab_size, len(table_XV))] = False
            table_XV[is_zero_XV] = -np.inf
            self.logits_XV.append(torch.tensor(table_XV, dtype=torch.float32))

    def probs(self, prefix: Sequence[int]) -> np.ndarray:
        """float64 [V]."""
        number = 0
        for token in prefix:
            number = number * self.vocab_size + token
        return self.logits_XV[len(prefix)][number].double().softmax(0).numpy()


def sampling_of(
    temperatures: Sequence[float],
    seeds: Sequence[int],
    size: int,
    shares_noise: Sequence[bool] | None = None,
) -> SamplingBatch:
    """Parameters of requests that differ in temperature and seed alone, and in whether they share
    their noise."""
    each = list(zip(temperatures, shares_noise or [False] * len(temperatures), strict=True))
    kinds = sorted(set(each))
    few = batch_of_params(
        [SamplingParams(temperature=one, seed=0 if shares else None) for one, shares in kinds],
        seeds=range(len(kinds)),
        vocab_size=size,
        device="cpu",
    )
    kind_B = torch.tensor([kinds.index(one) for one in each])
    per_request = {
        field.name: getattr(few, field.name)[kind_B]
        for field in fields(few)
        if isinstance(getattr(few, field.name), Tensor)
    }
    return replace(few, **{**per_request, "seeds_B": torch.tensor(seeds)})


class TabledLevels:
    """The model as a drafter of requests whose texts are empty.

    Attributes:
        seen: the levels, as the grower named them.
    """

    def __init__(self, model: TabledModel, num_requests: int) -> None:
        self._model = model
        self._prefix_BE = torch.zeros(num_requests, 1, dtype=torch.int64)
        self.seen: list[Frontier] = []

    def first_logits(self) -> Tensor:
        return self._model.logits_XV[0].expand(len(self._prefix_BE), -1)

    def next_logits(self, frontier: Frontier) -> Tensor:
        self.seen.append(frontier)
        above_BF = self._prefix_BE.gather(1, frontier.origins_BF)
        self._prefix_BE = above_BF * self._model.vocab_size + frontier.token_ids_BF
        return self._model.logits_XV[frontier.depth][self._prefix_BE]


def prefixes(token_ids: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """What stands before the children of each row, of the root first."""
    result: list[tuple[int, ...]] = [()]
    for token, parent in zip(token_ids, parents, strict=True):
        result.append((*result[parent], token))
    return result


def walk_trees(
    drafts: DraftBatch, model: TabledModel, rng: np.random.Generator, length: int
) -> np.ndarray:
    """int64 [B, length]: the first tokens that traversal verification (arXiv 2505.12398) emits with
    this target, decoded on with the target where it emits fewer. Drafts of -1 are no rows."""
    assert drafts.probs_BNV is not None
    assert drafts.is_sampled_BN is not None
    tables = [logits_XV.double().softmax(1).numpy() for logits_XV in model.logits_XV]
    token_ids_BN = drafts.token_ids_BN.numpy()
    parents_BN = np.where(token_ids_BN >= 0, drafts.parents_BN.numpy(), -1)
    one_hot_BKV = np.eye(model.vocab_size)[token_ids_BN]
    is_sampled_BK1 = drafts.is_sampled_BN.numpy()[:, :, None]
    q_BKV = np.where(is_sampled_BK1, drafts.probs_BNV.double().numpy(), one_hot_BKV)
    emitted = np.full((len(token_ids_BN), len(tables) + 1), -1)
    shapes, shape_of_B = np.unique(parents_BN, axis=0, return_inverse=True)
    for number, parents_K in enumerate(shapes):
        at = np.flatnonzero(shape_of_B.ravel() == number)
        emitted[at] = _traverse(parents_K.tolist(), token_ids_BN[at], q_BKV[at], tables, rng)
    prefix_B = np.zeros(len(emitted), np.int64)
    for place in range(length):
        next_B = _sample(tables[place][prefix_B], rng)
        emitted[:, place] = np.where(emitted[:, place] < 0, next_B, emitted[:, place])
        prefix_B = prefix_B * model.vocab_size + emitted[:, place]
    return emitted[:, :length]


def _traverse(
    parents: list[int],
    token_ids_BN: np.ndarray,
    q_BKV: np.ndarray,
    tables: list[np.ndarray],
    rng: np.random.Generator,
) -> np.ndarray:
    """int64 [B, depth + 1]: what trees of one shape emit, then -1. All of them visit all rows; what
    a tree emits is settled by the first row that stops."""
    every_B = np.arange(len(token_ids_BN))
    emitted = np.full((len(token_ids_BN), len(tables) + 1), -1)

    def visit(row: int, path: list[np.ndarray], weight_B: np.ndarray) -> None:
        prefix_B = np.zeros(len(every_B), np.int64)
        for token_B in path:
            prefix_B = prefix_B * tables[0].shape[1] + token_B
        left_BV = tables[len(path)][prefix_B]
        for child, parent in enumerate(parents):
            if parent != row:
                continue
            token_B, q_BV = token_ids_BN[:, child], q_BKV[:, child]
            ratio_B = left_BV[every_B, token_B] / q_BV[every_B, token_B]
            visit(child + 1, [*path, token_B], np.minimum(weight_B * ratio_B, 1))
            refused_BV = np.maximum(weight_B[:, None] * left_BV - q_BV, 0)
            sum_B = refused_BV.sum(1)
            chance_B = sum_B + (1 - weight_B)  # that the child is refused; 0: it never is
            left_BV = np.where(sum_B[:, None] > 0, refused_BV, left_BV)
            left_BV = left_BV / left_BV.sum(1, keepdims=True)
            weight_B = np.divide(sum_B, chance_B, out=np.ones_like(sum_B), where=chance_B > 0)
        stops_B = (rng.random(len(every_B)) < weight_B) & (emitted[:, 0] < 0)
        for place, token_B in enumerate([*path, _sample(left_BV, rng)]):
            emitted[stops_B, place] = token_B[stops_B]

    visit(0, [], np.ones(len(every_B)))
    assert (emitted[:, 0] >= 0).all(), "the root is never refused"
    return emitted


def _sample(weights_BV: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """int64 [B]: a token of each row, in proportion to its weights."""
    bounds_BV = weights_BV.cumsum(1)
    return (rng.random((len(bounds_BV), 1)) * bounds_BV[:, -1:] >= bounds_BV).sum(1)
