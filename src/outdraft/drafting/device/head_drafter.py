"""Drafts with heads on the target's last hidden state: Medusa and MLP speculators.

Heads have no cache and read no text. For each request they get the state of the last row that the
target computed, and the newest token, which the target chose behind that row.

Head j drafts the token at position (length of the text) + j. Another proposer may have drafted the
first tokens. Then Medusa's first heads are not used, and an MLP speculator reads these tokens in
place of its own.

Dimension key: B requests that draft, K levels, V vocabulary, S state rows (of a speculator's state
too), L tokens of a text, D hidden of the target, E and F nodes of a level and of the next one.
"""

from collections.abc import Callable, Sequence

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
from outdraft.models.medusa import MedusaHeads
from outdraft.models.mlp_speculator import MLPSpeculator


class LastHidden:
    """The target's state of the last row that it computed for each request."""

    def __init__(
        self, num_state_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.hidden_SD = torch.zeros(num_state_rows, hidden_size, dtype=dtype, device=device)

    def keep(self, states: TargetStates) -> None:
        last_BD = states.hidden_TD[states.last_rows_B]
        self.hidden_SD.index_copy_(0, states.state_rows_B.long(), last_BD)


class FirstHeads:
    """Which head drafts first for each request: the one of the first place that is free."""

    def __init__(
        self, asks: Sequence[DraftModelAsk], num_heads: int, depth: int, device: torch.device
    ) -> None:
        starts = [len(ask.continued) for ask in asks]
        ends = [len(ask.continued) + min(ask.num_drafts, depth) for ask in asks]
        assert max(ends) <= num_heads, "more drafts than heads"
        self.distinct = sorted(set(starts))
        self.used = range(self.distinct[0], min(self.distinct[-1] + depth, num_heads))
        (self.of_requests_B,) = to_device([np.array(starts)], device)

    def at_level(self, level: int, answer: Callable[[int], Tensor]) -> Tensor:
        """[B, ...]: what the head of each request answers; `answer` gives a head's for all."""
        first, *others = self.distinct
        result = answer(first + level)
        for start in others:  # who needs no more heads gets the last one's
            own = answer(min(start + level, self.used[-1]))
            is_own_B = self.of_requests_B == start
            result = torch.where(is_own_B.view(-1, *[1] * (own.dim() - 1)), own, result)
        return result


class MedusaDrafter(LevelDrafter):
    """No head looks at what the others have drafted."""

    state_window = 1
    taps: tuple[int, ...] = ()
    max_passes = 1

    def __init__(self, heads: MedusaHeads, num_state_rows: int) -> None:
        self.drafting = ModelDrafting(DraftSource.MEDUSA, max_kept=0)
        self.max_drafts = heads.num_heads
        size = heads.config.hidden_size
        self._heads, self._last = heads, LastHidden(num_state_rows, size, heads.dtype, heads.device)
        self.keep = self._last.keep

    def levels(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, depth: int
    ) -> KnownLevels:
        """What may follow the texts, so many levels deep."""
        firsts = FirstHeads(asks, self._heads.num_heads, depth, token_ids_SL.device)
        (rows_B,) = to_device([np.array([ask.state_row for ask in asks])], token_ids_SL.device)
        logits_BJV = self._heads.logits(self._last.hidden_SD[rows_B], firsts.used)
        if len(firsts.distinct) == 1:
            return KnownLevels(logits_BJV)
        levels = [
            firsts.at_level(level, lambda head: logits_BJV[:, head - firsts.used.start])
            for level in range(depth)
        ]
        return KnownLevels(torch.stack(levels, dim=1))


class MLPSpeculatorDrafter(LevelDrafter):
    """Each head reads the draft of the head before it."""

    state_window = 1
    taps: tuple[int, ...] = ()
    max_passes = 1

    def __init__(self, speculator: MLPSpeculator, num_state_rows: int) -> None:
        self.drafting = ModelDrafting(DraftSource.MLP, max_kept=0)
        self.max_drafts = speculator.num_heads
        size, dtype = speculator.config.emb_dim, speculator.dtype
        self._speculator = speculator
        self._last = LastHidden(num_state_rows, size, dtype, speculator.device)
        self.keep = self._last.keep

    def levels(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, depth: int
    ) -> "MLPSpeculatorLevels":
        """What may follow the texts, so many levels deep."""
        firsts = FirstHeads(asks, self._speculator.num_heads, depth, token_ids_SL.device)
        given_BJ = np.zeros((len(asks), firsts.distinct[-1]), dtype=np.int64)
        for given_J, ask in zip(given_BJ, asks, strict=True):
            given_J[: len(ask.continued)] = ask.continued
        rows_B, num_tokens_B, given = to_device(
            [
                np.array([ask.state_row for ask in asks]),
                np.array([ask.num_tokens for ask in asks]),
                given_BJ,
            ],
            token_ids_SL.device,
        )
        newest_B = token_ids_SL[rows_B, num_tokens_B - 1]
        ids_BJ1 = torch.cat([newest_B[:, None], given], dim=1)
        hidden_BD = self._last.hidden_SD[rows_B]
        return MLPSpeculatorLevels(self._speculator, firsts, hidden_BD, ids_BJ1)


class MLPSpeculatorLevels:
    """The logits of a level: of the state of every node, kept for those that continue it."""

    def __init__(
        self,
        speculator: MLPSpeculator,
        firsts: FirstHeads,
        hidden_BD: Tensor,
        token_ids_BJ: Tensor,
    ) -> None:
        """`token_ids_BJ`: the newest token, and what others have drafted behind it."""
        self._speculator, self._firsts = speculator, firsts
        state_BS = speculator.first_state(hidden_BD)
        for head in range(token_ids_BJ.shape[1]):
            next_BS = speculator.step(head, state_BS, token_ids_BJ[:, head])
            reads_B1 = (head <= firsts.of_requests_B)[:, None]
            state_BS = next_BS if head == 0 else torch.where(reads_B1, next_BS, state_BS)
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

        def step(head: int) -> Tensor:
            return self._speculator.step(head, above_RS, ids_R).view(*shape, -1)

        self._states_BES = self._firsts.at_level(frontier.depth, step)
        return self._logits(frontier.depth)

    def _logits(self, level: int) -> Tensor:
        """[B, E, V]: of the states of a level."""
        states_BES = self._states_BES
        states_RS = states_BES.flatten(0, 1)

        def logits(head: int) -> Tensor:
            return self._speculator.logits(head, states_RS).view(*states_BES.shape[:2], -1)

        return self._firsts.at_level(level, logits)
