"""Every operation once: what it is given, what it returns, what it promises.

`Kernels` is a table with one entry for each. `choose.py` fills it, once, when a model is loaded;
whoever computes gets the table and calls `kernels.<operation>(...)`. The readable meaning of each
operation is in `reference/`. Those on texts are described in text_ops.py, those on logits and
drafts in sampling_ops.py, steps in step_ops.py, passes of decoders in decoder_ops.py, mixtures of
experts in expert_ops.py.

Dimension key: B requests, or those that sample of W works; T rows, R rows that need logits,
P blocks, N most drafts of one request, F rows of a level of a growing tree,
S texts, L tokens, D inputs, E outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from outdraft.core.record import record
from outdraft.core.weights import WeightFormat
from outdraft.kernels.data.coded_weight import Codes
from outdraft.kernels.data.first_times import FirstTimes
from outdraft.kernels.decoder_ops import CompileDecoder
from outdraft.kernels.draft_ops import (
    AddSilu,
    DraftStart,
    DrawnLevel,
    Growth,
    LevelTask,
    MixTokens,
    ModelDrafts,
    ScaleToRms,
    TreeLevels,
)
from outdraft.kernels.expert_ops import PackExperts
from outdraft.kernels.sampling_ops import (
    Choose,
    FiniteRows,
    Gumbel,
    MaskForbidden,
    Match,
    Penalize,
    RequestsOfRows,
    ScaleAndCut,
    ScoreTokens,
    Verify,
    choose_by_parts,
)
from outdraft.kernels.text_ops import NgramTextsMaker, SuffixTextsMaker

if TYPE_CHECKING:
    from outdraft.attention.base import AttentionBackend, AttentionMetadata
    from outdraft.attention.rows import Span


@record
class PlacedRows:
    """Where rows stand, which tokens they read, and which of them are needed behind the pass.

    Attributes:
        query_start_W1, context_lens_W, num_causal_W, block_table_WP: int32, as in
            AttentionMetadata.
        ancestors_T, positions_T, slots_T: int64, as there. All others are int64 too.
        state_index_T: where a row's token stands in the flat texts, 0 for drafted rows.
        draft_index_T: where a drafted row's token stands in the flat drafts, else -1.
        logit_rows_R: of each work that samples its root, then its drafts.
        root_rows_B: the root of each work that samples.
        draft_slots_BN: cache slots behind each root, padded with -1.
        extra: what was to be passed on.
    """

    query_start_W1: Tensor
    context_lens_W: Tensor
    num_causal_W: Tensor
    block_table_WP: Tensor
    ancestors_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    state_index_T: Tensor
    draft_index_T: Tensor
    logit_rows_R: Tensor
    root_rows_B: Tensor
    draft_slots_BN: Tensor
    extra: tuple[Tensor, ...]


class PlaceRows(Protocol):
    """Lay out the rows of a step: for each request its causal rows, then its drafted ones."""

    def __call__(
        self,
        spans: Sequence["Span"],
        extra: Sequence[Sequence[int]],
        block_size: int,
        width: int,
    ) -> PlacedRows:
        """New contiguous tensors on the host.

        Args:
            spans: one at least; only those that sample have parents.
            extra: numbers to pass on as int64 tensors.
            width: N, the places of each work's drafts.
        """
        ...


class ShapeRows(Protocol):
    """Give drafted rows position and ancestors that follow from their parents."""

    def __call__(
        self, parents_BN: Tensor, draft_index_T: Tensor, positions_T: Tensor, ancestors_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """New positions and ancestors; rows that are not drafted keep theirs. B, N > 0.

        Args:
            parents_BN: int64, contiguous, as in DraftBatch.
            draft_index_T: int64, as in PlacedRows; the rows of a draft follow its root, in order.
            positions_T, ancestors_T: int64, as in AttentionMetadata.
        """
        ...


class PlaceStates(Protocol):
    """Find where the states of a pass are kept, in windows over the newest tokens of texts."""

    def __call__(
        self,
        rows: "AttentionMetadata",
        state_index_T: Tensor,
        root_rows_B: Tensor,
        kept_rows_BN: Tensor,
        row_len: int,
        window: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """int64 [T]: the place of each row's state, -1 for drafts that were refused and for tokens
        before the newest `window` of those that the pass read; int64 [W]: the last row that each
        text keeps; int64 [W]: that row's place. All are new.

        Token i of text s has place s * window + i % window.

        Args:
            rows: of W works.
            state_index_T, root_rows_B: as in PlacedRows.
            kept_rows_BN: int64, as rows_BN of a Verdict.
            row_len: L, of the texts.
        """
        ...


class CopyRows(Protocol):
    """Copy rows of numbers to their places."""

    def __call__(
        self,
        to_ND: Tensor,
        places_R: Tensor | None,
        from_TD: Tensor,
        rows_R: Tensor | None = None,
    ) -> None:
        """to_ND[places_R[r]] = from_TD[rows_R[r]].

        What has place -1 goes to the last place, or nowhere. What has row -1 gives any numbers.

        Args:
            to_ND, from_TD: of one dtype; to_ND is contiguous.
            places_R, rows_R: int64; no place but -1 occurs twice. One of them may be None: all in
                order.
        """
        ...


class BlockMass(Protocol):
    """How much of a row's attention each block of its text gets."""

    def __call__(
        self,
        q_BHC: Tensor,
        k_PSGC: Tensor,
        block_table_BP: Tensor,
        num_keys_B: Tensor,
        scale: float,
    ) -> Tensor:
        """float32 [B, P], new: softmax(scale * q k^T) over the first keys of each request, summed
        over all heads and over the slots of each block; 0 for blocks behind them.

        Args:
            q_BHC: of one row of each request, of the dtype of the keys.
            k_PSGC: of the layer's cache.
            block_table_BP: int32, as in AttentionMetadata.
            num_keys_B: int64, at least 1.
        """
        ...


