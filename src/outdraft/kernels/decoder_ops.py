"""A decoder's passes: its specification and its contract.

Dimension key: T rows, R rows that need states or logits, K tapped layers, D hidden, C head size,
V vocabulary, M positions, N outputs of a head, S those of one rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outdraft.attention.base import AttentionBackend, AttentionMetadata, LayerCache
from outdraft.distributed.vocabulary import VocabularyShard
from outdraft.kernels.draft_ops import BlockSpec, Growth, ModelDrafts, UnreadTexts
from outdraft.kernels.products import EmbeddingTable, Product
from outdraft.kernels.step_ops import StepRead, StepTask


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: attention, then the feed-forward block, each after a norm and added to the
    residual stream. None: it has no such norm; the weight of a norm has the size of what it norms.

    Attributes:
        qkv: to queries of all heads, then keys, then values of all kv heads; layer 0 of a network
            with a `StateEntry` without an `fc` reads twice the hidden size.
        gate_up: to the gate, then what it multiplies.
        q_norm_C, k_norm_C: of each head, before it turns.
        window: of its attention.
        is_causal: a drafted row sees no drafted token after its own place in the text, whatever
            its mask says; of networks whose layers differ in that.
    """

    input_norm_D: Tensor | None
    post_norm_D: Tensor
    q_norm_C: Tensor | None
    k_norm_C: Tensor | None
    qkv: Product
    o: Product
    gate_up: Product
    down: Product
    window: int | None
    is_causal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """The entry of a network that reads a state beside each token, as EAGLE does.

    Attributes:
        token_norm_D, state_norm_D: of each of the two.
        fc: makes one state of both, to which the layers add. None: layer 0 reads both side by side
            in place of its normed input, and the layers add to the state.
        adds_to_normed: without an `fc`: they add to the normed state.
        leaves_out_first: the vector of the token that is read at position 0 is zero.
    """

    token_norm_D: Tensor | None
    state_norm_D: Tensor | None
    fc: Product | None = None
    adds_to_normed: bool = False
    leaves_out_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder-only network over a paged cache: Llama's and its relatives'.

    Attributes:
        embedding: of the network's dtype, which is that of states and caches.
        cos_sin_MC: float32 at least; cos of all frequencies, then sin, for each position.
        scale: of queries and keys' products.
        attention: where the decoder has no attention of its own.
        final_norm_D: of the states that a pass returns.
        entry: of a network that reads states; None: it reads tokens only.
        head_norm_D: between states and the head.
        draft_ids_N: int64, the target's ids of the head's outputs; None: they are the same.
        num_first_drafts: of a drafter that is whole and has its target's ids: where one call makes
            a draft, it chooses among this number of first ids, a multiple of 32, and tokens that
            were read; csrc/draft_tokens.h has the rule. 0: among all.
        shard: of a network that is spread over ranks, the tokens whose vectors `embedding` holds.
            Heads and intermediate_size are this rank's. The products give what the network goes on
            with: `o` and `down` of all layers are `RowParallel`s, the head is a `VocabParallel`.
            None: the network is whole.
    """

    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    eps: float
    scale: float
    embedding: EmbeddingTable
    cos_sin_MC: Tensor
    layers: Sequence[LayerSpec]
    attention: AttentionBackend
    final_norm_D: Tensor | None
    entry: StateEntry | None = None
    head: Product
    head_norm_D: Tensor | None = None
    draft_ids_N: Tensor | None = None
    num_first_drafts: int = 0
    shard: VocabularyShard | None = None


class DecoderPass(Protocol):
    """The passes of a decoder, for any number of rows.

    On a CPU a row's bits depend neither on the rows beside it nor on the number of threads.
    """

    def __call__(
        self,
        token_ids_T: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        taps: Sequence[int] = (),
        states_TD: Tensor | None = None,
        wanted_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The states of the wanted rows, [R, D], and the residual stream after the first taps[k]
        layers, [T, K, D], all of the network's dtype. Keys and values of all rows go to the caches.

        Args:
            token_ids_T: int64.
            caches: one for each layer.
            taps: each from 0 (what enters layer 0) to the number of layers.
            states_TD: for a network with an entry.
            wanted_R: int64, rising; the last rows of each request, or none of them. The last layer
                may leave out the others. None: all are wanted.
        """
        ...

    def logits(self, states_RD: Tensor) -> Tensor:
        """[R, N] of float32; of float64 for a float64 network. A network that is spread over ranks
        gives [R, S]: this rank's outputs, padded with -inf."""
        ...

    def best_tokens(self, states_RD: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [R]: the target's ids of the highest logits; bool [R]: whether that logit is
        finite. A NaN counts as the highest; of equal ones the first wins. A network that is
        spread over ranks looks at the outputs of all of them."""
        ...

    def step(self, task: StepTask, by_parts: Callable[[], StepRead]) -> StepRead:
        """Read the rows of a step of a target, and maybe choose by them.

        Args:
            by_parts: does the same by this network's passes and the other operations; that is the
                meaning of this one.
        """
        ...

    def draft(
        self, unread: UnreadTexts, growth: Growth, by_levels: Callable[[], ModelDrafts]
    ) -> ModelDrafts:
        """Read the rest of texts, and continue them with drafts.

        Args:
            by_levels: reads the same and makes the same draft level by level, with this network's
                passes; that is the meaning of this operation.
        """
        ...

    def write_context(
        self,
        product: Product,
        features_TD: Tensor,
        caches: Sequence[LayerCache],
        positions_T: Tensor,
        slots_T: Tensor,
    ) -> None:
        """Write keys and values that are made of features, not of what the layers read.

        Keys are normed and rotated as the layers' own.

        Args:
            product: from features to keys, then values, of layer 0, then of the next one, ...
            features_TD: of the network's dtype.
            positions_T, slots_T: int64, as in AttentionMetadata.
        """
        ...

    def draft_block(
        self,
        spec: BlockSpec,
        unread: UnreadTexts,
        growth: Growth,
        by_levels: Callable[[], ModelDrafts],
    ) -> ModelDrafts:
        """Write the context of the rest of texts, and draft by one pass over blocks.

        Args:
            unread: its spans' blocks cover the blocks' rows, and it wants no states.
            by_levels: as in `draft`.
        """
        ...
