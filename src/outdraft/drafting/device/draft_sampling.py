"""How drafts are drawn from the logits of any drafter.

Dimension key: R rows, V vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from outdraft.sampling.batch import SamplingBatch
from outdraft.sampling.noise import Purpose
from outdraft.sampling.processors import Paths, process_logits
from outdraft.sampling.sampler import sample_with_probs


def drafting_parameters(sampling: SamplingBatch) -> SamplingBatch:
    """The parameters without those that look back at the text: verification applies these."""
    return replace(sampling, needs_penalties=False, bad_words=None, stops=None, has_grammar=False)


def sample_drafts(
    logits_RV: Tensor,
    request_R: Tensor,
    positions_R: Tensor,
    anchors_R: Tensor,
    sampling: SamplingBatch,
) -> tuple[Tensor, Tensor]:
    """A draft for each row, int64 [R], and float32 [R, V] what it was drawn from.

    Greedy requests get the best token; their probabilities have no meaning.

    Args:
        request_R: int64, the request of each row.
        positions_R: int64, text positions of the drafts.
        anchors_R: int64, committed tokens of each row's request.
        sampling: of the requests, as `drafting_parameters` leaves it.
    """
    purpose_R, anchors_R = draft_noise(sampling.shares_noise_B[request_R], anchors_R)
    nothing_B = torch.zeros_like(sampling.seeds_B)  # no stage that is left looks at the text
    paths = Paths(None, nothing_B, nothing_B, None)
    return sample_with_probs(
        process_logits(logits_RV, request_R, paths, sampling),
        sampling.seeds_B[request_R],
        positions_R,
        sampling.is_greedy_B[request_R],
        purpose_R,
        all_greedy=sampling.all_greedy,
        anchors_R=anchors_R,
    )


def draft_noise(shares_noise_R: Tensor, anchors_R: Tensor) -> tuple[Tensor, Tensor]:
    """Purpose and anchor of the noise that drafts are drawn with, int64 [R] each.

    Rows that share their noise use the noise of the target's own choice at their position. Other
    rows use noise of their own. `anchors_R`: committed tokens.
    """
    purpose_R = torch.where(shares_noise_R, int(Purpose.SAMPLE), int(Purpose.DRAFT))
    return purpose_R, anchors_R.masked_fill(shares_noise_R, 0)
