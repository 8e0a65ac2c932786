"""Engines whose chains get random live rules, which change with every step."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from outdraft.core.decision import LiveStop
from outdraft.core.plan import DraftChoice, StepResult
from outdraft.core.request import ScheduledStep
from outdraft.drafting.device.asks import DraftModelAsk
from outdraft.engine.llm import LLM
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.data.sampling import SamplingBatch
from tests.reference.live_stop import live_lengths

SHARE = 0.8  # of the chains that get a rule


class RandomRules:
    """Gives rules to chains of the network, and checks what the engine is told of them.

    Attributes:
        num_told: drafts that came with margins.
        num_short: those of them that are shorter than planned.
    """

    def __init__(self, llm: LLM, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.num_told = self.num_short = 0
        scheduler = llm.engine.scheduler
        self._schedule, self._commit = scheduler.schedule, scheduler.commit
        scheduler.schedule, scheduler.commit = self.schedule, self.commit

    def schedule(
        self, choices: Mapping[str, DraftChoice], *rest: Any, **named: Any
    ) -> ScheduledStep:
        cap = int(self.rng.integers(1, 12))
        ruled = {of: self._with_rule(one, cap) for of, one in choices.items()}
        return self._schedule(ruled, *rest, **named)

    def commit(self, step: ScheduledStep, result: StepResult) -> Any:
        for work, outcome in zip(step.works, result.works, strict=True):
            if work.drafts is None or work.drafts.stop is None or not work.drafts.num_model_drafts:
                assert outcome.margins is None
                assert len(outcome.drafted_ids) == work.num_drafts
                continue
            assert outcome.margins is not None
            num_left_out = work.num_drafts - len(outcome.drafted_ids)
            num_levels = work.drafts.num_model_drafts - num_left_out
            assert len(outcome.margins) == num_levels + (num_left_out > 0)
            self.num_told += 1
            self.num_short += num_left_out > 0
        return self._commit(step, result)

    def _with_rule(self, choice: DraftChoice, cap: int) -> DraftChoice:
        number = choice.num_model_drafts
        if number == 0 or self.rng.random() > SHARE:
            return choice
        weights, biases = self.rng.normal(0, 1, number), self.rng.normal(1, 1, number)
        price = float(self.rng.choice([0.0, 0.2, 0.5, 0.8]))
        stop = LiveStop(tuple(weights.tolist()), tuple(biases.tolist()), price, cap)
        return structs.replace(choice, stop=stop)


class LookingRules(RandomRules):
    """Gives rules that tell margins and end nothing, as where the host would have to wait."""

    def _with_rule(self, choice: DraftChoice, cap: int) -> DraftChoice:
        zeros = (0.0,) * choice.num_model_drafts
        return structs.replace(choice, stop=LiveStop(zeros, zeros, 0.0)) if zeros else choice


class ComparedRules(RandomRules):
    """Compares every chain with the one that it would be without a rule.

    Attributes:
        num_drafted, num_wanted: levels of chains with rules.
    """

    def __init__(self, llm: LLM, seed: int) -> None:
        super().__init__(llm, seed)
        self.num_drafted = self.num_wanted = 0
        proposer = llm.engine.runner.proposer
        assert proposer is not None
        self._propose = proposer.propose
        proposer.propose = self.propose

    def propose(
        self,
        asks: Sequence[DraftModelAsk],
        token_ids_SL: Tensor,
        sampling: SamplingBatch,
        num_host_rows: int = 0,
    ) -> DraftBatch:
        """Every chain is the beginning of the one without a rule, as long as the rule says."""
        every = [self._with_all_margins(ask) for ask in asks]
        whole = self._propose(every, token_ids_SL, sampling)
        made = self._propose(asks, token_ids_SL, sampling, num_host_rows)
        stops, wanted = [ask.stop for ask in asks], [ask.num_drafts for ask in asks]
        assert whole.margins_BL is not None
        lengths, looked, nearest = live_lengths(
            whole.margins_BL.tolist(), wanted, stops, num_host_rows
        )
        if nearest < 1e-9:  # rounding may decide
            return made
        assert made.num_drafts_B.tolist() == lengths
        for b, (length, margins) in enumerate(zip(lengths, looked, strict=True)):
            own = made.token_ids_BN[b]
            assert torch.equal(own[:length], whole.token_ids_BN[b, :length])
            assert (own[length:] == -1).all()
            if made.margins_BL is not None:
                row = made.margins_BL[b]
                assert row[~row.isnan()].tolist() == margins
        ruled = [b for b, stop in enumerate(stops) if stop is not None]
        self.num_drafted += sum(lengths[b] for b in ruled)
        self.num_wanted += sum(wanted[b] for b in ruled)
        return made

    def _with_all_margins(self, ask: DraftModelAsk) -> DraftModelAsk:
        zeros = (0.0,) * ask.num_drafts
        return structs.replace(ask, stop=LiveStop(zeros, zeros, 0.0))
