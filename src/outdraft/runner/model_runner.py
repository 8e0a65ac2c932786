"""One step on the device: draft, target forward, verify, keep what was accepted.

`launch` issues everything and waits for nothing: the verifier writes sampled ids to the device
state, and the drafter and the target of the next step read them there. `collect` is the only place
where the host waits, once a step. If outputs keep to grammars, `launch` issues a step up to the
target's pass, and `verify` the rest, once there are masks; `drafted` waits for a network's drafts.

Dimension key: B requests that sample in this step, N most drafts of one of them, T rows,
R rows whose logits are needed, D hidden, V vocabulary, L tokens, W words of a mask of its bits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outdraft.core.grammar import AllowedTokens, GrammarDrafts
from outdraft.core.plan import StepPlan, StepResult, Work
from outdraft.distributed.group import ONE_RANK, Ranks
from outdraft.drafting.device.asks import TargetStates
from outdraft.drafting.device.proposer import DeviceProposer
from outdraft.kernels.data.drafts import DraftBatch, Rule
from outdraft.kernels.data.logits import Scores
from outdraft.kernels.data.sampling import SamplingBatch
from outdraft.kernels.decoder_ops import Choice, StatesOf, StepRead, StepTask
from outdraft.kernels.torch.rows import append_token_ids, place_states
from outdraft.kv.cache import KVCache
from outdraft.models.base import LanguageModel
from outdraft.runner.drafts import (
    as_drafted,
    chunk_reads,
    copy_of_drafted,
    draft_ask,
    host_drafts,
    joined_drafts,
    num_host_rows,
    spread_rows,
)
from outdraft.runner.logprobs import (
    PROMPT_ROWS,
    LogprobRows,
    most_logprobs,
    prompt_logprobs,
    wants_logprobs,
    wants_prompt_logprobs,
)
from outdraft.runner.results import HostCopy, PendingStep, PhaseClock, to_host, work_results
from outdraft.runner.state import DeviceState, RequestSlot, StepTexts
from outdraft.runner.step_rows import read_by_parts, step_spans
from outdraft.runner.verified_parts import (
    GrammarMasks,
    PartToVerify,
    PartVerifier,
    Verified,
    logit_rows_of,
    masks_of,
)
from outdraft.verification.verifier import Verifier


class ModelRunner:
    """Owns the target, its cache, the device's proposer if there is one, and the device's state."""

    def __init__(
        self,
        model: LanguageModel,
        cache: KVCache,
        state: DeviceState,
        verifier: Verifier,
        proposer: DeviceProposer | None = None,
        *,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """`ranks`: the model and the proposer's network are spread over them."""
        self.ranks = ranks
        self.model = model
        self.cache = cache
        self.state = state
        self.verifier = verifier
        self.proposer = proposer
        self._taps = proposer.drafter.taps if proposer is not None else ()
        self._reads_all_hidden = proposer is not None and proposer.drafter.reads_all_hidden
        self.device = state.token_ids_SL.device
        self._slots: dict[int, RequestSlot] = {}
        self._sampling: dict[tuple[RequestSlot, ...], SamplingBatch] = {}

    @property
    def num_draft_groups(self) -> int:
        """Groups of ranks that draft at the same time, each for the requests that it owns."""
        return self.ranks.num_draft_groups

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> "PendingStep | LaunchedStep":
        """Issue a whole step and the copy of its results; it waits for nothing.

        If a token that is chosen must keep to a grammar, it stops after the target's pass, and
        `verify` issues the rest.
        """
        clock = PhaseClock(self.device, self.model.kernels.warm_ups)
        clock.mark()
        self._take_news(plan)
        works = [work for work in plan.works if work.samples]
        slots = [self._slots[work.slot] for work in works]
        sampling = self._sampling_batch(slots) if works else None
        drafts, own = self._drafts(works, slots, sampling) if sampling else (None, None)
        if drafts is not None and drafts.margins_BL is not None:
            plan = as_drafted(plan, drafts)
            works = [work for work in plan.works if work.samples]
        drafted = copy_of_drafted(works, self._slots, drafts) if drafts else None
        clock.mark()
        chooses = sampling if sampling and not wants_logprobs(slots) else None
        target = self._forward(plan, drafts, chooses)
        prompt = None
        if target.states_TD is not None:
            num_rows = min(PROMPT_ROWS, logit_rows_of(self.model, target.states_TD))
            of_all = plan.works, self._slots, target.states_TD
            prompt = prompt_logprobs(*of_all, self._scored, num_rows)
        clock.mark()
        step = LaunchedStep(
            plan, works, slots, target, drafts, own, sampling, drafted, prompt, clock
        )
        if sampling is not None and sampling.has_grammar:
            return step
        return self._verify(step)

    def drafted(self, step: "LaunchedStep") -> GrammarDrafts:
        """Drafts that masks must be made for. Waits for the network if it drafts for a grammar."""
        drafts_2BN = step.drafted.wait()[0].numpy() if step.drafted is not None else None
        return GrammarDrafts(tuple(work.num_drafts for work in step.works), drafts_2BN)

    @torch.inference_mode()
    def verify(self, step: "LaunchedStep", allowed: AllowedTokens) -> PendingStep:
        """Issue the rest of a step with grammars, and the copy of its results."""
        assert step.drafts is not None
        return self._verify(step._replace(masks=masks_of(allowed, step.drafts)))

    def collect(self, pending: PendingStep) -> StepResult:
        """Wait for a step: its one host synchronisation."""
        works = work_results(pending)
        return StepResult(works, pending.plan.num_rows, pending.clock.times())

    def _take_news(self, plan: StepPlan) -> None:
        """Keep the plan's news of its requests."""
        for admission in plan.admissions:
            self._slots[admission.slot] = RequestSlot(admission)
        self.state.admit(plan.admissions)
        for work in plan.works:
            self._slots[work.slot].update(work)

    def _sampling_batch(self, slots: Sequence[RequestSlot]) -> SamplingBatch:
        """The requests' rules on the device; kept while the same requests sample."""
        key = tuple(slots)
        batch = self._sampling.get(key)
        if batch is None:
            batch = SamplingBatch.from_rules(
                [slot.rules for slot in slots],
                vocab_size=self.model.config.vocab_size,
                device=self.device,
                shares_noise=self.verifier.method == "drafter_invariant",
            )
            # The whole batch, and the parts of it that the network drafts for, and that are
            # verified here.
            self._sampling = dict([*self._sampling.items(), (key, batch)][-3:])
        return batch

    def _drafts(
        self, works: Sequence[Work], slots: Sequence[RequestSlot], sampling: SamplingBatch
    ) -> tuple[DraftBatch, DraftBatch]:
        """The host's drafts, and those that the draft model makes now: of all requests, and of
        those that are verified here."""
        asked = [i for i, work in enumerate(works) if work.num_model_drafts]
        if not asked:
            drafts = host_drafts(works, self.device)
            return drafts, drafts
        assert self.proposer is not None
        if len(asked) < len(works):
            sampling = self._sampling_batch([slots[i] for i in asked])
        asks = [draft_ask(works[i], slots[i]) for i in asked]
        host_rows = num_host_rows(works) if any(ask.stop for ask in asks) else 0
        made = self.proposer.propose(asks, self.state.token_ids_SL, sampling, host_rows)
        drafts = joined_drafts(works, asked, made, self.device)
        return drafts, drafts

    def _rule(self, sampling: SamplingBatch) -> Rule | None:
        """The rule for a pass that also chooses; None: it needs more than logits and texts."""
        if not sampling.has_penalties_at_most:
            return None
        return Rule.MATCH if sampling.is_plain_greedy else self.verifier.rule

    def _forward(
        self, plan: StepPlan, drafts: DraftBatch | None, sampling: SamplingBatch | None
    ) -> StepRead:
        """Read all rows; choose by them as well if `sampling`, of those that sample, allows it."""
        works = plan.works
        rule = self._rule(sampling) if sampling is not None else None
        spans, facts = step_spans(works, self._slots, self.state.row_len)
        states_of = StatesOf.ROWS_WITH_LOGITS if rule is None else StatesOf.NO_ROW
        if plan.keeps_states:
            states_of = StatesOf.ROWS_WITH_LOGITS
        if wants_prompt_logprobs(works, self._slots) or (
            plan.keeps_states and self._reads_all_hidden
        ):
            states_of = StatesOf.ALL_ROWS
        task = StepTask(
            spans,
            facts,
            self.state.token_ids_SL,
            drafts,
            drafts is not None and any(w.drafts and w.drafts.is_device_tree for w in works),
            self.cache.layers,
            self.cache.block_size,
            self._taps if plan.keeps_states else (),
            rule,
            sampling if rule is not None else None,
            states_of,
            self.proposer.drafter.state_window if plan.keeps_states and self.proposer else 0,
        )
        fused = self.model.fused
        read = None if fused is None else fused.step(task)
        if read is None:
            read = read_by_parts(self.model, self.verifier, task)
        return read

    def _scored(self, hidden_RD: Tensor, chosen_R: Tensor, num_top: int) -> Scores:
        """Score tokens by the logits of hidden states [R, D]; see `score_tokens`."""
        logits_RV = self.model.logits(hidden_RD)
        return self.model.kernels.score_tokens(logits_RV, chosen_R, num_top, None)

    def _verify(self, step: "LaunchedStep") -> PendingStep:
        plan, drafts = step.plan, step.drafts
        choice: Choice | None = None
        emitted: LogprobRows | None = None
        if drafts is not None:
            choice, emitted = self._verified(step)
            self._keep(choice, drafts, step.target)
        if plan.keeps_states:
            step.clock.mark()
            assert self.proposer is not None, "no drafter reads the states"
            self.proposer.drafter.keep(self._states(plan.works, step.target, choice))
        step.clock.mark()
        return to_host(plan, choice, drafts, emitted, step.prompt, step.clock)

    def _verified(self, step: "LaunchedStep") -> Verified:
        """The choice of all requests, and log-probabilities of what they emit."""
        drafts, sampling, target = step.drafts, step.sampling, step.target
        if target.choice is not None:
            return target.choice, None
        assert drafts is not None
        assert sampling is not None
        texts = StepTexts(*target.rows.extra)
        of_all = PartToVerify(step.slots, drafts, sampling, texts, step.masks)
        num_drafts = [work.num_drafts for work in step.works]
        verifier = self._part_verifier(step, drafts.width)
        return verifier.verified(of_all, target.logit_states_RD, num_drafts, chooses=False)

    def _part_verifier(self, step: "LaunchedStep", width: int) -> PartVerifier:
        longest = max(work.num_tokens for work in step.works)
        rest = self.state.token_ids_SL, longest, width, most_logprobs(step.slots)
        return PartVerifier(self.model, self.verifier, *rest)

    def _keep(self, choice: Choice, drafts: DraftBatch, target: StepRead) -> None:
        """Write the emitted tokens to the texts, and accepted branches to where texts are read."""
        if target.choice is None:
            texts = StepTexts(*target.rows.extra)
            emitted_BN1 = choice.verdict.token_ids_BN1
            append_token_ids(self.state.token_ids_SL, texts.rows_B, texts.num_tokens_B, emitted_BN1)
        if drafts.is_chain:
            return  # accepted rows stand where they belong
        rows, verdict = target.rows, choice.verdict
        source_BN = rows.draft_slots_BN.gather(1, verdict.rows_BN.clamp_min(0))
        source_BN = source_BN.masked_fill(verdict.rows_BN < 0, -1)
        self.cache.compact(source_BN.flatten(), rows.draft_slots_BN.flatten())

    def _states(
        self, works: Sequence[Work], target: StepRead, choice: Choice | None
    ) -> TargetStates:
        assert self.proposer is not None
        hidden_TD, tapped_TKD = target.states_TD, target.tapped_TKD
        assert tapped_TKD is not None
        if hidden_TD is None:
            hidden_TD = target.logit_states_RD
            if len(hidden_TD) < len(tapped_TKD):
                hidden_TD = spread_rows(hidden_TD, target.rows.logit_rows_R, len(tapped_TKD))
        places = target.kept
        if places is None:
            rows, window = target.rows, self.proposer.drafter.state_window
            kept_rows_BN = rows.draft_slots_BN[:0]  # no request samples
            if choice is not None:
                kept_rows_BN = choice.verdict.rows_BN
            places = place_states(rows, kept_rows_BN, self.state.row_len, window)
        reads = chunk_reads(works, self._slots)
        return TargetStates(hidden_TD, tapped_TKD, *places, self.state.token_ids_SL, reads)


class LaunchedStep(NamedTuple):
    """A step whose rows the target reads; its tensors may not be computed yet.

    Attributes:
        plan: with the rows that the target reads.
        works, slots: those that sample, and their slots in the same order.
        drafts, sampling: of the works that sample; None: there are none.
        own_drafts: of those that are verified here, with the probabilities they were drawn from.
        drafted: the network's drafts, if a grammar must know them.
        prompt: log-probabilities of prompts.
        masks: of the grammars, once they are there.
    """

    plan: StepPlan
    works: Sequence[Work]
    slots: Sequence[RequestSlot]
    target: StepRead
    drafts: DraftBatch | None
    own_drafts: DraftBatch | None
    sampling: SamplingBatch | None
    drafted: HostCopy | None
    prompt: LogprobRows | None
    clock: PhaseClock
    masks: GrammarMasks | None = None
