"""The table of operations: the implementation that runs for each.

`choose.py` fills it when a model is loaded. All other code gets the table and calls
`kernels.<operation>(...)`. The contract of an operation is the docstring of its readable
implementation: shapes, dtypes, what may alias, errors. `torch/table.py` names these
implementations; fast ones compute the same.

Dimension key: B requests, or those that sample of W works; T rows, R rows that need logits,
P blocks, N most drafts of one request, D inputs, E outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from outdraft.core.record import record
from outdraft.core.weight_format import WeightFormat
from outdraft.kernels.data.coded_weight import Codes
from outdraft.kernels.data.drafts import DraftBatch, Rule, Verdict
from outdraft.kernels.data.first_times import FirstTimes
from outdraft.kernels.data.noise import Gumbel
from outdraft.kernels.data.scores import Scores
from outdraft.kernels.decoder_ops import DecoderPass, DecoderSpec
from outdraft.kernels.draft_ops import (
    DraftStart,
    DrawnLevel,
    Growth,
    LevelTask,
    ModelDrafts,
    TreeLevels,
)
from outdraft.kernels.expert_ops import Experts, ExpertWeights, Gate
from outdraft.kernels.text_ops import NgramTexts, SuffixTexts

if TYPE_CHECKING:
    from outdraft.attention.base import AttentionBackend, AttentionMetadata
    from outdraft.attention.rows import Span
    from outdraft.sampling.batch import SamplingBatch
    from outdraft.sampling.processors import Paths


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


# From states of the rows with logits, drafts, their sampling and lengths of texts to the verdict,
# and for each row whether it has a finite logit to choose by.
Choosing = Callable[[Tensor, DraftBatch, "SamplingBatch", Tensor], tuple[Verdict, Tensor]]


def choose_by_parts(
    choosing: Choosing,
    states_RD: Tensor,
    drafts: DraftBatch,
    sampling: "SamplingBatch",
    num_tokens_B: Tensor,
) -> tuple[Verdict, Tensor]:
    """Choose the tokens of a step by calling a function of the other operations.

    Another implementation may issue all of them at once. Its result holds until the next call.

    Args:
        choosing: two that compare equal compute the same. It ignores rows after the last request.
    """
    return choosing(states_RD, drafts, sampling, num_tokens_B)


Tensors3 = tuple[Tensor, Tensor, Tensor]
DraftGrower = Callable[[TreeLevels, Growth], ModelDrafts]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The implementation that runs for each operation.

    Attributes:
        name: as people read it.
        has_threads: products and attention have threads of their own, which wait for cores while
            torch's threads have them.
        first_times: counts what the operations do once.
        num_grown: from the number of requests that want drafts to the number that drafts should
            grow for: more where something would be made for each number.
        choose: `choose_by_parts`, or a faster way to compute the same.
    """

    name: str
    has_threads: bool
    attention: "AttentionBackend"
    place_rows: "Callable[[Sequence[Span], Sequence[Sequence[int]], int, int], PlacedRows]"
    shape_rows: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    place_states: "Callable[[AttentionMetadata, Tensor, Tensor, Tensor, int, int], Tensors3]"
    copy_rows: Callable[[Tensor, Tensor | None, Tensor, Tensor | None], None]
    block_mass: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
    read_token_ids: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    append_token_ids: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    pack_linear: Callable[
        [Tensor | Sequence[Tensor], Tensor | None, WeightFormat | None], Product
    ]
    pack_codes: Callable[[Codes, Tensor | None, torch.dtype], Product]
    pack_experts: Callable[[ExpertWeights, Gate, WeightFormat | None], Experts]
    ngram_texts: Callable[[int, int, int], NgramTexts]
    suffix_texts: Callable[[int, float, float, int], SuffixTexts]
    place_level: Callable[[Tensor, int, Tensor, DraftStart], Tensors3]
    draw_level: Callable[[Tensor, Tensor, LevelTask], DrawnLevel]
    grow: Callable[[TreeLevels, Growth, DraftGrower], ModelDrafts]
    add_silu: Callable[[Tensor, Tensor], Tensor]
    scale_to_rms: Callable[[Tensor, float, float], Tensor]
    mix_tokens: Callable[[Tensor, Tensor, Tensor, float, Tensor, float], Tensor]
    gumbel: Gumbel
    mask_forbidden: Callable[[Tensor, Tensor], Tensor]
    finite_rows: Callable[[Tensor], Tensor]
    penalize: "Callable[[Tensor, Tensor, Paths, SamplingBatch], Tensor]"
    scale_and_cut: "Callable[[Tensor, Tensor, SamplingBatch], Tensor]"
    score_tokens: Callable[[Tensor, Tensor, int, Tensor | None], Scores]
    requests_of_rows: Callable[[DraftBatch, int], Tensor]
    match: Callable[[Tensor, DraftBatch], Verdict]
    verify: "Callable[[Tensor, DraftBatch, SamplingBatch, Tensor, Rule], Verdict]"
    compile_decoder: Callable[[DecoderSpec], DecoderPass]
    first_times: FirstTimes = field(default_factory=FirstTimes)
    num_grown: Callable[[int], int] = int
    choose: (
        "Callable[[Choosing, Tensor, DraftBatch, SamplingBatch, Tensor], tuple[Verdict, Tensor]]"
    ) = choose_by_parts


def operation_names() -> list[str]:
    """List all operations that a table chooses an implementation for.

    `choose` is none: it only says how some of them follow each other, and computes nothing else.
    tests/kernels/test_graphed_verification.py compares what a GPU's table has there.
    """
    others = ("name", "has_threads", "first_times", "num_grown", "choose")
    return [one.name for one in fields(Kernels) if one.name not in others]
