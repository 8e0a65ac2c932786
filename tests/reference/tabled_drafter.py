"""A drafter, and a target, that are tables of random distributions, one for every prefix.

Dimension key: B requests, E nodes, V vocabulary, X prefixes of one length.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from outdraft.core.sampling import SamplingParams
from outdraft.sampling.batch import SamplingBatch
from outdraft.spec.draft_tree import Frontier, TreeBuilder
from outdraft.spec.model_drafts import ModelDrafts


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


def sampling_of(temperatures: Sequence[float], seeds: Sequence[int], size: int) -> SamplingBatch:
    """Parameters of requests that differ in temperature and seed alone."""
    kinds = sorted(set(temperatures))
    few = SamplingBatch.from_requests(
        [SamplingParams(temperature=one) for one in kinds],
        seeds=range(len(kinds)),
        vocab_size=size,
        device="cpu",
    )
    kind_B = torch.tensor([kinds.index(one) for one in temperatures])
    per_request = {
        field.name: getattr(few, field.name)[kind_B]
        for field in fields(few)
        if isinstance(getattr(few, field.name), Tensor)
    }
    return replace(few, **{**per_request, "seeds_B": torch.tensor(seeds)})


def grow(builder: TreeBuilder, model: TabledModel, num_requests: int) -> list[Frontier]:
    """Let the model draft; the levels as the builder named them."""
    prefix_BE = torch.zeros(num_requests, 1, dtype=torch.int64)
    builder.start(model.logits_XV[0].expand(num_requests, -1))
    levels = [builder.frontier]
    for _ in range(builder.depth - 1):
        above = prefix_BE.gather(1, builder.frontier.origins_BF)
        prefix_BE = above * model.vocab_size + builder.frontier.token_ids_BF
        builder.extend(model.logits_XV[builder.frontier.depth][prefix_BE])
        levels.append(builder.frontier)
    return levels


def prefixes(token_ids: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """What stands before the children of each row, of the root first."""
    result: list[tuple[int, ...]] = [()]
    for token, parent in zip(token_ids, parents, strict=True):
        result.append((*result[parent], token))
    return result


def walk_trees(
    drafts: ModelDrafts, model: TabledModel, rng: np.random.Generator, length: int
) -> np.ndarray:
    """int64 [B, length]: the first tokens that the tree rule of arXiv 2502.18779 emits with this
    target, decoded on with the target where it emits fewer."""
    assert drafts.parents_BK is not None
    assert drafts.probs_BKV is not None
    assert drafts.is_sampled_BK is not None
    token_ids_BK = drafts.token_ids_BK.numpy()
    parents_BK = drafts.parents_BK.numpy()
    drawn_BK = drafts.is_sampled_BK.numpy() & (token_ids_BK >= 0)
    q_BKV = drafts.probs_BKV.double().numpy()
    num_requests = len(token_ids_BK)
    every_B = np.arange(num_requests)
    row_B = np.zeros(num_requests, np.int64)  # -1: has left the tree
    prefix_B = np.zeros(num_requests, np.int64)
    emitted = np.empty((num_requests, length), np.int64)
    for place in range(length):
        table_XV = model.logits_XV[place].double().softmax(1).numpy()
        p_BV = table_XV[prefix_B]
        is_child_BK = (parents_BK == row_B[:, None]) & (token_ids_BK >= 0)
        is_drawn_BK = is_child_BK & drawn_BK
        x_B, has_x_B = is_drawn_BK.argmax(1), is_drawn_BK.any(1)
        q_BV = q_BKV[every_B, x_B]
        token_B = token_ids_BK[every_B, x_B]
        coin_B = rng.random(num_requests)
        accepts_B = has_x_B & (coin_B * q_BV[every_B, token_B] < p_BV[every_B, token_B])
        left_BV = np.where(has_x_B[:, None], np.maximum(p_BV - q_BV, 0), p_BV)
        left_BV = np.where(left_BV.sum(1, keepdims=True) > 0, left_BV, p_BV)
        bounds_BV = left_BV.cumsum(1)
        y_B = (rng.random((num_requests, 1)) * bounds_BV[:, -1:] > bounds_BV).sum(1)
        token_B = np.where(accepts_B, token_B, y_B)
        is_next_BK = is_child_BK & (token_ids_BK == token_B[:, None])
        row_B = np.where(is_next_BK.any(1), is_next_BK.argmax(1) + 1, -1)
        emitted[:, place] = token_B
        prefix_B = prefix_B * model.vocab_size + token_B
    return emitted
