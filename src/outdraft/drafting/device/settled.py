"""What a network would have drafted where the text is known: it is told when it catches up.

A network that did not draft for a while reads the tokens that came meanwhile. Behind each of them,
but the newest, it is known how the text went on. There the first level of a draft is compared with
that token. The rows are computed anyway: what is added is their logits.

Only drafts that follow from the text can be compared: the best token, or with noise that the
request shares with the target the best one with that noise. Who asks makes sure of it.

Dimension key: B requests that draft, G those of all ranks that share the drafter, R rows, Q those
of this rank, X rows of a pass or places of states, D the drafter's
state, V vocabulary, S state rows, L tokens of a text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import Span, to_device
from outdraft.core.draft import MAX_TAUGHT_ROWS
from outdraft.distributed.request_shares import RequestShares
from outdraft.drafting.device.model_drafts import DraftModelAsk
from outdraft.kernels.data.noise import NoiseKeys, Purpose
from outdraft.kernels.draft_ops import Growth, ModelDrafts
from outdraft.sampling.processors import process_drafts

# A token that the drafter is compared with: the place of its text in the batch, and how many tokens
# before the end of the text it stands; 1: it is the newest one.
SettledToken = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SettledRows:
    """Rows behind which it is known how a text goes on. All tensors but the states are int64.

    Attributes:
        owners: place of each row's text in the batch, ascending.
        states_RD: of the drafter.
        owners_R: as `owners`.
        positions_R: places in the texts of the tokens behind the rows.
        ids_R, next_ids_R: the tokens before these, and these.
    """

    owners: Sequence[int]
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
        owners = [owner for owner, _ in tokens]
        positions = [asks[owner].num_tokens - distance for owner, distance in tokens]
        texts = [asks[owner].state_row for owner in owners]
        columns_4R = np.array([rows, owners, positions, texts], dtype=np.int64)
        rows_R, owners_R, positions_R, texts_R = to_device([*columns_4R], token_ids_SL.device)
        before_R, next_R = (token_ids_SL[texts_R, positions_R - back] for back in (1, 0))
        states_RD = states_XD.index_select(0, rows_R)
        return cls(owners, states_RD, owners_R, positions_R, before_R, next_R)


def settled_tokens(asks: Sequence[DraftModelAsk], most: Sequence[int]) -> list[SettledToken]:
    """The newest tokens of each text: as many as the ask wants, no more than `most` of each, and
    all of them no more than MAX_TAUGHT_ROWS."""
    found, left = list[SettledToken](), MAX_TAUGHT_ROWS
    for owner, ask in enumerate(asks):
        if ask.max_taught:
            count = min(ask.max_taught, most[owner], left)
            found += [(owner, distance) for distance in range(1, count + 1)]
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
    rows = [newest[owner] - distance for owner, distance in tokens]
    return SettledRows.of(asks, tokens, rows, states_TD, token_ids_SL)


def with_settled(
    drafts: ModelDrafts,
    rows: SettledRows | None,
    logits: Callable[[Tensor, RequestShares], Tensor],
    growth: Growth,
) -> ModelDrafts:
    """The drafts, and how many of the settled tokens would have been drafted.

    Args:
        rows: of all G texts.
        logits: [Q, V] of the first level, from states.
    """
    if rows is None:
        return drafts
    shares = growth.shares.of_rows(rows.owners)
    logits_QV = logits(rows.states_RD, shares)
    owners_Q = shares.own(rows.owners_R) - growth.shares.first
    taught_B2 = owners_Q.new_zeros(growth.sampling.num_requests, 2)
    if len(owners_Q):
        positions_Q, next_ids_Q = shares.own(rows.positions_R), shares.own(rows.next_ids_R)
        is_right_Q = _first_drafts_Q(owners_Q, positions_Q, logits_QV, growth) == next_ids_Q
        labels_Q2 = torch.stack([torch.ones_like(is_right_Q), is_right_Q], dim=1).long()
        taught_B2.index_add_(0, owners_Q, labels_Q2)
    return replace(drafts, taught_B2=taught_B2)


def _first_drafts_Q(
    owners_Q: Tensor, positions_Q: Tensor, logits_QV: Tensor, growth: Growth
) -> Tensor:
    """int64 [Q]: the tokens that a draft would have begun with; as `grow` chooses them."""
    sampling = growth.sampling
    logits_QV = process_drafts(growth.kernels, logits_QV, owners_Q, sampling)
    if growth.samples and sampling.any_shares_noise:
        seeds_Q = sampling.seeds_B[owners_Q]
        keys = NoiseKeys.of(seeds_Q, positions_Q, Purpose.SAMPLE)
        noise_QV = growth.kernels.gumbel(keys, logits_QV.shape[1])
        shares_Q1 = sampling.shares_noise_B[owners_Q, None]
        logits_QV = torch.where(shares_Q1, logits_QV + noise_QV, logits_QV)
    return logits_QV.argmax(1)
