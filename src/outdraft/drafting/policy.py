"""Between the engine and what decides: requests become facts, decisions become draft choices.

`control` decides who drafts in a step and how far. What a request, the configuration or the batch
forbids, it never sees as possible. After the step it is told how the drafts fared and what each
phase took; offers of the host that were not used are compared with the text that came.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

from outdraft.config.speculation import SpeculationConfig
from outdraft.control.alarms import Drafted, SourceAlarms
from outdraft.control.facts import (
    Decision,
    DraftOutcome,
    Reason,
    ShadowOutcome,
    StepFacts,
    StepOutcome,
)
from outdraft.control.policy import LengthPolicy
from outdraft.core.decided import Alarm, StepDecision
from outdraft.core.draft import DraftSource
from outdraft.core.errors import RequestError
from outdraft.core.plan import DraftChoice, StepRoom, StepStats
from outdraft.core.record import record
from outdraft.core.request import Request
from outdraft.core.scheduled import BookedWork
from outdraft.drafting.explained import DISABLED, NOT_WANTED, standing
from outdraft.drafting.host.proposer import HostProposer
from outdraft.drafting.host_sources import Drafts, HostSources
from outdraft.drafting.known_requests import DrafterLimits, KnownRequests
from outdraft.drafting.outcomes import draft_outcome, fates
from outdraft.drafting.rest import Rest
from outdraft.drafting.shadows import Shadows
from outdraft.drafting.translation import Translator

_logger = logging.getLogger(__name__)

# Before a network may draft, the target's states are kept for so many steps, for it to read. With
# 16 of them EAGLE-3 accepts nine tenths of what it accepts with the whole text (docs/log.md).
WARM_UP_STEPS = 16

Booked = Sequence[BookedWork]  # as Scheduler.commit returns it


@record
class _Step:
    """What was decided for the step that runs."""

    facts: StepFacts
    decision: Decision


class DraftPolicy:
    """Translates requests, decisions and outcomes.

    Attributes:
        control: decides; may be exchanged while no request runs.
        decision: why the step that runs drafts as it does; None: nothing was to decide.
        decided: about the newest step; None: nothing was to decide.
        granted: what each request of that step was to verify.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        proposers: Sequence[HostProposer],
        drafter: DrafterLimits | None,
        control: LengthPolicy,
        max_num_seqs: int,
        on_wrong_costs: Callable[[], None] | None = None,
    ) -> None:
        """`on_wrong_costs`: called once, if costs that are kept turn out to be wrong."""
        self.config = config
        self.control = control
        self._rest = Rest()
        self._host = HostSources(config, proposers, max_num_seqs)
        self._has_network = drafter is not None
        self._known = KnownRequests(config, drafter)
        self._translator = Translator(drafter, self._known)
        self._shadows = Shadows()
        self._step: _Step | None = None
        self.decision: Decision | None = None
        self._is_timed = False  # the step that runs, which is held and plain
        self._is_held = False  # the step that runs
        self._has_looked = False  # sources of the host, before the step that runs,
        self._prompt_rows = 0  # which has so many rows of prompts
        self._newest_step: _Step | None = None  # that was decided without offers
        self._deciding_s = 0.0  # of the step that was decided last
        self._learning_s = 0.0  # from the latest step with drafts
        self.decided: StepDecision | None = None
        self.granted: dict[str, DraftChoice] = {}
        self._on_wrong_costs = on_wrong_costs
        self._alarms = SourceAlarms(str(source) for source in config.methods)

    @property
    def sources(self) -> tuple[DraftSource, ...]:
        """Who may draft, the preferred one first; empty without speculation."""
        if not self.config.sources:
            return ()
        return DraftSource.PREDICTION, *self.config.methods

    def check(self, request: Request) -> None:
        """Raise RequestError if the request asks for a source that the engine does not have."""
        method = request.params.speculation.method
        allowed = [str(source) for source in self.sources]
        if method is not None and method not in allowed:
            raise RequestError(
                f"method of speculation must be one of {', '.join(allowed)}, got {method!r}"
                if allowed
                else "the engine was started without speculation, so that it has no method",
                "speculation",
            )

    def try_rest(self, num_running: int, num_waiting: int) -> bool:
        """Whether the step that begins is as plain as the last one, so that `choose` needs not be
        asked about it; then it is counted.

        num_running, num_waiting: requests of the scheduler. Ask once a step.
        """
        if not self._rest.take(num_running, num_waiting):
            return False
        self._has_looked = False
        self.control.rest()
        return True

    def choose(
        self, requests: Sequence[Request], num_running: int, room: StepRoom
    ) -> dict[str, DraftChoice]:
        """What each request verifies in the next step; requests without an entry do not draft.

        requests: those with one token left to compute, in batch order.
        num_running: how many requests run, or may begin to run in this step.
        """
        self._step = self.decision = self.decided = None
        self.granted = {}
        self._is_timed = self._is_held = self._has_looked = False
        if not requests or not self.config.sources:
            return {}
        if self._is_disabled(num_running):
            self.decided = DISABLED
            return {}
        looks = self._host.may_find(requests) and self.control.wants_offers
        if not looks and self._hold(requests, room):
            return self.granted
        wanting = [request for request in requests if self._known.may_draft(request)]
        if not wanting:
            self.decided = NOT_WANTED
            return {}
        started_s = perf_counter()
        drafts: dict[str, Drafts] = {}
        if looks:
            drafts = self._host.drafts(wanting, num_running)
            self._has_looked, self._prompt_rows = True, room.prompt_rows
            if not drafts and self._hold(requests, room):
                return self.granted
        facts = StepFacts(
            tuple(self._known.facts(request, drafts.get(request.id, {})) for request in requests),
            room.prompt_rows,
            room.free_rows,
            room.free_slots,
        )
        decision = self.control.decide(facts)
        step, self.decision = _Step(facts, decision), decision
        if not drafts:  # it may be held
            self._newest_step = step
        if self.control.wants_outcome:
            self._step = step
        if decision.shadows:
            self._cast_shadows(requests, decision, drafts)
        self.decided, self.granted = self._translated(decision, drafts)
        self._deciding_s = perf_counter() - started_s
        return self.granted

    def _hold(self, requests: Sequence[Request], room: StepRoom) -> bool:
        """Whether a decision stands for the step, which nobody has an offer for."""
        if not self.control.try_hold(len(requests), room.prompt_rows):
            return False
        decision = self.control.standing
        assert decision is not None
        self._is_held = True
        if decision.grants:
            decision = self.control.standing_for([request.id for request in requests])
            self.decided, choices = self._translated(decision, {})
            self.granted = self._fitting(requests, choices)
            newest = self._newest_step
            if self.control.wants_outcome and newest is not None and newest.decision is decision:
                self._step = newest
        else:
            self.decided = standing(decision)
            self._is_timed = self.control.wants_plain_time and not room.prompt_rows
            if not room.prompt_rows and not self._shadows.are_waiting:
                self._rest.begin(self._quiet_steps(requests))
        self.decision = decision
        return True

    def _quiet_steps(self, requests: Sequence[Request]) -> int:
        """Steps that follow a held one in which nobody needs to be asked for anything."""
        steps = self.control.quiet_steps(may_find=self._host.may_find(requests))
        if self._has_network:  # its states are to be kept early enough
            steps = min(steps, self.control.network_due_in(len(requests)) - WARM_UP_STEPS - 1)
        return max(0, steps)

    def _fitting(
        self, requests: Sequence[Request], choices: dict[str, DraftChoice]
    ) -> dict[str, DraftChoice]:
        """A network's choices without those for texts that have become too long for it, and for
        requests that came later and may not draft so much."""
        unfit = {
            request.id
            for request in requests
            if request.id in choices
            and not self._known.fits(request, choices[request.id].num_model_drafts)
        }
        if not unfit:
            return choices
        return {id_: choice for id_, choice in choices.items() if id_ not in unfit}

    def may_follow(self, num_running: int, *, has_prompts: bool) -> bool:
        """Whether the network should be able to draft for any request in one of the next steps.

        has_prompts: the step that begins reads some.
        """
        if not self._has_network or self._is_disabled(num_running):
            return False
        due_in = self.control.network_due_in(num_running, has_prompts=has_prompts)
        return due_in <= WARM_UP_STEPS

    def reads_prompts(self, num_running: int) -> bool:
        """Whether a network that reads states should read prompts as they pass by.

        That takes as long as several steps. Else it begins with the states of the newest tokens.
        """
        return self.control.network_due_in(num_running, has_prompts=True) == 0

    def follows(self, request: Request) -> bool:
        """Whether it should for this one, if it should for any."""
        return self._known.network_may_draft(request)

    def may_read(self, request: Request) -> bool:
        """Whether the network can read this one's prompt, whether or not it may draft for it."""
        return self._known.network_can_read(request)

    def observe(self, booked: Booked, stats: StepStats) -> tuple[Alarm, ...]:
        """Learn from the step that `choose` was asked about, before its requests are finished.

        Returns alarms that begin or end; they are logged already.
        """
        if self._has_looked and not stats.times.is_first:
            self.control.looked(stats.step_s, self._prompt_rows)
        self._has_looked = False
        if self._rest.is_on:
            return self._watch(None, ())
        keep_s = stats.times.keep_s
        if keep_s > 0 and stats.num_rows == len(booked) and not stats.times.is_first:
            self.control.observe_keeping(keep_s)
        step, self._step = self._step, None
        if stats.times.is_first:
            step = None  # it took longer for once, which says nothing of others
        drafts = ()
        if step is not None or self._shadows.are_waiting:
            drafts = self._learn(step, booked, stats)
        if not stats.times.is_first:
            self._pass_by(step, booked, stats)
        if self.decision is None:
            return ()
        return self._watch(step, drafts)

    def _learn(
        self, step: _Step | None, booked: Booked, stats: StepStats
    ) -> tuple[DraftOutcome, ...]:
        """Tell control what came of the step; how its drafts fared."""
        started_s = perf_counter()
        shadows = self._shadows.observe(one.request for one in booked)
        if step is None:
            if shadows:
                self.control.observe_shadows(shadows)
            return ()
        ran = {one.request.id: one for one in booked}
        if not all(request.request_id in ran for request in step.facts.requests):
            return ()  # some were preempted, so that the decision was for another batch
        outcome = self._outcome(step, ran, stats, shadows)
        self.control.observe(outcome)
        if outcome.drafts:
            self._learning_s = perf_counter() - started_s
        return outcome.drafts

    def _pass_by(self, step: _Step | None, booked: Booked, stats: StepStats) -> None:
        """Tell control what a step took that it need not be asked about."""
        if self._is_timed:
            self._observe_plain(booked, stats)
        elif self.decision is not None and self.control.is_passing:
            host_s = stats.host_s - self._decided_s(stats)
            told = () if step is not None else fates(booked)
            self.control.pass_by(stats.num_emitted, stats.times.draft_s, host_s, stats.step_s, told)

    def _observe_plain(self, booked: Booked, stats: StepStats) -> None:
        if stats.num_rows != len(booked):
            return  # a prompt began
        times, context = stats.times, sum(one.request.num_tokens for one in booked)
        host_s = times.draft_s + stats.host_s
        self.control.observe_plain(len(booked), context, times.plain_target_s, host_s)

    def _watch(self, step: _Step | None, drafts: tuple[DraftOutcome, ...]) -> tuple[Alarm, ...]:
        """Count a step in which sources could draft."""
        if step is None or not drafts:
            alarms = self._alarms.step()
        else:
            sources = {grant.request_id: grant.source for grant in step.decision.grants}
            alarms = self._alarms.step(
                [
                    Drafted(sources[one.request_id], one.request_id, one.drafted, one.accepted)
                    for one in drafts
                    if one.drafted
                ],
                is_probe=step.decision.reason is Reason.NETWORK_PROBE,
            )
        for alarm in alarms:
            what, state = alarm.kind.replace("_", " "), "begins" if alarm.is_on else "ends"
            level = logging.WARNING if alarm.is_on else logging.INFO
            _logger.log(level, "alarm %s: %s of %s: %s", state, what, alarm.source, alarm.evidence)
        return alarms

    def finish(self, request: Request) -> None:
        """A request ended: drop its state; the proposers learn from its text if it is whole."""
        self._rest.end()
        self._host.finish(request)
        self._shadows.forget(request.id)
        self._known.forget(request.id)
        self.control.forget(request.id)
        self._alarms.finish(request.id)
        if self._on_wrong_costs is not None and self.control.has_wrong_costs:
            self._on_wrong_costs()
            self._on_wrong_costs = None

    def most_drafts(self, request: Request) -> int:
        """Most drafts for this request in any step."""
        return self._known.most_drafts(request)

    def _is_disabled(self, num_running: int) -> bool:
        limit = self.config.disable_by_batch_size
        return limit is not None and num_running > limit

    def _cast_shadows(
        self, requests: Sequence[Request], decision: Decision, drafts: dict[str, Drafts]
    ) -> None:
        """Remember unused offers until their text comes."""
        used = {grant.request_id: grant.source for grant in decision.grants}
        for request in requests:
            if request.id in decision.shadows:
                for source, draft in drafts[request.id].items():
                    if used.get(request.id) != source:
                        self._shadows.cast(request, source, draft)

    def _translated(
        self, decision: Decision, drafts: dict[str, Drafts]
    ) -> tuple[StepDecision, dict[str, DraftChoice]]:
        return self._translator.translated(
            decision, drafts, margins=self.control.wants_margins, is_held=self._is_held
        )

    def _decided_s(self, stats: StepStats) -> float:
        """What it took to decide, of the host's time in this step."""
        return 0.0 if self._is_held else min(self._deciding_s, stats.host_s)

    def _outcome(
        self,
        step: _Step,
        ran: dict[str, BookedWork],
        stats: StepStats,
        shadows: tuple[ShadowOutcome, ...],
    ) -> StepOutcome:
        facts, outcomes = step.facts, list[DraftOutcome]()
        prompt_rows = sum(one.work.num_new for one in ran.values()) - len(facts.requests)
        num_tokens, drafts_network = 0, False
        for one in facts.requests:
            _, work, result, added = ran[one.request_id]
            num_tokens += len(added)
            if work.drafts is not None and result.is_finite:
                drafts_network |= work.drafts.num_model_drafts > 0
                outcomes.append(draft_outcome(work.drafts, one.request_id, result))
        if prompt_rows != facts.prompt_rows:
            facts = replace(facts, prompt_rows=prompt_rows)
        times = stats.times
        # Drafts of the host are sent to the device in the phase of drafting. To decide is no part
        # of the host's time: most steps are held.
        draft_s, sending_s = (times.draft_s, 0.0) if drafts_network else (0.0, times.draft_s)
        # To keep states for a network is a cost of its drafts, which go on behind a plain step.
        keep_s = times.keep_s if drafts_network else 0.0
        return StepOutcome(
            facts,
            step.decision,
            tuple(outcomes),
            stats.num_rows,
            num_tokens,
            draft_s,
            times.plain_target_s + keep_s,
            stats.host_s - self._decided_s(stats) + sending_s,
            shadows,
            self._deciding_s + self._learning_s,
            self._is_held,
        )
