"""The operations on logits and drafts, as ops.py has the others.

Dimension key: B requests, R rows of logits, V vocabulary, W words of a mask of one bit per token,
A rows of logits of which R are scored, K best tokens.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from outdraft.kernels.data.drafts import DraftBatch, Rule, Verdict
from outdraft.kernels.data.noise import NoiseKeys
from outdraft.kernels.data.scores import Scores

if TYPE_CHECKING:
    from outdraft.sampling.batch import SamplingBatch
    from outdraft.sampling.processors import Paths


class Gumbel(Protocol):
    """Standard Gumbel noise, the same bits in every implementation."""

    def __call__(self, keys: NoiseKeys, vocab_size: int) -> Tensor:
        """float32 [R, V]."""
        ...


class MaskForbidden(Protocol):
    """Leave the tokens that a grammar allows."""

    def __call__(self, logits_RV: Tensor, grammar_RW: Tensor) -> Tensor:
        """The logits, -inf where a token's bit is 0: bit v % 32 of word v // 32; int32 [R, W]."""
        ...


class FiniteRows(Protocol):
    """Which rows of logits have a best one: no NaN or inf among them, not all -inf."""

    def __call__(self, logits_RV: Tensor) -> Tensor:
        """bool [R]."""
        ...


class Penalize(Protocol):
    """Penalties on what a row's text has: for repetition of prompt and output (Keskar et al. 2019,
    arXiv 1909.05858), for frequency and presence in the output as OpenAI's API defines them."""

    def __call__(
        self, logits_RV: Tensor, request_R: Tensor, paths: "Paths", sampling: "SamplingBatch"
    ) -> Tensor:
        """[R, V] of the logits' dtype, new.

        Args:
            logits_RV: float32 or float64; not written to.
            request_R: int64, the request of each row.
            paths: with the committed texts.
        """
        ...


class ScoreTokens(Protocol):
    """Log-probabilities of raw logits, before any processing."""

    def __call__(
        self, logits_AV: Tensor, chosen_R: Tensor, num_top: int, rows_R: Tensor | None = None
    ) -> Scores:
        """What a chosen token of each row scores, and the best K = num_top, at most V.

        Args:
            logits_AV: of any float type.
            chosen_R: int64.
            rows_R: int64, which rows of the logits; None: all, in order.
        """
        ...


class ScaleAndCut(Protocol):
    """The stages of processing that look at a row's logits alone, each row by itself.

    Temperature, with the best logit moved to 0; min_p; top_k, where ties with the k-th logit stay;
    top_p, where the lowest ids stay of ties at the border of the nucleus.
    """

    def __call__(self, logits_RV: Tensor, request_R: Tensor, sampling: "SamplingBatch") -> Tensor:
        """[R, V] of the logits' dtype, -inf where a token has no mass.

        Args:
            logits_RV: float32 or float64; not written to.
            request_R: int64, the request of each row.
        """
        ...


class RequestsOfRows(Protocol):
    """Whose the flat rows are."""

    def __call__(self, drafts: DraftBatch, num_rows: int) -> Tensor:
        """int64 [R]: the request of each; rows past the last request count as its own."""
        ...


class Match(Protocol):
    """Walk every draft along the target's own choices."""

    def __call__(self, choices_R: Tensor, drafts: DraftBatch) -> Verdict:
        """The path that plain decoding would have produced, however the drafts were made and cut.

        Args:
            choices_R: int64, what the target picked after each flat row, by argmax or by sampling.
        """
        ...


class Verify(Protocol):
    """How far the drafts of each request survive, and the token behind them.

    Requests that draw (`SamplingBatch.draws_B`) are judged by a rule where they have sampled
    drafts; all others are matched with choices of Purpose.SAMPLE.
    """

    def __call__(
        self,
        processed_RV: Tensor,
        drafts: DraftBatch,
        sampling: "SamplingBatch",
        num_tokens_B: Tensor,
        rule: Rule,
    ) -> Verdict:
        """New tensors.

        Args:
            processed_RV: processed logits of the target, flat rows; those past the last request are
                ignored.
            num_tokens_B: int64, committed tokens.
        """
        ...


# States of the rows with logits, drafts, their sampling, lengths of texts; gives what is kept of
# each request, and for each row whether there is a finite number to choose by.
Choosing = Callable[[Tensor, DraftBatch, "SamplingBatch", Tensor], tuple[Verdict, Tensor]]


class Choose(Protocol):
    """Choose the tokens of a step: what a function of other operations does, maybe at once."""

    def __call__(
        self,
        choosing: Choosing,
        states_RD: Tensor,
        drafts: DraftBatch,
        sampling: "SamplingBatch",
        num_tokens_B: Tensor,
    ) -> tuple[Verdict, Tensor]:
        """What `choosing` returns of the other arguments. It holds until the next call.

        Args:
            choosing: equal to another one that computes the same. It ignores rows behind the last
                request.
        """
        ...


def choose_by_parts(
    choosing: Choosing,
    states_RD: Tensor,
    drafts: DraftBatch,
    sampling: "SamplingBatch",
    num_tokens_B: Tensor,
) -> tuple[Verdict, Tensor]:
    """As `Choose`, one operation after the other."""
    return choosing(states_RD, drafts, sampling, num_tokens_B)
