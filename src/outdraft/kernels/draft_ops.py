"""What drafts grow from, and what comes of it.

Dimension key: B requests that draft, K drafts, V vocabulary, D the network's state, P blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from outdraft.core.tree_shape import TreeShape

if TYPE_CHECKING:
    from outdraft.kernels.ops import Kernels
    from outdraft.kv.cache import LayerCache
    from outdraft.sampling.batch import SamplingBatch


PARENT_SHIFT = 24  # an anchor of noise is committed tokens + (row of the parent << PARENT_SHIFT)

# How much rows are worth, estimated from the drafter's own probabilities and fitted on the embedded
# pair. The estimate only decides which nodes get the rows: a bad fit costs speed, never exactness.
RANK0_BASE, RANK0_SLOPE = 0.47, 0.42  # acceptance of a first draw, by the best probability
# The same of a drawn token, by the square root of its probability.
OWN_BASE, OWN_SLOPE = 0.45, 0.5
# An exponent: rows below make up for refusals, so a path is worth more than the product.
DECAY = 0.5
SIDE = (0.35, 0.2, 0.14)  # what ranks 1, 2 and 3 cover, as shares of what rank 0 has left
SIDE_DECAY = 0.8  # each further rank covers this share of what the rank before it covers
SIDE_WEIGHT = 0.7  # what a row of rank 1 or more hands on to its children, as a share of its worth


@dataclass(frozen=True, slots=True)
class Growth:
    """What is wanted of a batch.

    Attributes:
        kernels: process logits and draw noise.
        shape: of the largest tree.
        num_tokens_B: int64, committed tokens.
        positions_B: int64, text positions of the first drafts.
        num_drafts_B: int64; how many rows of the shape each request wants: the first ones.
        fewest: known on the host: the smallest of these.
        sampling: the requests' parameters, without those that look back at the text.
        samples: draw drafts from the drafter's distribution; False: all requests get the
            likeliest tokens.
    """

    kernels: "Kernels"
    shape: TreeShape
    num_tokens_B: Tensor
    positions_B: Tensor
    num_drafts_B: Tensor
    fewest: int
    sampling: "SamplingBatch"
    samples: bool


@dataclass(frozen=True, slots=True)
class DraftStart:
    """Where a network stands that reads its own drafts.

    Attributes:
        states_BD: behind the last token before the drafts.
        contexts_B: int64; what the caches hold of each text.
        block_table_BP: int32; it covers these and the drafts.
        max_seq_len: an upper bound of the cache indices that are used, plus one.
    """

    states_BD: Tensor
    caches: Sequence["LayerCache"]
    contexts_B: Tensor
    block_table_BP: Tensor
    block_size: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class ModelDrafts:
    """One tree per ask.

    Attributes:
        token_ids_BK: int64; -1 past the drafts that a request wants.
        parents_BK: int64; row that each draft continues, as in `Draft`. Row 0 is the last token
            before the drafts.
        num_drafts_B: int64; how many each request wanted.
        probs_BKV: float32, what sampled drafts were drawn from; None if all are deterministic.
        is_sampled_BK: bool, which drafts were drawn from probs_BKV; None with it.
        is_chain: known on the host: all trees are chains.
        all_sampled: known on the host: of every request some were.
    """

    token_ids_BK: Tensor
    parents_BK: Tensor
    num_drafts_B: Tensor
    probs_BKV: Tensor | None = None
    is_sampled_BK: Tensor | None = None
    is_chain: bool = False
    all_sampled: bool = False


def side_shares(num_ranks: int) -> list[float]:
    """What each rank from 1 to `num_ranks` - 1 covers, as a share of what rank 0 has left."""
    further = [SIDE[-1] * SIDE_DECAY ** (at + 1) for at in range(num_ranks - 1 - len(SIDE))]
    return [*SIDE, *further][: num_ranks - 1]
