"""Drafts with heads on the target's last hidden state: Medusa and MLP speculators.

Heads have no cache and read no text. For each request they get the state of the last row that the
target computed, and the newest token, which the target chose behind that row.

Head j drafts the token at position (length of the text) + j. Another proposer may have drafted the
first tokens. Then Medusa's first heads are not used, and an MLP speculator reads these tokens in
place of its own.

Dimension key: B requests that draft, J heads that are used, K drafts, V vocabulary, S state rows
(of a speculator's state too), L tokens of a text, D hidden of the target, F nodes of a tree's
level.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.draft import DraftSource
from outdraft.core.plan import ModelDrafting
from outdraft.drafting.device.draft_sampling import drafting_parameters, sample_drafts
from outdraft.drafting.device.draft_tree import Frontier
from outdraft.drafting.device.model_drafts import (
    DraftModelAsk,
    ModelDrafts,
    sampled_chains,
    without_surplus,
)
from outdraft.drafting.device.target_states import TargetStates
from outdraft.models.medusa import MedusaHeads
from outdraft.models.mlp_speculator import MLPSpeculator
from outdraft.sampling.batch import SamplingBatch


class LastHidden:
    """The target's state of the last row that it computed for each request."""

    def __init__(
        self, num_state_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.hidden_SD = torch.zeros(num_state_rows, hidden_size, dtype=dtype, device=device)

    def keep(self, states: TargetStates) -> None:
        last_BD = states.hidden_TD[states.last_rows_B]
        self.hidden_SD.index_copy_(0, states.state_rows_B.long(), last_BD)


@dataclass(frozen=True, slots=True)
class HeadBatch:
    """What the heads of a step begin with. All tensors are on the device.

    Attributes:
        hidden_BD: the target's last hidden states.
        num_tokens_B: int64, length of each text.
        newest_B: int64, its last token.
        given_BJ: int64; what another proposer has drafted in the place of each head, else -1.
        starts_B: int64; the first head that drafts for each request.
        first_head: the smallest value of starts_B.
        is_even: whether all values of starts_B are the same; the host knows it.
        num_heads: J; no request needs a head after these.
    """

    hidden_BD: Tensor
    num_tokens_B: Tensor
    newest_B: Tensor
    given_BJ: Tensor
    starts_B: Tensor
    first_head: int
    is_even: bool
    num_heads: int

    @classmethod
    def of(
        cls, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, last: LastHidden
    ) -> "HeadBatch":
        starts = [len(ask.continued) for ask in asks]
        num_heads = max(len(ask.continued) + ask.num_drafts for ask in asks)
        given_BJ = np.full((len(asks), num_heads), -1, dtype=np.int64)
        for given_J, ask in zip(given_BJ, asks, strict=True):
            given_J[: len(ask.continued)] = ask.continued
        rows_B, num_tokens_B, starts_B, given = to_device(
            [
                np.array([ask.state_row for ask in asks]),
                np.array([ask.num_tokens for ask in asks]),
                np.array(starts),
                given_BJ,
            ],
            token_ids_SL.device,
        )
        return cls(
            hidden_BD=last.hidden_SD[rows_B],
            num_tokens_B=num_tokens_B,
            newest_B=token_ids_SL[rows_B, num_tokens_B - 1],
            given_BJ=given,
            starts_B=starts_B,
            first_head=min(starts),
            is_even=min(starts) == max(starts),
            num_heads=num_heads,
        )

    @property
    def is_behind_text(self) -> bool:
        """No other proposer has drafted anything."""
        return self.is_even and self.first_head == 0

    def columns(self, of_heads: Tensor, num_drafts: int) -> Tensor:
        """[B, K, ...]: each request's drafts, out of what heads from first_head on have made."""
        if self.is_even:
            return of_heads
        places_K = torch.arange(num_drafts, device=of_heads.device)
        heads_BK = self.starts_B[:, None] - self.first_head + places_K
        heads_BK = heads_BK.clamp(
            max=of_heads.shape[1] - 1
        )  # past the drafts of a request that wants fewer
        requests_B1 = torch.arange(len(of_heads), device=of_heads.device)[:, None]
        return of_heads[requests_B1, heads_BK]


class _HeadProposer:
    """What proposers with heads have in common.

    Attributes:
        max_drafts: heads, each of which drafts one token.
    """

    reads_states = True
    taps: tuple[int, ...] = ()
    max_passes = 1

    def __init__(
        self,
        heads: MedusaHeads | MLPSpeculator,
        hidden_size: int,
        num_state_rows: int,
        source: DraftSource,
        *,
        samples: bool,
    ) -> None:
        self.drafting = ModelDrafting(source, max_kept=0)
        self.max_drafts = heads.num_heads
        self._last = LastHidden(num_state_rows, hidden_size, heads.dtype, heads.device)
        self._samples = samples

    def keep(self, states: TargetStates) -> None:
        """The target has computed these."""
        self._last.keep(states)


class MedusaProposer(_HeadProposer):
    """Drafts chains in which no token depends on the drafts before it."""

    def __init__(self, heads: MedusaHeads, num_state_rows: int, *, samples: bool) -> None:
        """`samples`: draw drafts from the heads' distributions instead of taking the best."""
        super().__init__(
            heads,
            heads.config.hidden_size,
            num_state_rows,
            DraftSource.MEDUSA,
            samples=samples,
        )
        self.heads = heads

    def propose(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, sampling: SamplingBatch
    ) -> ModelDrafts:
        """Draft for all asks; `sampling` has their requests in the same order."""
        batch = HeadBatch.of(asks, token_ids_SL, self._last)
        assert batch.num_heads <= self.heads.num_heads, "more drafts than heads"
        heads = range(batch.first_head, batch.num_heads)
        num_drafts = [ask.num_drafts for ask in asks]
        sampling = drafting_parameters(sampling)
        if sampling.is_plain_greedy or not self._samples:
            best_BK = self.heads.best_tokens(batch.hidden_BD, heads)
            drafts = ModelDrafts(batch.columns(best_BK, max(num_drafts)))
        else:
            drafts = self._sample(batch, heads, max(num_drafts), sampling)
        return without_surplus(drafts, num_drafts)

    def levels(self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor) -> "MedusaLevels":
        """For drafts that are trees."""
        return MedusaLevels(self.heads, HeadBatch.of(asks, token_ids_SL, self._last))

    def _sample(
        self, batch: HeadBatch, heads: range, num_drafts: int, sampling: SamplingBatch
    ) -> ModelDrafts:
        logits_BKV = batch.columns(self.heads.logits(batch.hidden_BD, heads), num_drafts)
        requests_B = torch.arange(len(logits_BKV), device=logits_BKV.device)
        depths_K = torch.arange(num_drafts, device=logits_BKV.device)
        positions_BK = (batch.num_tokens_B + batch.starts_B)[:, None] + depths_K
        ids_R, probs_RV = sample_drafts(
            logits_BKV.flatten(0, 1),
            requests_B.repeat_interleave(num_drafts),
            positions_BK.flatten(),
            batch.num_tokens_B.repeat_interleave(num_drafts),
            sampling,
        )
        return sampled_chains(
            ids_R.view(-1, num_drafts), probs_RV.view(-1, *logits_BKV.shape[1:]), sampling
        )


class MLPSpeculatorProposer(_HeadProposer):
    """Drafts chains with a recurrence that reads each draft before it draws the next one."""

    def __init__(self, speculator: MLPSpeculator, num_state_rows: int, *, samples: bool) -> None:
        """`samples`: draw drafts from the heads' distributions instead of taking the best."""
        super().__init__(
            speculator,
            speculator.config.emb_dim,
            num_state_rows,
            DraftSource.MLP,
            samples=samples,
        )
        self.speculator = speculator

    def propose(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, sampling: SamplingBatch
    ) -> ModelDrafts:
        """Draft for all asks; `sampling` has their requests in the same order."""
        batch = HeadBatch.of(asks, token_ids_SL, self._last)
        assert batch.num_heads <= self.speculator.num_heads, "more drafts than heads"
        sampling = drafting_parameters(sampling)
        draws = self._samples and not sampling.is_plain_greedy
        requests_B = torch.arange(len(asks), device=token_ids_SL.device)
        state_BS, token_ids_B = self.speculator.first_state(batch.hidden_BD), batch.newest_B
        ids: list[Tensor] = []
        probs: list[Tensor] = []
        for head in range(batch.num_heads):
            state_BS = self.speculator.step(head, state_BS, token_ids_B)
            given_B = batch.given_BJ[:, head]
            if head < batch.first_head:
                token_ids_B = given_B
                continue
            if draws:
                token_ids_B, probs_BV = sample_drafts(
                    self.speculator.logits(head, state_BS),
                    requests_B,
                    batch.num_tokens_B + head,
                    batch.num_tokens_B,
                    sampling,
                )
                probs.append(probs_BV)
            else:
                token_ids_B = self.speculator.best_tokens(head, state_BS)
            token_ids_B = torch.where(given_B < 0, token_ids_B, given_B)
            ids.append(token_ids_B)
        num_drafts = [ask.num_drafts for ask in asks]
        drafts = ModelDrafts(batch.columns(torch.stack(ids, dim=1), max(num_drafts)))
        if draws:
            probs_BKV = batch.columns(torch.stack(probs, dim=1), max(num_drafts))
            drafts = sampled_chains(drafts.token_ids_BK, probs_BKV, sampling)
        return without_surplus(drafts, num_drafts)

    def levels(self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor) -> "MLPSpeculatorLevels":
        """For drafts that are trees."""
        batch = HeadBatch.of(asks, token_ids_SL, self._last)
        return MLPSpeculatorLevels(self.speculator, batch)


class MedusaLevels:
    """The logits of a tree's levels: those of one head behind all nodes of a level."""

    def __init__(self, heads: MedusaHeads, batch: HeadBatch) -> None:
        assert batch.is_behind_text, "a tree begins behind the text"
        self._heads = heads
        self._hidden_BD = batch.hidden_BD

    def first_logits(self) -> Tensor:
        """[B, V]: behind the newest token."""
        return self._heads.logits(self._hidden_BD, range(1))[:, 0]

    def next_logits(self, frontier: Frontier) -> Tensor:
        """[B, F, V]: behind the nodes of a level."""
        logits_B1V = self._heads.logits(self._hidden_BD, range(frontier.depth, frontier.depth + 1))
        return logits_B1V.expand(-1, frontier.token_ids_BF.shape[1], -1)


class MLPSpeculatorLevels:
    """The logits of a tree's levels: of the state of every node, kept for those that continue it.

    Levels come in order, each once.
    """

    def __init__(self, speculator: MLPSpeculator, batch: HeadBatch) -> None:
        assert batch.is_behind_text, "a tree begins behind the text"
        self._speculator = speculator
        state_BS = speculator.first_state(batch.hidden_BD)
        state_BS = speculator.step(0, state_BS, batch.newest_B)
        self._states_BFS = state_BS[:, None]

    def first_logits(self) -> Tensor:
        """[B, V]: behind the newest token."""
        return self._speculator.logits(0, self._states_BFS[:, 0])

    def next_logits(self, frontier: Frontier) -> Tensor:
        """[B, F, V]: behind the nodes of a level."""
        level, shape = frontier.depth, frontier.token_ids_BF.shape
        requests_B1 = torch.arange(shape[0], device=self._states_BFS.device)[:, None]
        states_BFS = self._states_BFS[requests_B1, frontier.origins_BF]
        states_RS = self._speculator.step(
            level, states_BFS.flatten(0, 1), frontier.token_ids_BF.flatten()
        )
        self._states_BFS = states_RS.view(*shape, -1)
        return self._speculator.logits(level, states_RS).view(*shape, -1)
