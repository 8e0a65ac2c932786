"""Inputs of a drafter on the device: requests to draft for, and states of the target's pass.

A drafter that pauses finds the states of the last tokens when it goes on, and reads those. All
others are gone: memory for more than a window would grow with the length of the texts.

Dimension key: T rows of the pass, D hidden of the target, K tapped layers, W works or tokens of a
window, S state rows, F numbers of a feature, L tokens.
"""

from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from outdraft.core.decision import LiveStop
from outdraft.core.draft import STATE_WINDOW


class StateWindow:
    """features_NF: one feature for each place; the one of token i of the text in row s is at
    s * W + i % W. New memory is zero, so places never written are finite."""

    def __init__(
        self,
        num_state_rows: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_tokens: int = STATE_WINDOW,
    ) -> None:
        self.num_tokens = num_tokens
        # The last place takes writes that must go nowhere: those of place -1.
        num_places = num_state_rows * num_tokens + 1
        self.features_NF = torch.zeros(num_places, size, dtype=dtype, device=device)

    def places(self, state_row: int, start: int, count: int) -> list[int]:
        """Places of the features of `count` tokens, from `start` on."""
        first, size = state_row * self.num_tokens, self.num_tokens
        return [first + token % size for token in range(start, start + count)]


class DraftModelAsk(Struct, frozen=True):
    """One request that the model drafts for.

    Attributes:
        state_row: its row in token_ids_SL.
        num_tokens: length of its text.
        num_computed: tokens of it that the drafter has in its cache, less those of a gap.
        num_drafts: K of this request, at least 1.
        block_ids: of the drafter; they cover the text without the gap, and num_drafts slots more.
        masks: tokens that the drafter reads after the text, to predict the tokens in their places.
        stop: the rule that may end its chain before num_drafts; None: no rule.
        num_missing: tokens of the gap. For the drafter there is no gap: a token's place in its
            cache is its place in the text minus num_missing.
        num_skipped: tokens that its blocks leave out. It is subtracted from places, but not from
            positions, which are those of the text.
        levels: rows of each level of its tree; (): a chain.
    """

    state_row: int
    num_tokens: int
    num_computed: int
    num_drafts: int
    block_ids: Sequence[int]
    masks: tuple[int, ...] = ()
    stop: LiveStop | None = None
    num_missing: int = 0
    num_skipped: int = 0
    levels: tuple[int, ...] = ()


class TargetStates(Struct, frozen=True):
    """The states of a step's rows, once it is known which of them became part of a text.

    All tensors are on the device, and the host has not waited for them.

    Attributes:
        hidden_TD: after the final norm; zeros of rows that the drafter does not read.
        tapped_TKD: residual streams after the layers that the drafter asked for.
        places_T: int64; where a StateWindow keeps the state of each row, -1 if it is that of a
            refused draft, or of a token that is older than the window.
        last_rows_W: int64; the row of each text's last computed token. It has all requests of the
            step, those included that have more of their prompt to read.
        last_places_W: int64; the places of these rows.
        token_ids_SL: int64; the texts, with the tokens that the step emitted.
        reads: texts that the drafter reads now, with the states of this step as they pass by, as
            if it drafted after them; and for each the row of the pass that computed the first token
            that it reads. The others follow.
    """

    hidden_TD: Tensor
    tapped_TKD: Tensor
    places_T: Tensor
    last_rows_W: Tensor
    last_places_W: Tensor
    token_ids_SL: Tensor
    reads: Sequence[tuple[DraftModelAsk, int]] = ()
