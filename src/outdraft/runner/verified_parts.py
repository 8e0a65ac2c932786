"""The drafts of a step verified, some requests after the other, so that few rows of logits exist at
the same time.

Dimension key: B requests of a part, N most drafts of one request of the step, R rows of the part,
V vocabulary, W int32 words of a mask of one bit per token, S state rows, L tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.grammar import AllowedTokens
from outdraft.kernels.data.drafts import DraftBatch, Verdict
from outdraft.kernels.data.logits import RequestPart, most_logit_rows, request_parts
from outdraft.kernels.data.sampling import Paths, SamplingBatch
from outdraft.kernels.decoder_ops import Choice
from outdraft.kernels.ops import choose_by_parts
from outdraft.models.base import LanguageModel
from outdraft.runner.logprobs import LogprobRows, concatenated_rows, emitted_logprobs
from outdraft.runner.state import RequestSlot, StepTexts
from outdraft.verification.verifier import Verifier


def logit_rows_of(model: LanguageModel, states_XD: Tensor) -> int:
    """Rows of the model's logits that exist at the same time, after states like these."""
    dtype = torch.promote_types(states_XD.dtype, torch.float32)
    return most_logit_rows(model.vocabulary.num_tokens, dtype, states_XD.device)


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """The tokens that the grammars of a step allow, on the device.

    Attributes:
        masks_RW: int32; see AllowedTokens.
        is_end_BN: bool; nothing may be emitted after this draft. None: there is no such draft.
    """

    masks_RW: Tensor
    is_end_BN: Tensor | None

    def part(self, requests: slice | Tensor, rows: slice | Tensor) -> "GrammarMasks":
        """The masks of some requests, and of their rows."""
        is_end_BN = None if self.is_end_BN is None else self.is_end_BN[requests]
        return GrammarMasks(self.masks_RW[rows], is_end_BN)


def masks_of(allowed: AllowedTokens, drafts: DraftBatch) -> GrammarMasks:
    """The masks, sent to the device in one copy."""
    if allowed.ends_2E.shape[1] == 0:
        [masks_RW] = to_device([allowed.masks_RW], drafts.device)
        return GrammarMasks(masks_RW, None)
    is_end_BN = np.zeros(tuple(drafts.token_ids_BN.shape), dtype=np.int32)
    is_end_BN[tuple(allowed.ends_2E)] = 1
    masks_RW, ends_BN = to_device([allowed.masks_RW, is_end_BN], drafts.device)
    return GrammarMasks(masks_RW, ends_BN.bool())


# The choice of a part, and log-probabilities of what it emits; None: none of its requests asked.
Verified = tuple[Choice, LogprobRows | None]


class PartToVerify(NamedTuple):
    """Requests, their drafts, and all else that they choose by but the logits."""

    slots: Sequence[RequestSlot]
    drafts: DraftBatch
    sampling: SamplingBatch
    texts: StepTexts
    masks: GrammarMasks | None

    def of(self, part: RequestPart | None) -> "PartToVerify":
        """Some of the requests; None: all."""
        if part is None:
            return self
        return PartToVerify(
            self.slots[part.requests],
            self.drafts.part(part),
            self.sampling.part(part.requests),
            self.texts.of(part.requests),
            None if self.masks is None else self.masks.part(part.requests, part.rows),
        )


@dataclass(frozen=True, slots=True)
class _Choosing:
    """Chooses tokens by states; implements `ops.Choosing`.

    Attributes:
        paths: None: no rule reads texts.
    """

    model: LanguageModel
    verifier: Verifier
    paths: Paths | None

    def __call__(
        self, states_RD: Tensor, drafts: DraftBatch, sampling: SamplingBatch, num_tokens_B: Tensor
    ) -> tuple[Verdict, Tensor]:
        if sampling.is_plain_greedy:
            best_R, is_finite_R = self.model.checked_best_tokens(states_RD)
            return self.model.kernels.match(best_R, drafts), is_finite_R
        logits_RV = self.model.logits(states_RD)
        is_finite_R = self.model.kernels.finite_rows(logits_RV)
        paths = self.paths or Paths(None, num_tokens_B, num_tokens_B, None)
        return self.verifier.verify(logits_RV, drafts, sampling, paths), is_finite_R


