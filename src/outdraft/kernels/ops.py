"""The table of operations: the implementation that runs for each.

`choose.py` fills it when a model is loaded. All other code gets the table and calls
`kernels.<operation>(...)`. The contract of an operation is the docstring of its readable
implementation: shapes, dtypes, what may alias, errors. `torch/table.py` names these
implementations; fast ones compute the same.

Dimension key: B requests, R rows that need logits, D hidden, T tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.base import AttentionBackend
from outdraft.attention.rows import RowBatch, Span
from outdraft.core.draft import Draft, DraftAsk
from outdraft.core.weights import WeightFormat
from outdraft.kernels.data.coded_weight import Codes
from outdraft.kernels.data.drafts import DraftBatch, Rule, Verdict
from outdraft.kernels.data.logits import Scores
from outdraft.kernels.data.noise import Gumbel
from outdraft.kernels.data.sampling import Paths, SamplingBatch
from outdraft.kernels.decoder_ops import DecoderPass, DecoderSpec
from outdraft.kernels.draft_ops import (
    DraftGrower,
    DraftStart,
    DrawnLevel,
    Growth,
    LevelTask,
    TreeLevels,
)
from outdraft.kernels.products import Experts, ExpertWeights, Gate, Product


@dataclass(slots=True)
class WarmUps:
    """Counts work that is done once and slows its step down: compiled kernels, new CUDA graphs."""

    count: int = 0


class NgramTexts(Protocol):
    """Drafts from the texts of requests by prompt lookup, and remembers what speeds that up.

    The longest end of a text is looked up that has min_n to max_n tokens and occurred before. Its
    newest `branching` occurrences are merged into a tree. A row's path matches some of them; the
    probability of a token after it is that of the path, times the share of these occurrences that
    go on with the token, times a. a is the chance that any of the occurrences is right. It is
    measured for each text and match length, as the share of tokens that came true among those that
    were looked up and reached, from one of two at first. The most probable paths are drafted; among
    equals the deepest, then the one with the earlier parent, then the token that follows more
    occurrences, then the newer one.
    """

    def draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """One draft per ask, of at most `max_tokens` and MAX_DRAFTS tokens.

        A text that cannot be the one before of its request, grown, starts anew: that is judged by
        its length and by the token where the one before ended. The score is the sum of the
        probabilities of all rows, which is the expected number of accepted tokens. The match length
        is that of the end that was looked up; of ends that occurred at the same places, the
        longest. Token ids are contiguous; a new token costs the same however long the text is.
        """
        ...

    def forget(self, request_id: str) -> None:
        """Drop what is remembered of a text; unknown ids are fine."""
        ...


class SuffixTexts(NgramTexts, Protocol):
    """Drafts what usually followed, in a request's own text and in texts of finished requests.

    For each end of the text of less than max_depth tokens that has occurred, a tree of its
    continuations is grown, as deep as max_spec_factor times the length of that end, and as
    max_depth allows for both together. A row's probability is the product of count(string + token)
    / count(string) along its path, and at least min_token_prob. A string is followed by its
    `branching` most frequent continuations, the latest first among equals. The tree with the
    largest sum of probabilities is drafted, of equals that of the longest end. Finished texts count
    all together, and the text that is drafted for as one occurrence more, without continuation.
    They are taken if their sum is larger than that of the own text.

    Finished texts come and go in order, some tokens at a time, so that no call takes long: a string
    counts as often as it starts at a token that is counted. Texts that are counted in part give the
    draft of the largest sum by these counts; its match length may then be that of a shorter end
    which occurred at the same places.
    """

    def add_finished(self, token_ids_T: np.ndarray) -> None:
        """Keep a text, int32 with T >= 1; the one before must be counted whole."""
        ...

    def count_finished(self, max_tokens: int) -> int:
        """Count what starts at the next tokens of the newest text; returns how many these were."""
        ...

    def remove_finished(self, max_tokens: int) -> int:
        """Take back what starts at the next tokens of the oldest text, at last the text itself.

        All texts must be counted whole. Returns how many tokens these were.
        """
        ...


# From states of the rows with logits, drafts, their sampling and lengths of texts to the verdict,
# and for each row whether it has a finite logit to choose by.
Choosing = Callable[[Tensor, DraftBatch, SamplingBatch, Tensor], tuple[Verdict, Tensor]]


def choose_by_parts(
    choosing: Choosing,
    states_RD: Tensor,
    drafts: DraftBatch,
    sampling: SamplingBatch,
    num_tokens_B: Tensor,
) -> tuple[Verdict, Tensor]:
    """Choose the tokens of a step by calling a function of the other operations.

    Another implementation may issue all of them at once. Its result holds until the next call.

    Args:
        choosing: two that compare equal compute the same. It ignores rows after the last request.
    """
    return choosing(states_RD, drafts, sampling, num_tokens_B)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The implementation that runs for each operation.

    Attributes:
        name: as people read it.
        has_threads: products and attention have threads of their own, which wait for cores while
            torch's threads have them.
        warm_ups: counts what the operations do once.
        padded_draft_batch: from the number of requests that want drafts to the number that drafts
            grow for: more where a CUDA graph would be made for each number.
        choose: `choose_by_parts`, or a faster way to compute the same.
    """

    name: str
    has_threads: bool
    attention: AttentionBackend
    place_rows: Callable[[Sequence[Span], Sequence[Sequence[int]], int, int], RowBatch]
    copy_rows: Callable[[Tensor, Tensor | None, Tensor, Tensor | None], None]
    block_mass: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
    pack_linear: Callable[[Tensor | Sequence[Tensor], Tensor | None, WeightFormat | None], Product]
    pack_codes: Callable[[Codes, Tensor | None, torch.dtype], Product]
    pack_experts: Callable[[ExpertWeights, Gate, WeightFormat | None], Experts]
    ngram_texts: Callable[[int, int, int], NgramTexts]
    suffix_texts: Callable[[int, float, float, int], SuffixTexts]
    place_level: Callable[[Tensor, int, Tensor, DraftStart], tuple[Tensor, Tensor, Tensor]]
    draw_level: Callable[[Tensor, Tensor, LevelTask], DrawnLevel]
    grow: Callable[[TreeLevels, Growth, DraftGrower], DraftBatch]
    scale_to_rms: Callable[[Tensor, float, float], Tensor]
    gumbel: Gumbel
    mask_forbidden: Callable[[Tensor, Tensor], Tensor]
    finite_rows: Callable[[Tensor], Tensor]
    penalize: Callable[[Tensor, Tensor, Paths, SamplingBatch], Tensor]
    scale_and_cut: Callable[[Tensor, Tensor, SamplingBatch], Tensor]
    score_tokens: Callable[[Tensor, Tensor, int, Tensor | None], Scores]
    match: Callable[[Tensor, DraftBatch], Verdict]
    verify: Callable[[Tensor, DraftBatch, SamplingBatch, Tensor, Rule], Verdict]
    compile_decoder: Callable[[DecoderSpec], DecoderPass]
    warm_ups: WarmUps = field(default_factory=WarmUps)
    padded_draft_batch: Callable[[int], int] = int
    choose: Callable[
        [Choosing, Tensor, DraftBatch, SamplingBatch, Tensor], tuple[Verdict, Tensor]
    ] = choose_by_parts


def operation_names() -> list[str]:
    """List all operations that a table chooses an implementation for.

    `choose` is none: it only says how some of them follow each other, and computes nothing else.
    tests/kernels/test_graphed_verification.py compares what a GPU's table has there.
    """
    others = ("name", "has_threads", "warm_ups", "padded_draft_batch", "choose")
    return [one.name for one in fields(Kernels) if one.name not in others]
