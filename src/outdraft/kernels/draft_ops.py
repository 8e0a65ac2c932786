"""The inputs from which drafts grow, and the drafts.

Dimension key: B requests that draft, E nodes of the level above (1: the root), F rows of the newest
level, K drafts, L levels, V vocabulary, N the network's own, D its state, P blocks, R rows, M rank
of a head of pairs. Ranks that share a network read with it for G requests together, and each
chooses drafts for B of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from outdraft.attention.rows import Span
from outdraft.core.draft import TreeShape
from outdraft.distributed.group import ALL_HERE, RequestShares
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.data.sampling import SamplingBatch
from outdraft.kernels.products import Product
from outdraft.kv.cache import LayerCache

if TYPE_CHECKING:
    from outdraft.kernels.ops import Kernels  # whose operations grow drafts


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
class StopRules:
    """The rules that end the chains of a batch: `LiveStop` of core/decision.py as tensors.

    B are the requests of all ranks that share the drafter.

    Attributes:
        weights_BL, biases_BL: float64; 0 past the levels that a request wants.
        price_B: float64.
        has_rule_B: bool; the other requests draft all that they want.
        room_1: int64 [1]; requests with a rule end where together they have these drafts.
    """

    weights_BL: Tensor
    biases_BL: Tensor
    price_B: Tensor
    has_rule_B: Tensor
    room_1: Tensor


@dataclass(frozen=True, slots=True)
class Growth:
    """The drafts that a batch wants.

    Attributes:
        kernels: process logits and draw noise.
        shape: of the largest tree.
        num_tokens_B: int64, committed tokens, and the text position of the first draft.
        num_drafts_G: int64; how many rows of the shape each request wants: the first ones.
        fewest: known on the host: the smallest of these.
        sampling: the requests' parameters, without those that look back at the text.
        samples: draw drafts from the drafter's distribution; False: all requests get the
            likeliest tokens.
        stops: of chains, for all G requests; None: none of them has a rule.
        shares: which of the G requests are this rank's.
    """

    kernels: "Kernels"
    shape: TreeShape
    num_tokens_B: Tensor
    num_drafts_G: Tensor
    fewest: int
    sampling: SamplingBatch
    samples: bool
    stops: StopRules | None = None
    shares: RequestShares = ALL_HERE

    @property
    def num_drafts_B(self) -> Tensor:
        """int64; of this rank's requests."""
        return self.shares.own(self.num_drafts_G)


@dataclass(frozen=True, slots=True)
class Frontier:
    """The newest level: rows that the drafter reads next.

    Attributes:
        token_ids_BF: int64; every one a token, also where a request has no such row.
        origins_BF: int64, place of each row's parent in the level above; 0 at the first level.
        ancestors_BF: int64; bit j: the row continues drafted row j, or is it. Rows are numbered
            from 0, level after level; the tree that comes of them may number them otherwise.
        depth: all rows have the same; the root's children have 1.
        first_row: number of the first row; the others follow it.
    """

    token_ids_BF: Tensor
    origins_BF: Tensor
    ancestors_BF: Tensor
    depth: int
    first_row: int


class TreeLevels(Protocol):
    """Logits of what may follow the last token before the drafts, and then each node of a level."""

    def first_logits(self) -> Tensor:
        """[B, V]."""
        ...

    def next_logits(self, frontier: Frontier) -> Tensor:
        """[B, F, V]; levels come in order, each once."""
        ...


@runtime_checkable
class Capturable(Protocol):
    """Levels that a CUDA graph can capture: they can be asked of other tensors."""

    @property
    def first_keys_PSGC(self) -> Tensor:
        """Keys of the first layer of the cache that they read; graphs are kept for each cache."""
        ...

    def static_inputs(self) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
        """The tensors that they read, and numbers that are equal for all levels of a graph."""
        ...

    def rebind(self, tensors: tuple[Tensor | None, ...], common: tuple[int, ...]) -> TreeLevels:
        """These levels with other tensors; both arguments are as from `static_inputs`."""
        ...


@runtime_checkable
class TellsOdds(Protocol):
    """Levels of chains with an acceptance probability, known before a level's tokens are drawn.

    It depends on the levels above only.
    """

    def odds_B(self) -> Tensor:
        """float32 [B]: log-odds of the level whose logits were given last."""
        ...