class ReadTokenIds(Protocol):
    """Read the tokens of rows from the texts, or from the drafts."""

    def __call__(
        self, texts_SL: Tensor, drafts_BN: Tensor, state_index_T: Tensor, draft_index_T: Tensor
    ) -> Tensor:
        """int64 [T], new. A place that nothing was drafted for (-1) reads as 0: nothing matches it.

        Args:
            texts_SL, drafts_BN: int64, contiguous; N may be 0.
            state_index_T, draft_index_T: int64, as in PlacedRows.
        """
        ...


class AppendTokenIds(Protocol):
    """Write emitted tokens, padded with -1, behind the first tokens of texts."""

    def __call__(
        self, texts_SL: Tensor, state_rows_B: Tensor, starts_B: Tensor, token_ids_BN: Tensor
    ) -> None:
        """The texts change. Their last column takes writes that must go nowhere.

        Args:
            texts_SL: int64, contiguous.
            state_rows_B: int64; which texts.
            starts_B: int64; how many tokens stay.
            token_ids_BN: int64, contiguous; what is no padding fits into the text.
        """
        ...


class Product(Protocol):
    """x W^T + b, with a weight that is kept as it is read fastest.

    A row's bits depend neither on the rows beside it nor on the number of threads. Where the weight
    is quantised, rows may be rounded first: of every 128 inputs of a row, or of each group of the
    format if that is smaller, the number of largest size to 15 bits, and the others as far.

    Attributes:
        nbytes: of its own copy of the weight; 0: it reads the one that it was made from.
    """

    format: WeightFormat
    nbytes: int

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, E], of x's dtype, which is the weight's. float32 sums or better; rounded once."""
        ...

    def rows(self, outputs_T: Tensor) -> Tensor:
        """[T, D]: the weights of some outputs, int64 ids below E. Only of a weight in blocks, or of
        plain numbers."""
        ...


class PackLinear(Protocol):
    """Make the product with a weight. Neither is changed or written later."""

    def __call__(
        self,
        weight_ED: Tensor | Sequence[Tensor],
        bias_E: Tensor | None,
        quantization: WeightFormat | None = None,
    ) -> Product:
        """Its numbers are those of `weight_ED`, or those that `quantization` rounds them to.

        Args:
            weight_ED: or parts of it that lie apart, each some of its rows, all of one dtype.
        """
        ...


class PackCodes(Protocol):
    """Make the product with a weight that comes as integers, which are kept as they are."""

    def __call__(self, weight: Codes, bias_E: Tensor | None, dtype: torch.dtype) -> Product:
        """`dtype`: of the rows that it is for."""
        ...


class PlaceLevel(Protocol):
    """Place one level of growing trees, whose rows are kept behind what a network has read."""

    def __call__(
        self, ancestors_BF: Tensor, first_row: int, num_drafts_B: Tensor, start: DraftStart
    ) -> tuple[Tensor, Tensor, Tensor]:
        """ancestors_T, positions_T and slots_T as in AttentionMetadata, new, T = B * F.

        A row for which its request has no slot is kept nowhere, and no row sees it.
        Its position follows from what it sees, as that of any other row.

        Args:
            ancestors_BF: int64; bit j: the row continues drafted row j, or is it.
            first_row: number of the level's first row; the others follow it.
            num_drafts_B: int64; slots behind what was read that belong to each request.
            start: where the network stands; its table of blocks is contiguous.
        """
        ...


class DrawLevel(Protocol):
    """Draw the rows of one level of growing trees, without replacement behind each node.

    The rows go where the most accepted tokens are expected, before anything is drawn.
    """

    def __call__(self, logits_BEV: Tensor, weight_BE: Tensor, task: LevelTask) -> DrawnLevel:
        """New tensors.

        Args:
            logits_BEV: processed, float32 or float64, behind the nodes of the level above.
            weight_BE: as in DrawnLevel, of the nodes.

        Raises:
            ValueError: the vocabulary cannot fill the level.
        """
        ...


class Grow(Protocol):
    """Grow drafts from what a drafter says may follow, level by level."""

    def __call__(
        self,
        levels: TreeLevels,
        growth: Growth,
        by_levels: Callable[[TreeLevels, Growth], ModelDrafts],
    ) -> ModelDrafts:
        """New drafts.

        Args:
            levels: of one rank; their logits are float32 or float64.
            by_levels: gives the same drafts by the other operations.

        Raises:
            ValueError: the vocabulary cannot fill a level.
        """
        ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which implementation runs for each operation.

    Attributes:
        name: for people.
        has_threads: products and attention have threads of their own, which wait for cores while
            torch's threads have them.
        first_times: counts what the operations do once.
        num_grown: with how many requests drafts should grow that are wanted for so many:
            more where something would be made for each number.
        choose: how the operations that choose a step's tokens follow each other.
    """

    name: str
    has_threads: bool
    attention: "AttentionBackend"
    place_rows: PlaceRows
    shape_rows: ShapeRows
    place_states: PlaceStates
    copy_rows: CopyRows
    block_mass: BlockMass
    read_token_ids: ReadTokenIds
    append_token_ids: AppendTokenIds
    pack_linear: PackLinear
    pack_codes: PackCodes
    pack_experts: PackExperts
    ngram_texts: NgramTextsMaker
    suffix_texts: SuffixTextsMaker
    place_level: PlaceLevel
    draw_level: DrawLevel
    grow: Grow
    add_silu: AddSilu
    scale_to_rms: ScaleToRms
    mix_tokens: MixTokens
    gumbel: Gumbel
    mask_forbidden: MaskForbidden
    finite_rows: FiniteRows
    penalize: Penalize
    scale_and_cut: ScaleAndCut
    score_tokens: ScoreTokens
    requests_of_rows: RequestsOfRows
    match: Match
    verify: Verify
    compile_decoder: CompileDecoder
    first_times: FirstTimes = field(default_factory=FirstTimes)
    num_grown: Callable[[int], int] = int
    choose: Choose = choose_by_parts


def operation_names() -> list[str]:
    """All that a table chooses an implementation for.

    `choose` is none: it only says how some of them follow each other, and computes nothing else.
    tests/kernels/test_graphed_verification.py compares what a GPU's table has there.
    """
    others = ("name", "has_threads", "first_times", "num_grown", "choose")
    return [one.name for one in fields(Kernels) if one.name not in others]
