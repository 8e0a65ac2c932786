"""The texts before the rows of a step.

Dimension key: B requests that sample in this step, L tokens, W words of a mask of a row's tokens, R
rows whose logits are needed, S state rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from outdraft.kernels.data.sampling import Paths, SamplingBatch


class StepTexts(NamedTuple):
    """The texts of the requests that sample in a step: int64, on the device.

    Attributes:
        rows_B: their rows of the device state.
        num_tokens_B, prompt_lens_B: of each.
    """

    rows_B: Tensor
    num_tokens_B: Tensor
    prompt_lens_B: Tensor

    def of(self, requests: slice) -> "StepTexts":
        """Those of some of them."""
        return StepTexts(*[column_B[requests] for column_B in self])


def committed_paths(
    texts_SL: Tensor,
    texts: StepTexts,
    longest: int,
    sampling: SamplingBatch,
    grammar_RW: Tensor | None = None,
) -> Paths:
    """What was committed before the rows of a step.

    Args:
        texts_SL: the device state.
        longest: tokens of the longest text.
        grammar_RW: as in `Paths`.
    """
    history_BL: Tensor | None = None
    if sampling.needs_history:
        history_BL = texts_SL[:, :longest].index_select(0, texts.rows_B)
        places_L = torch.arange(longest, device=texts_SL.device)
        history_BL = history_BL.masked_fill(places_L >= texts.num_tokens_B[:, None], -1)
    return Paths(history_BL, texts.prompt_lens_B, texts.num_tokens_B, None, grammar_RW)
