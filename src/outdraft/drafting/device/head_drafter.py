"""Drafts with heads on the target's last hidden state: Medusa and MLP speculators.

Heads have no cache and read no text. For each request they get the state of the last row that the
target computed, and the newest token, which the target chose behind that row.

Head j drafts the token at position (length of the text) + j.

Dimension key: B requests that draft, K levels, V vocabulary, S state rows (of a speculator's state
too), L tokens of a text, D hidden of the target, E and F nodes of a level and of the next one.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.draft import DraftSource
from outdraft.core.plan import ModelDrafting
from outdraft.drafting.device.grower import KnownLevels, LevelDrafter
from outdraft.drafting.device.model_drafts import DraftModelAsk
from outdraft.drafting.device.target_states import TargetStates
from outdraft.kernels.draft_ops import Frontier
from outdraft.kernels.ops import Kernels
from outdraft.models.medusa import MedusaHeads
from outdraft.models.mlp_speculator import MLPSpeculator


class LastHidden:
    """The target's state of the last row that it computed for each request."""

    def __init__(
        self,
        num_state_rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        self.hidden_SD = torch.zeros(num_state_rows, hidden_size, dtype=dtype, device=device)
        self._copy_rows = kernels.copy_rows

    def keep(self, states: TargetStates) -> None:
        """As `Drafter.keep`."""
        self._copy_rows(self.hidden_SD, states.state_rows_W, states.hidden_TD, states.last_rows_W)


class MedusaDrafter(LevelDrafter):
    """No head looks at what the others have drafted."""

    state_window = 1
    taps: tuple[int, ...] = ()
    max_passes = 1

    def __init__(self, heads: MedusaHeads, num_state_rows: int, kernels: Kernels) -> None:
        self.drafting = ModelDrafting(DraftSource.MEDUSA, max_kept=0)
        self.max_drafts = heads.num_heads
        size = heads.config.hidden_size
        self._heads = heads
        self._last = LastHidden(num_state_rows, size, heads.dtype, heads.device, kernels)
        self.keep = self._last.keep

    def levels(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, depth: int
    ) -> KnownLevels:
        """What may follow the texts, so many levels deep."""
        (rows_B,) = to_device([np.array([ask.state_row for ask in asks])], token_ids_SL.device)
        return KnownLevels(
            self._heads.logits(self._last.hidden_SD.index_select(0, rows_B), range(depth))
        )


class MLPSpeculatorDrafter(LevelDrafter):
    """Each head reads the draft of the head before it."""

    state_window = 1
    taps: tuple[int, ...] = ()
    max_passes = 1

    def __init__(self, speculator: MLPSpeculator, num_state_rows: int, kernels: Kernels) -> None:
        self.drafting = ModelDrafting(DraftSource.MLP, max_kept=0)
        self.max_drafts = speculator.num_heads
        size, dtype = speculator.config.emb_dim, speculator.dtype
        self._speculator = speculator
        self._last = LastHidden(num_state_rows, size, dtype, speculator.device, kernels)
        self.keep = self._last.keep

    def levels(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, depth: int
    ) -> "MLPSpeculatorLevels":
        """What may follow the texts, so many levels deep."""
        rows_B, num_tokens_B = to_device(
            [
                np.array([ask.state_row for ask in asks]),
                np.array([ask.num_tokens for ask in asks]),
            ],
            token_ids_SL.device,
        )
        newest_B = token_ids_SL[rows_B, num_tokens_B - 1]
        return MLPSpeculatorLevels(
            self._speculator, self._last.hidden_SD.index_select(0, rows_B), newest_B
        )


class MLPSpeculatorLevels:
    """The logits of a level: of the state of every node, kept for those that continue it."""

    def __init__(self, speculator: MLPSpeculator, hidden_BD: Tensor, newest_B: Tensor) -> None:
        """`newest_B`: the texts' newest tokens."""
        self._speculator = speculator
        state_BS = speculator.step(0, speculator.first_state(hidden_BD), newest_B)
        self._states_BES = state_BS[:, None]

    def first_logits(self) -> Tensor:
        """[B, V]: behind the last token before the drafts."""
        return self._logits(0)[:, 0]

    def next_logits(self, frontier: Frontier) -> Tensor:
        """[B, F, V]: behind the nodes of a level."""
        shape, above_BES = frontier.token_ids_BF.shape, self._states_BES
        origins_BF1 = frontier.origins_BF[:, :, None].expand(-1, -1, above_BES.shape[2])
        above_RS = above_BES.gather(1, origins_BF1).flatten(0, 1)
        ids_R = frontier.token_ids_BF.flatten()

        states_RS = self._speculator.step(frontier.depth, above_RS, ids_R)
        self._states_BES = states_RS.view(*shape, -1)
        return self._logits(frontier.depth)

    def _logits(self, head: int) -> Tensor:
        """[B, E, V]: of the states of a level."""
        states_RS = self._states_BES.flatten(0, 1)
        logits_RV = self._speculator.logits(head, states_RS)
        return logits_RV.view(*self._states_BES.shape[:2], -1)
