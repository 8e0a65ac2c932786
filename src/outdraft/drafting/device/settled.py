"""What a network would have drafted where the text is known: it is told when it catches up.

A network that did not draft for a while reads the tokens that came meanwhile. Behind each of them,
but the newest, it is known how the text went on. There the first level of a draft is compared with
that token. The rows are computed anyway: what is added is their logits.

Only drafts that follow from the text can be compared: the best token, or with noise that the
request shares with the target the best one with that noise. Who asks makes sure of it.

Dimension key: B requests that draft, R rows, X rows of a pass or places of states, D the drafter's
state, V vocabulary, S state rows, L tokens of a text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import Span, to_device
from outdraft.core.draft import MAX_TAUGHT_ROWS
from outdraft.drafting.device.model_drafts import DraftModelAsk
from outdraft.kernels.data.noise import NoiseKeys, Purpose
from outdraft.kernels.draft_ops import Growth, ModelDrafts
from outdraft.sampling.processors import process_drafts


@dataclass(frozen=True, slots=True)
class SettledToken:
    """A token that the drafter is compared with.

    Attributes:
        owner: place of its text in the batch.
        distance: how many tokens before the end of the text it stands; 1: it is the newest one.
    """

    owner: int
    distance: int


@dataclass(frozen=True, slots=True)
class SettledRows:
    """Rows behind which it is known how a text goes on. All tensors but the states are int64.

    Attributes:
        states_RD: of the drafter.
        owners_R: place of each row's text in the batch.
        positions_R: places in the texts of the tokens behind the rows.
        ids_R, next_ids_R: the tokens before these, and these.
    """

    states_RD: Tensor
    owners_R: Tensor
    positions_R: Tensor
    ids_R: Tensor
    next_ids_R: Tensor

    @classmethod
    def of(
        cls,
        asks: Sequence[DraftModelAsk],
        tokens: Sequence[SettledToken],
        rows: Sequence[int],
        states_XD: Tensor,
        token_ids_SL: Tensor,
    ) -> "SettledRows":
        """
        Args:
            tokens: at least one.
            rows: where in states_XD the state behind the token before each of them is.
        """
        owners = [token.owner for token in tokens]
        positions = [asks[token.owner].num_tokens - token.distance for token in tokens]
        texts = [asks[owner].state_row for owner in owners]
        columns_4R = np.array([rows, owners, positions, texts], dtype=np.int64)
        rows_R, owners_R, positions_R, texts_R = to_device([*columns_4R], token_ids_SL.device)
        before_R, next_R = (token_ids_SL[texts_R, positions_R - back] for back in (1, 0))
        return cls(states_XD.index_select(0, rows_R), owners_R, positions_R, before_R, next_R)


def settled_tokens(asks: Sequence[DraftModelAsk], most: Sequence[int]) -> list[SettledToken]:
    """The newest tokens of each text: as many as the ask wants, no more than `most` of each, and
    all of them no more than MAX_TAUGHT_ROWS."""
    found, left = list[SettledToken](), MAX_TAUGHT_ROWS
    for owner, ask in enumerate(asks):
        if ask.max_taught:
            count = min(ask.max_taught, most[owner], left)
            found += [SettledToken(owner, distance) for distance in range(1, count + 1)]
            left -= count
    return found


def settled_rows(
    asks: Sequence[DraftModelAsk], spans: Sequence[Span], states_TD: Tensor, token_ids_SL: Tensor
) -> SettledRows | None:
    """What a pass that has read the ends of texts can be compared with; None: nothing.

    Args:
        spans: of the pass; the last causal row of each read the newest token.
    """
    newest, end = list[int](), 0
    for span in spans:
        newest.append(end + span.num_causal - 1)
        end += span.num_rows
    tokens = settled_tokens(asks, [span.num_causal - 1 for span in spans])
    if not tokens:
        return None
    rows = [newest[token.owner] - token.distance for token in tokens]
    return SettledRows.of(asks, tokens, rows, states_TD, token_ids_SL)


def with_settled(
    drafts: ModelDrafts,
    rows: SettledRows | None,
    logits: Callable[[Tensor], Tensor],
    growth: Growth,
) -> ModelDrafts:
    """The drafts, and how many of the settled tokens would have been drafted.

    Args:
        logits: [R, V] of the first level, from states.
    """
    if rows is None:
        return drafts
    is_right_R = _first_drafts_R(rows, logits(rows.states_RD), growth) == rows.next_ids_R
    labels_R2 = torch.stack([torch.ones_like(is_right_R), is_right_R], dim=1).long()
    taught_B2 = labels_R2.new_zeros(len(growth.num_drafts_B), 2)
    return replace(drafts, taught_B2=taught_B2.index_add_(0, rows.owners_R, labels_R2))


def _first_drafts_R(rows: SettledRows, logits_RV: Tensor, growth: Growth) -> Tensor:
    """int64 [R]: the tokens that a draft would have begun with; as `grow` chooses them."""
    sampling = growth.sampling
    logits_RV = process_drafts(growth.kernels, logits_RV, rows.owners_R, sampling)
    if growth.samples and sampling.any_shares_noise:
        seeds_R = sampling.seeds_B[rows.owners_R]
        keys = NoiseKeys.of(seeds_R, rows.positions_R, Purpose.SAMPLE)
        noise_RV = growth.kernels.gumbel(keys, logits_RV.shape[1])
        shares_R1 = sampling.shares_noise_B[rows.owners_R, None]
        logits_RV = torch.where(shares_R1, logits_RV + noise_RV, logits_RV)
    return logits_RV.argmax(1)
