"""A step on one rank of several: the target is spread over all, and they share out the rest.

Every rank runs the same plan, and keeps the same texts and keys. What it does alone: its draft
group drafts for the requests that it owns. Each rank chooses the drafts of a part of them, and
verifies these with what they were drawn from. Drafts and verdicts, which are integers, go to all
ranks. Logits go only to the rank that needs their row: each rank has computed the columns of its
part of the vocabulary.

Dimension key: B requests that sample, N most drafts of one of them, R rows whose logits are needed,
D hidden, V vocabulary, J rows of log-probabilities, K best tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.plan import Work
from outdraft.distributed.group import RequestShares
from outdraft.drafting.device.asks import TargetStates
from outdraft.drafting.device.live_stop import with_part_of_cap
from outdraft.kernels.data.drafts import DraftBatch, Rule, Verdict
from outdraft.kernels.data.logits import Scores, request_parts
from outdraft.kernels.data.sampling import SamplingBatch
from outdraft.kernels.decoder_ops import Choice, StepRead
from outdraft.runner.drafts import draft_ask, host_drafts, joined_drafts, num_host_rows
from outdraft.runner.logprobs import wants_logprobs
from outdraft.runner.model_runner import LaunchedStep, ModelRunner
from outdraft.runner.shares import (
    Shares,
    flat_rows,
    joined_choice,
    joined_logprobs,
    joined_scores,
    network_drafts_of_all,
    owned_states,
)
from outdraft.runner.state import RequestSlot, StepTexts
from outdraft.runner.verified_parts import PartToVerify, Verified, joined, logit_rows_of


class ShardedRunner(ModelRunner):
    """The ModelRunner of one rank; all ranks must be given the same plans and masks."""

    def _drafts(
        self, works: Sequence[Work], slots: Sequence[RequestSlot], sampling: SamplingBatch
    ) -> tuple[DraftBatch, DraftBatch]:
        shares = Shares.of(works, self.ranks)
        own = shares.ranks[self.ranks.target.rank]
        own_works = [works[place] for place in own]
        asked = [i for i, work in enumerate(works) if work.num_model_drafts]
        if not asked:
            return host_drafts(works, self.device), host_drafts(own_works, self.device)
        asked_works, are_asked = [works[place] for place in asked], set(asked)
        by_rank = [[i for i in part if i in are_asked] for part in shares.ranks]
        made = self._made(works, slots, by_rank)
        group = self.ranks.target
        everybodys = network_drafts_of_all(made, asked_works, by_rank, group, self.device)
        drafts = joined_drafts(works, asked, everybodys, self.device)
        asked_own = [at for at, place in enumerate(own) if place in are_asked]
        if made is None or not asked_own:
            return drafts, host_drafts(own_works, self.device)
        return drafts, joined_drafts(own_works, asked_own, made, self.device)

    def _made(
        self, works: Sequence[Work], slots: Sequence[RequestSlot], by_rank: Sequence[Sequence[int]]
    ) -> DraftBatch | None:
        """Drafts of this rank's draft group for the works that this rank verifies; None: the
        group drafts nothing.

        Args:
            by_rank: places of the works that the network drafts for, by the rank that verifies.
        """
        own, size = by_rank[self.ranks.target.rank], self.ranks.draft.size
        group = self.ranks.draft_group
        parts = [by_rank[first : first + size] for first in range(0, len(by_rank), size)]
        groups = [[i for part in members for i in part] for members in parts]
        if not groups[group]:
            return None
        assert self.proposer is not None
        asks = [draft_ask(works[i], slots[i]) for i in groups[group]]
        host_rows = 0
        if any(ask.stop for ask in asks):
            host_rows = num_host_rows(works)
            planned = [sum([works[i].num_drafts for i in places]) for places in groups]
            asks = [with_part_of_cap(ask, host_rows, planned, group) for ask in asks]
        sampling = self._sampling_batch([slots[i] for i in own])
        counts = tuple([len(part) for part in parts[group]])
        requests = RequestShares(self.ranks.draft, counts)
        texts_SL = self.state.token_ids_SL
        return self.proposer.propose(asks, texts_SL, sampling, host_rows, requests)

    def _rule(self, sampling: SamplingBatch) -> Rule | None:
        """The pass chooses for greedy requests only; else the ranks share out the choices."""
        return super()._rule(sampling) if sampling.is_plain_greedy else None

    def _verified(self, step: LaunchedStep) -> Verified:
        if step.target.choice is not None:
            return super()._verified(step)  # of all, on every rank
        assert step.drafts is not None
        group, shares = self.ranks.target, Shares.of(step.works, self.ranks)
        width = step.drafts.width
        nothing = torch.zeros(0, 0, dtype=torch.int64, device=self.device)
        verdict = Verdict(nothing.new_zeros(0, 1), nothing[:, :0].sum(1), nothing).widened(width)
        own, emitted = Choice(verdict, nothing.new_ones(0, dtype=torch.bool)), None
        if made := self._made_verdicts(step, shares):
            own, emitted = joined(made)
        choice = joined_choice(own, shares, group)
        if not wants_logprobs(step.slots):
            return choice, None
        return choice, joined_logprobs(emitted, step.slots, shares, width, group, self.device)

    def _made_verdicts(self, step: LaunchedStep, shares: Shares) -> list[Verified]:
        """On the requests that this rank verifies, part by part: in each round every rank gets the
        logits of one part of its requests."""
        assert step.drafts is not None
        group, vocab_size = self.ranks.target, self.model.config.vocab_size
        hidden_RD = step.target.logit_states_RD
        verifier = self._part_verifier(step, step.drafts.width)
        most = logit_rows_of(self.model, hidden_RD)
        parts = [
            request_parts([shares.num_rows[at] - 1 for at in own], most, is_padded=True)
            if own
            else []
            for own in shares.ranks
        ]
        own, made = self._own(step, shares), list[Verified]()
        for round_ in range(max(map(len, parts))):
            places, counts = list[int](), list[int]()
            for all_own, own_parts in zip(shares.ranks, parts, strict=True):
                some = [
                    place
                    for part in own_parts[round_ : round_ + 1]
                    for place in all_own[part.requests]
                ]
                places += some
                counts.append(sum([shares.num_rows[place] for place in some]))
            (rows_R,) = to_device([flat_rows(shares.num_rows, places)], self.device)
            logits_RV = self.model.logits(hidden_RD.index_select(0, rows_R))
            logits_RV = group.turn(logits_RV, counts)[:, :vocab_size]
            for part in parts[group.rank][round_ : round_ + 1]:
                made.append(verifier.verified_by(logits_RV, own.of(part)))
        return made

    def _own(self, step: LaunchedStep, shares: Shares) -> PartToVerify:
        """The requests that this rank verifies, with their drafts."""
        assert step.own_drafts is not None
        own = shares.ranks[self.ranks.target.rank]
        own_B, own_R = to_device(
            [np.array(own, dtype=np.int64), flat_rows(shares.num_rows, own)], self.device
        )
        slots = [step.slots[place] for place in own]
        masks = None if step.masks is None else step.masks.part(own_B, own_R)
        texts = StepTexts(*(each.index_select(0, own_B) for each in step.target.rows.extra))
        return PartToVerify(slots, step.own_drafts, self._sampling_batch(slots), texts, masks)

    def _states(
        self, works: Sequence[Work], target: StepRead, choice: Choice | None
    ) -> TargetStates:
        """States of the requests that this rank drafts for."""
        states = super()._states(works, target, choice)
        return owned_states(states, works, self.ranks.draft_group)

    def _scored(self, hidden_RD: Tensor, chosen_R: Tensor, num_top: int) -> Scores:
        # Without a name here the logits end where they are turned.
        return joined_scores(
            self.model.kernels,
            self.model.logits(hidden_RD),
            self.model.config.vocab_size,
            chosen_R,
            num_top,
            self.ranks.target,
        )
