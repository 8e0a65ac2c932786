"""A decoder: its specification, and the contracts of its passes and of whole steps.

In a step of a target its rows are laid out and read, and their drafts maybe verified.

Dimension key: T rows, R rows that need states or logits, K tapped layers, D hidden, C head size,
V vocabulary, M positions, N outputs of a head, or most drafts of one request, S outputs of one
rank, or state rows, W works, B of them sample, L tokens of a text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple, Protocol

from torch import Tensor

from outdraft.attention.base import AttentionBackend, AttentionMetadata, LayerCache
from outdraft.attention.rows import RowBatch, Span
from outdraft.distributed.vocabulary import VocabularyShard
from outdraft.kernels.data.drafts import DraftBatch, Rule, Verdict
from outdraft.kernels.data.sampling import SamplingBatch
from outdraft.kernels.draft_ops import BlockSpec, Growth, UnreadTexts
from outdraft.kernels.products import EmbeddingTable, Product


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


class StatesOf(IntEnum):
    """The rows whose states after the last layer are wanted."""

    NO_ROW = 0
    ROWS_WITH_LOGITS = 1
    ALL_ROWS = 2


class StepTask(NamedTuple):
    """The rows that a step reads, and how it chooses.

    Attributes:
        spans: of the works, one at least; those that do not sample have no parents.
        facts: of the works that sample, lists to pass on with the rows: of each its row of the
            texts, the length of its text, and that of its prompt.
        token_ids_SL: int64, contiguous, on the model's device.
        drafts: of the works that sample; None: none does.
        are_shaped: positions and ancestors follow from the drafts' parents, not from the spans'.
        caches: one for each layer.
        taps: as in DecoderPass.
        rule: of the drafts that were drawn, where works choose by the logits of their rows and by
            their texts; what they emit is written to these. None: nothing is chosen.
        sampling: of the works that sample; `has_penalties_at_most`. None: nothing is chosen.
        states_of: of rows with logits at least, if nothing is chosen or something is tapped.
        window: newest tokens of a text whose states are kept, as `place_states` in torch/rows.py
            counts; 0: none.
    """

    spans: Sequence[Span]
    facts: Sequence[Sequence[int]]
    token_ids_SL: Tensor
    drafts: DraftBatch | None
    are_shaped: bool
    caches: Sequence[LayerCache]
    block_size: int
    taps: Sequence[int]
    rule: Rule | None
    sampling: SamplingBatch | None
    states_of: StatesOf
    window: int = 0

    @property
    def width(self) -> int:
        """N."""
        return 0 if self.drafts is None else self.drafts.width


class Choice(NamedTuple):
    """The tokens that requests emit; on a GPU they may not be computed yet.

    Attributes:
        is_finite_R: bool; the raw logits of the row have a largest one that is finite, and no NaN.
    """

    verdict: Verdict
    is_finite_R: Tensor


class StatePlaces(NamedTuple):
    """Places of kept states, int64.

    Attributes:
        places_T: of each row's state; -1 for drafts that were refused, and for tokens before the
            newest `window` of those that the pass read.
        last_rows_W: the last row that each text keeps.
        last_places_W: that row's place.
    """

    places_T: Tensor
    last_rows_W: Tensor
    last_places_W: Tensor


@dataclass(frozen=True)
class StepRead:
    """The results of a task.

    Attributes:
        place: where the rows stand, with the facts; on the model's device. It makes tensors that
            few steps need.
        states_of: the rows that have states.
        states_RD: of these, as DecoderPass gives them; None: of no row.
        tapped_TKD: as DecoderPass gives them; None with the states.
        choice: None: the step does not choose.
        kept: places of kept states; None: none are kept, or the step does not choose.
    """

    place: Callable[[], RowBatch]
    states_of: StatesOf
    states_RD: Tensor | None
    tapped_TKD: Tensor | None
    choice: Choice | None = None
    kept: StatePlaces | None = None

    @cached_property
    def rows(self) -> RowBatch:
        """The placed rows."""
        return self.place()

    @property
    def states_TD(self) -> Tensor | None:
        """States of all rows, if they are there."""
        return self.states_RD if self.states_of is StatesOf.ALL_ROWS else None

    @cached_property
    def logit_states_RD(self) -> Tensor:
        """States of the rows whose logits are needed."""
        assert self.states_RD is not None
        if self.states_TD is None or len(self.rows.logit_rows_R) == len(self.states_RD):
            return self.states_RD
        # Indexing by a tensor would wake OpenMP threads, which then keep the cores of ours.
        return self.states_RD.index_select(0, self.rows.logit_rows_R)


class FusedPasses(Protocol):
    """A decoder's passes together with the operations around them, each in one call."""

    def step(self, task: StepTask) -> StepRead | None:
        """Read the rows of a step of a target, and maybe choose by them; None: not in one call.

        runner/step_rows.py does the same by the network's passes and the other operations.
        """
        ...

    def draft(self, unread: UnreadTexts, growth: Growth) -> DraftBatch:
        """Read the rest of texts, and continue them with drafts.

        drafting/device/network_drafter.py makes the same draft level by level.
        """
        ...

    def draft_block(
        self, spec: BlockSpec, unread: UnreadTexts, growth: Growth
    ) -> DraftBatch | None:
        """Write the context of the rest of texts, and draft by one pass over blocks; None: not in
        one call. drafting/device/block_drafter.py does the same.

        Args:
            unread: its spans' blocks cover the blocks' rows, and it wants no states.
        """
        ...


class DecoderPass(Protocol):
    """The passes of a decoder, for any number of rows.

    On a CPU a row's bits depend neither on the rows beside it nor on the number of threads.
    """

    @property
    def fused(self) -> FusedPasses | None:
        """Whole steps and drafts in one call each; None: it has no such calls."""
        ...

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