@dataclass(frozen=True, slots=True)
class UnreadTexts:
    """The rest of texts that a network has not read and continues with drafts.

    Attributes:
        spans: of each request; their blocks cover the drafts too.
        token_ids_SL: int64, contiguous; the texts in which the spans begin.
        features_NF: the target's states, for a network that reads them.
        places: in features_NF, of each row's state; () for other networks.
        num_skipped: of each request, tokens that its blocks leave out before the rows: a row's
            position in the text is its cache index plus this number. (): none.
    """

    spans: Sequence[Span]
    token_ids_SL: Tensor
    caches: Sequence[LayerCache]
    block_size: int
    features_NF: Tensor | None
    places: Sequence[int]
    num_skipped: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """The heads of a network that drafts blocks of rows that see each other: DFlash, DSpark.

    Attributes:
        num_rows: of a block: the newest token, then mask tokens.
        first_draft: the row of the first draft; the next rows give the next ones.
        is_causal: a row sees the rows before it only.
        context: the product of `DecoderPass.write_context`.
        pair_embedding_VM: vectors of the tokens before drafts; None: there is no head of pairs.
        pairs: from these to logits that are added, [R, N].
        confidence: from the state of a draft's row, and the vector of the token before it if
            `confidence_reads_token`, to the log-odds that the draft is accepted; None: there is no
            such head.
    """

    num_rows: int
    first_draft: int
    mask_token_id: int
    is_causal: bool
    context: Product
    pair_embedding_VM: Tensor | None = None
    pairs: Product | None = None
    confidence: Product | None = None
    confidence_reads_token: bool = False


@dataclass(frozen=True, slots=True)
class DraftStart:
    """The state of a network before it reads its own drafts.

    Attributes:
        states_BD: of the last token before the drafts.
        contexts_B: int64; the number of tokens of each text that the caches hold.
        block_table_BP: int32; it covers these and the drafts.
        max_seq_len: an upper bound of the cache indices that are used, plus one.
        num_skipped_B: int64; as in UnreadTexts. None: none.
    """

    states_BD: Tensor
    caches: Sequence[LayerCache]
    contexts_B: Tensor
    block_table_BP: Tensor
    block_size: int
    max_seq_len: int
    num_skipped_B: Tensor | None = None


DraftGrower = Callable[[TreeLevels, Growth], DraftBatch]


@dataclass(frozen=True, slots=True)
class LevelTask:
    """The rows that are wanted of a level.

    Attributes:
        num_rows: F.
        num_kept_B: int64; how many of the rows each request wants; below 0 means none.
        first_above: row of the first node above; the others follow it.
        positions_B: int64, text positions of the rows.
        num_tokens_B: int64, committed tokens.
        seeds_B: int64, the requests' noise.
        draws_B: bool; the rows of other requests have no meaning.
    """

    num_rows: int
    num_kept_B: Tensor
    first_above: int
    positions_B: Tensor
    num_tokens_B: Tensor
    seeds_B: Tensor
    draws_B: Tensor


@dataclass(frozen=True, slots=True)
class DrawnLevel:
    """The rows of a level. In rows that a request does not want, only the origins have a meaning.

    Attributes:
        token_ids_BF: int64; every one is a token.
        origins_BF: int64, place of each row's parent in the level above.
        is_drawn_BF: bool. A node may have fewer tokens with mass than rows: the rows that are left
            hold the lowest ids without mass and are not drawn.
        probs_BFV: float32, what the drawn rows were drawn from; without meaning for other rows.
        weight_BF: float32, how much each row is worth to the rows below it; 0 where it is not
            wanted or not drawn.
    """

    token_ids_BF: Tensor
    origins_BF: Tensor
    is_drawn_BF: Tensor
    probs_BFV: Tensor
    weight_BF: Tensor


def side_shares(num_ranks: int) -> list[float]:
    """The share of the rest of rank 0 that each rank from 1 to `num_ranks` - 1 covers."""
    further = [SIDE[-1] * SIDE_DECAY ** (at + 1) for at in range(num_ranks - 1 - len(SIDE))]
    return [*SIDE, *further][: num_ranks - 1]


def best_places(values_BP: Tensor, num_rows: int) -> Tensor:
    """int64 [B, F]: places of the largest values, the largest first, and equal ones in order.

    Raises:
        ValueError: there are fewer.
    """
    if values_BP.shape[1] < num_rows:
        raise ValueError(f"{values_BP.shape[1]} tokens cannot fill {num_rows} rows of a level")
    return torch.sort(values_BP, dim=1, descending=True, stable=True).indices[:, :num_rows]
