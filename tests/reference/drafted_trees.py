"""All trees that a way of drafting can draw, each with its probability."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from outdraft.core.draft import Draft
from outdraft.kernels.data.drafts import DraftBatch


@dataclass(frozen=True)
class Tree:
    """Drafts in topological order; `drawn_from` is None where a draft is deterministic."""

    weight: float = 1.0
    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    drawn_from: tuple[np.ndarray | None, ...] = ()

    def __len__(self):
        return len(self.token_ids)

    def prefix(self, row):
        """Tokens from the root's child to `row`; rows count from 1, 0 is the root."""
        if row == 0:
            return ()
        return (*self.prefix(self.parents[row - 1]), self.token_ids[row - 1])

    def with_draft(self, token, parent, q=None):
        return replace(
            self,
            weight=self.weight * (1.0 if q is None else q[token]),
            token_ids=(*self.token_ids, token),
            parents=(*self.parents, parent),
            drawn_from=(*self.drawn_from, q),
        )


def without(q, tokens):
    """q over all other tokens; zeros if nothing is left."""
    rest = q.copy()
    rest[list(tokens)] = 0
    return rest / rest.sum() if rest.sum() > 0 else rest


def every_tree(branches, proposer, next_row=lambda tree, waiting: waiting[0]):
    """The trees of `branches(prefix, tree so far) -> (deterministic tokens, number of draws)`.

    A row's draws are without replacement, and without its deterministic tokens. `next_row` says
    which of the waiting rows gets its children next.
    """

    def grow(tree, waiting):
        if not waiting:
            yield tree
            return
        row = next_row(tree, waiting)
        later = [other for other in waiting if other != row]
        prefix = tree.prefix(row)
        tokens, num_draws = branches(prefix, tree)
        # Deterministic siblings may be tested first or last.
        draws_first = (len(prefix) + row) % 2 == 0
        fixed = [(int(token), None) for token in tokens]
        for drawn in draws(without(proposer(prefix), tokens), num_draws):
            grown = tree
            for token, q in [*drawn, *fixed] if draws_first else [*fixed, *drawn]:
                grown = grown.with_draft(token, row, q)
            yield from grow(grown, [*later, *range(len(tree) + 1, len(grown) + 1)])

    yield from grow(Tree(), [0])


def draws(q, count):
    """All sequences of (token, what it is drawn from); fewer where q has not as many tokens."""
    if count == 0 or q.sum() == 0:
        yield []
        return
    for x in np.flatnonzero(q).tolist():
        for more in draws(without(q, [x]), count - 1):
            yield [(x, q), *more]


def pruned(tree, keeps):
    """The tree without the sampled drafts that `keeps(probability)` refuses, and their children."""
    kept, moved = replace(tree, token_ids=(), parents=(), drawn_from=()), {0: 0}
    rows = zip(tree.token_ids, tree.parents, tree.drawn_from, strict=True)
    for row, (token, parent, q) in enumerate(rows, 1):
        if parent in moved and (q is None or keeps(q[token])):
            kept = replace(kept.with_draft(token, moved[parent], q), weight=tree.weight)
            moved[row] = len(kept)
    return kept


def as_batch(trees, vocab_size):
    """float64 drafts, with NaN wherever nobody may look."""
    width = max(map(len, trees))
    probs_BNV = torch.full((len(trees), width, vocab_size), torch.nan, dtype=torch.float64)
    is_sampled_BN = torch.zeros((len(trees), width), dtype=torch.bool)
    for b, tree in enumerate(trees):
        for at, q in enumerate(tree.drawn_from):
            if q is not None:
                probs_BNV[b, at], is_sampled_BN[b, at] = torch.from_numpy(q), True
    drafts = DraftBatch.from_drafts([Draft(tree.token_ids, tree.parents) for tree in trees], "cpu")
    return replace(
        drafts,
        probs_BNV=probs_BNV,
        is_sampled_BN=is_sampled_BN,
        is_chain=False,
        sampled_trees=True,
    )


def target_rows(trees, target):
    """float64 [R, V]: log-probabilities of all rows, tree after tree, roots first."""
    rows = [target(tree.prefix(row)) for tree in trees for row in range(len(tree) + 1)]
    return torch.tensor(np.array(rows)).log()
