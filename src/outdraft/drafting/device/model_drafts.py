"""What a drafter on the device is asked for, and what it answers.

Dimension key: B requests that draft, K drafts, V vocabulary, S state rows, L tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.sampling.batch import SamplingBatch


@dataclass(frozen=True, slots=True)
class DraftModelAsk:
    """One request that the model drafts for.

    Attributes:
        state_row: its row in token_ids_SL.
        num_tokens: length of its text.
        num_computed: tokens of it that the drafter has in its cache.
        num_drafts: K of this request, at least 1.
        block_ids: cover the text, `continued`, and num_drafts slots more.
        continued: a chain that another proposer has drafted; these drafts continue it.
    """

    state_row: int
    num_tokens: int
    num_computed: int
    num_drafts: int
    block_ids: Sequence[int]
    continued: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelDrafts:
    """One tree or chain per ask.

    Attributes:
        token_ids_BK: int64, padded with -1.
        parents_BK: int64, as in `DraftBatch`; None: chains.
        probs_BKV: float32, what sampled drafts were drawn from; None if all are deterministic.
        is_sampled_BK: bool, which drafts were drawn from probs_BKV; None with it.
        all_sampled: known on the host: of every request some were.
    """

    token_ids_BK: Tensor
    parents_BK: Tensor | None = None
    probs_BKV: Tensor | None = None
    is_sampled_BK: Tensor | None = None
    all_sampled: bool = False


def sampled_chains(token_ids_BK: Tensor, probs_BKV: Tensor, sampling: SamplingBatch) -> ModelDrafts:
    """Chains of which those of `sampling.draws_B` were drawn from `probs_BKV`.

    All others are matched with the target's own choices, wherever they came from.
    """
    if not sampling.any_draws:
        return ModelDrafts(token_ids_BK)
    return ModelDrafts(
        token_ids_BK,
        probs_BKV=probs_BKV,
        is_sampled_BK=sampling.draws_B[:, None].expand_as(token_ids_BK),
        all_sampled=sampling.all_draw,
    )


def without_surplus(drafts: ModelDrafts, num_drafts: Sequence[int]) -> ModelDrafts:
    """The same drafts, with -1 behind what each request wanted."""
    most = drafts.token_ids_BK.shape[1]
    if min(num_drafts) == most:
        return drafts
    device = drafts.token_ids_BK.device
    (counts_B,) = to_device([np.array(num_drafts)], device)
    past_BK = torch.arange(most, device=device) >= counts_B[:, None]
    return replace(drafts, token_ids_BK=drafts.token_ids_BK.masked_fill(past_BK, -1))
