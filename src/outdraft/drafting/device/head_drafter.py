"""Drafts with heads on the target's last hidden state: Medusa and MLP speculators.

Heads have no cache and read no text. For each request they get the state of the last row that the
target computed, and the newest token, which the target chose after that row.

Head j drafts the token at position (length of the text) + j.

Dimension key: B requests that draft, G those of all ranks that share the heads, W
works of a step, K levels, V vocabulary, S state rows (of a speculator's state too), L tokens of a
text, D hidden of the target, E and F nodes of a level and of the next one.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.draft import HEAD_WINDOW, DraftSource
from outdraft.distributed.group import ALL_HERE, RequestShares
from outdraft.drafting.device.asks import DraftModelAsk, StateWindow, TargetStates
from outdraft.drafting.device.grower import KnownLevels, compiled_grow, frontier_of_all
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.draft_ops import Frontier, Growth, TreeLevels
from outdraft.kernels.ops import Kernels
from outdraft.models.drafters.medusa import MedusaHeads
from outdraft.models.drafters.mlp_speculator import MLPSpeculator


class HeadDrafter:
    """Drafts with heads, which read the target's state of the last row that the newest step has
    computed for each request. Medusa's heads read no drafts; each head of a speculator reads the
    draft of the head before."""

    state_window = HEAD_WINDOW
    taps: tuple[int, ...] = ()
    reads_all_hidden = False
    max_passes = 1
    max_kept = 0

    def __init__(
        self, heads: MedusaHeads | MLPSpeculator, num_state_rows: int, kernels: Kernels
    ) -> None:
        is_medusa, size = isinstance(heads, MedusaHeads), heads.state_size
        self.source = DraftSource.MEDUSA if is_medusa else DraftSource.MLP
        self.max_drafts = heads.num_heads
        self._heads, self._copy_rows = heads, kernels.copy_rows
        self._window = StateWindow(num_state_rows, size, heads.dtype, heads.device, HEAD_WINDOW)

    def keep(self, states: TargetStates) -> None:
        to_ND, hidden_TD = self._window.features_NF, states.hidden_TD
        self._copy_rows(to_ND, states.last_places_W, hidden_TD, states.last_rows_W)

    def draft(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, growth: Growth
    ) -> DraftBatch:
        levels = self.levels(asks, token_ids_SL, growth.shape.depth, growth.shares)
        return compiled_grow(levels, growth)

    def levels(
        self,
        asks: Sequence[DraftModelAsk],
        token_ids_SL: Tensor,
        depth: int,
        shares: RequestShares = ALL_HERE,
    ) -> TreeLevels:
        """Logits of `depth` levels after this rank's texts."""
        places = [self._window.places(ask.state_row, ask.num_tokens - 2, 1)[0] for ask in asks]
        rows, lengths = [ask.state_row for ask in asks], [ask.num_tokens for ask in asks]
        columns = [np.array(column) for column in (places, rows, lengths)]
        places_G, rows_G, num_tokens_G = to_device(columns, token_ids_SL.device)
        hidden_GD = self._window.features_NF.index_select(0, places_G)
        if isinstance(self._heads, MedusaHeads):
            return KnownLevels(self._heads.logits(hidden_GD, range(depth), shares))
        newest_G = token_ids_SL[rows_G, num_tokens_G - 1]
        return MLPSpeculatorLevels(self._heads, hidden_GD, newest_G, shares)


class MLPSpeculatorLevels:
    """The logits of a level: of the state of every node, kept for those that continue it."""

    def __init__(
        self,
        speculator: MLPSpeculator,
        hidden_GD: Tensor,
        newest_G: Tensor,
        shares: RequestShares = ALL_HERE,
    ) -> None:
        """`newest_G`: the texts' newest tokens."""
        self._speculator, self._shares = speculator, shares
        states_GS = speculator.step(0, speculator.first_state(hidden_GD), newest_G)
        self._states_GES = states_GS[:, None]

    def first_logits(self) -> Tensor:
        """[B, V]: after the last token before the drafts."""
        return self._logits(0)[:, 0]

    def next_logits(self, frontier: Frontier) -> Tensor:
        """[B, F, V]: after the nodes of a level."""
        every, above_GES = frontier_of_all(frontier, self._shares), self._states_GES
        origins_GF1 = every.origins_BF[:, :, None].expand(-1, -1, above_GES.shape[2])
        above_RS = above_GES.gather(1, origins_GF1).flatten(0, 1)
        ids_GF = every.token_ids_BF

        states_RS = self._speculator.step(frontier.depth, above_RS, ids_GF.flatten())
        self._states_GES = states_RS.view(*ids_GF.shape, -1)
        return self._logits(frontier.depth)

    def _logits(self, head: int) -> Tensor:
        """[B, E, V]: of the states of a level."""
        states_RS = self._states_GES.flatten(0, 1)
        logits_RV = self._speculator.logits(head, states_RS, self._shares)
        return logits_RV.unflatten(0, (-1, self._states_GES.shape[1]))
