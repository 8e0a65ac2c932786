"""Log-probabilities of tokens.

Dimension key: R rows, K best tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Logits that are scored at the same time in torch. On a CPU each temporary tensor has half a
# megabyte: C libraries reuse aligned memory badly, and tensors of all logits would take several
# times their memory. A GPU takes hardly longer for some rows than for one.
SCORED_LOGITS, SCORED_ON_DEVICE = 1 << 17, 1 << 22


class Scores(NamedTuple):
    """Log-probabilities, float32, of one chosen token of each row and of the K best ones.

    A rank is 1 for the best token; ties share the better rank, and of them the lowest ids come
    first among the best. Ranks and ids are int64.
    """

    logprobs_R: Tensor
    ranks_R: Tensor
    top_ids_RK: Tensor
    top_logprobs_RK: Tensor


def concatenated(scores: Sequence[Scores]) -> Scores:
    """What all rows score, one at least."""
    return Scores(*map(torch.cat, zip(*scores, strict=True)))