class PartVerifier(NamedTuple):
    """Verifies parts of one step.

    Attributes:
        longest: tokens of the step's longest text.
        width: N.
        num_top: the most log-probabilities that a request of the step asked for.
    """

    model: LanguageModel
    verifier: Verifier
    texts_SL: Tensor
    longest: int
    width: int
    num_top: int = 0

    def verified(
        self, of: PartToVerify, states_RD: Tensor, num_drafts: Sequence[int], *, chooses: bool
    ) -> Verified:
        """Verify some requests after the other, by the states of the rows with logits.

        Args:
            num_drafts: of each request.
            chooses: the choice depends on logits and texts only, as in a `StepTask`.
        """
        made: list[Verified] = []
        is_padded = of.drafts.prob_rows_B is not None
        most_rows = logit_rows_of(self.model, states_RD)
        parts = request_parts(num_drafts, most_rows, is_padded=is_padded)
        # None: all requests.
        for part in parts if len(parts) > 1 or is_padded else [None]:
            own, own_RD = of.of(part), states_RD if part is None else states_RD[part.rows]
            if chooses:
                choice = self._chosen(own, own_RD)
                if part is not None:  # the results of a graph hold until its next call
                    choice = Choice(choice.verdict.copied(), choice.is_finite_R.clone())
                made.append((choice, None))
            else:
                made.append(self.verified_by(self.model.logits(own_RD), own))
        return joined(made)

    def verified_by(self, logits_RV: Tensor, of: PartToVerify) -> Verified:
        """Verify by the raw logits of the rows, request after request."""
        kernels, masks = self.model.kernels, of.masks
        grammar_RW = masks.masks_RW if masks is not None else None
        paths = self._paths(of, grammar_RW)
        verdict = self.verifier.verify(logits_RV, of.drafts, of.sampling, paths)
        if masks is not None and masks.is_end_BN is not None:
            verdict = verdict.cut_behind(masks.is_end_BN[:, : of.drafts.width])
        verdict, wide = verdict.widened(self.width), of.drafts.widened(self.width)
        emitted = emitted_logprobs(kernels, of.slots, logits_RV, wide, verdict, self.num_top)
        return Choice(verdict, kernels.finite_rows(logits_RV)), emitted

    def _paths(self, of: PartToVerify, grammar_RW: Tensor | None = None) -> Paths:
        """The committed paths before the rows; `grammar_RW`: see `Paths`."""
        texts, history_BL = of.texts, None
        if of.sampling.needs_history:
            history_BL = self.texts_SL[:, : self.longest].index_select(0, texts.rows_B)
            places_L = torch.arange(self.longest, device=history_BL.device)
            history_BL = history_BL.masked_fill(places_L >= texts.num_tokens_B[:, None], -1)
        return Paths(history_BL, texts.prompt_lens_B, texts.num_tokens_B, None, grammar_RW)

    def _chosen(self, of: PartToVerify, states_RD: Tensor) -> Choice:
        choose, paths = self.model.kernels.choose, None
        if of.sampling.needs_history:
            paths = self._paths(of)
        if of.sampling.needs_history or self.model.vocabulary.group.size > 1:
            # Graphs have one shape, and texts grow. Ranks that share the vocabulary wait for each
            # other in between.
            choose = choose_by_parts
        choosing = _Choosing(self.model, self.verifier, paths)
        rows = states_RD, of.drafts, of.sampling, of.texts.num_tokens_B
        verdict, is_finite_R = choose(choosing, *rows)
        return Choice(verdict.widened(self.width), is_finite_R)


def joined(parts: Sequence[Verified]) -> Verified:
    """Join the verdicts on all parts, in order."""
    choices, emitted = zip(*parts, strict=True)
    verdicts, are_finite = zip(*choices, strict=True)
    sizes = [len(verdict.num_emitted_B) for verdict in verdicts]
    choice = Choice(Verdict.joined(verdicts), torch.cat(are_finite))
    return choice, concatenated_rows(emitted, sizes)
