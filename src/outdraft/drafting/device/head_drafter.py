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
import torch
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.draft import HEAD_WINDOW, DraftSource
from outdraft.core.plan import ModelDrafting
from outdraft.distributed.group import ALL_HERE, RequestShares
from outdraft.drafting.device.asks import DraftModelAsk, StateWindow, TargetStates
from outdraft.drafting.device.grower import KnownLevels, LevelDrafter, frontier_of_all
from outdraft.kernels.draft_ops import Frontier
from outdraft.kernels.ops import Kernels
from outdraft.models.drafters.medusa import MedusaHeads
from outdraft.models.drafters.mlp_speculator import MLPSpeculator


class LastHidden:
    """The target's states of the last rows that the newest steps computed for each request."""

    def __init__(
        self,
        num_state_rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        self._window = StateWindow(num_state_rows, hidden_size, dtype, device, HEAD_WINDOW)
        self._copy_rows = kernels.copy_rows

    def keep(self, states: TargetStates) -> None:
        to_ND, hidden_TD = self._window.features_NF, states.hidden_TD
        self._copy_rows(to_ND, states.last_places_W, hidden_TD, states.last_rows_W)

    def find(self, asks: Sequence[DraftModelAsk], device: torch.device) -> Tensor:
        """[B, D]: the newest state of each text."""
        places = [self._window.places(ask.state_row, ask.num_tokens - 2, 1)[0] for ask in asks]
        (places_B,) = to_device([np.array(places)], device)
        return self._window.features_NF.index_select(0, places_B)


class MedusaDrafter(LevelDrafter):
    """Drafts with heads that do not read the drafts of other heads."""

    state_window = HEAD_WINDOW
    taps: tuple[int, ...] = ()
    reads_all_hidden = False
    max_passes = 1

    def __init__(self, heads: MedusaHeads, num_state_rows: int, kernels: Kernels) -> None:
        self.drafting = ModelDrafting(DraftSource.MEDUSA, max_kept=0)
        self.max_drafts = heads.num_heads
        size = heads.config.hidden_size
        self._heads = heads
        self._last = LastHidden(num_state_rows, size, heads.dtype, heads.device, kernels)
        self.keep = self._last.keep

    def levels(
        self,
        asks: Sequence[DraftModelAsk],
        token_ids_SL: Tensor,
        depth: int,
        shares: RequestShares = ALL_HERE,
    ) -> KnownLevels:
        hidden_GD = self._last.find(asks, token_ids_SL.device)
        return KnownLevels(self._heads.logits(hidden_GD, range(depth), shares))


class MLPSpeculatorDrafter(LevelDrafter):
    """Drafts with heads that each read the draft of the head before."""

    state_window = HEAD_WINDOW
    taps: tuple[int, ...] = ()
    reads_all_hidden = False
    max_passes = 1

    def __init__(self, speculator: MLPSpeculator, num_state_rows: int, kernels: Kernels) -> None:
        self.drafting = ModelDrafting(DraftSource.MLP, max_kept=0)
        self.max_drafts = speculator.num_heads
        size, dtype = speculator.config.emb_dim, speculator.dtype
        self._speculator = speculator
        self._last = LastHidden(num_state_rows, size, dtype, speculator.device, kernels)
        self.keep = self._last.keep

    def levels(
        self,
        asks: Sequence[DraftModelAsk],
        token_ids_SL: Tensor,
        depth: int,
        shares: RequestShares = ALL_HERE,
    ) -> "MLPSpeculatorLevels":
        rows_G, num_tokens_G = to_device(
            [
                np.array([ask.state_row for ask in asks]),
                np.array([ask.num_tokens for ask in asks]),
            ],
            token_ids_SL.device,
        )
        newest_G = token_ids_SL[rows_G, num_tokens_G - 1]
        hidden_GD = self._last.find(asks, token_ids_SL.device)
        return MLPSpeculatorLevels(self._speculator, hidden_GD, newest_G, shares)


def first_states(speculator: MLPSpeculator, hidden_RD: Tensor, ids_R: Tensor) -> Tensor:
    """[R, S]: after tokens, and the target's states before them."""
    return speculator.step(0, speculator.first_state(hidden_RD), ids_R)


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
        self._states_GES = first_states(speculator, hidden_GD, newest_G)[:, None]

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
