"""Translates for the controller: requests become facts, decisions become draft choices.

`control` decides who drafts in a step and how far. What a request, the configuration or the batch
forbids, it never sees as possible. After the step it gets the drafts' outcomes and the time of
each phase; offers of the host that were not used are compared with the text that came.
"""

from collections.abc import Callable, Sequence
from time import perf_counter

from msgspec import Struct
from msgspec.structs import replace

from outdraft.config.speculation import SpeculationConfig
from outdraft.control.facts import DraftOutcome, ShadowOutcome, StepFacts, StepOutcome
from outdraft.control.policy import LengthPolicy
from outdraft.core.decision import Decision, Grant, Reason
from outdraft.core.draft import DraftSource
from outdraft.core.errors import RequestError
from outdraft.core.plan import DraftChoice, StepStats, drafted_levels
from outdraft.core.request import BookedWork, Request
from outdraft.drafting.host_sources import Drafts, HostProposer, HostSources, Shadows
from outdraft.drafting.request_limits import DrafterLimits, RequestLimits

# Steps before a network may draft in which the target's states are kept for it to read. With 16
# of them EAGLE-3 accepts 90 % of what it accepts with the whole text (docs/log/2026-11.md).
WARM_UP_STEPS = 16

Booked = Sequence[BookedWork]  # as Scheduler.commit returns it


class _DecidedStep(Struct, frozen=True):
    """A decision for one step, or for several.

    Attributes:
        choices: the drafts that each request verifies.
        deciding_s: time to look for offers and to decide.
        is_held: it was decided for an earlier step.
    """

    facts: StepFacts
    decision: Decision
    choices: dict[str, DraftChoice]
    deciding_s: float
    is_held: bool = False


class DraftPolicy:
    """Translates requests, decisions and outcomes.

    Attributes:
        control: decides; may be exchanged while no request runs.
        limits: of each request.
        decided: about the newest step, without its grants, which `granted` says; None: nothing was
            to decide.
        granted: the drafts that each request of that step was to verify.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        proposers: Sequence[HostProposer],
        drafter: DrafterLimits | None,
        control: LengthPolicy,
        max_num_seqs: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`clock`: seconds, by which the policy measures how long it takes itself."""
        self.config = config
        self._clock = clock
        self.control = control
        self._host = HostSources(config, proposers, max_num_seqs)
        self._drafter = drafter
        self.limits = RequestLimits(config, drafter)
        self._shadows = Shadows()
        self._running: _DecidedStep | None = None  # the decision of the step that runs
        self._newest: _DecidedStep | None = None  # the latest decision, which may be held
        self._learning_s = 0.0  # from the latest step
        self.decided: Decision | None = None
        self.granted: dict[str, DraftChoice] = {}

    @property
    def sources(self) -> tuple[DraftSource, ...]:
        """Sources that may draft, the preferred one first; empty without speculation."""
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

    def choose(
        self, requests: Sequence[Request], num_running: int, room: StepFacts
    ) -> dict[str, DraftChoice]:
        """The drafts that each request verifies in the next step; without an entry it has none.

        Args:
            requests: those with one token left to compute, in batch order.
            num_running: how many requests run, or may begin to run in this step.
            room: for drafts; it names no requests.
        """
        self._running = self.decided = None
        self.granted = {}
        if not requests or not self.config.sources:
            return {}
        if self._is_disabled(num_running):
            self.decided = Decision(Reason.DISABLED)
            return {}
        may_offer = self._host.may_find(requests)
        if self._hold(requests, room, may_offer=may_offer):
            return self.granted
        wanting = [request for request in requests if self.limits.may_draft(request)]
        if not wanting:
            self.decided = Decision(Reason.NOT_WANTED)
            return {}
        started_s = self._clock()
        drafts: dict[str, Drafts] = {}
        if may_offer:
            drafts = self._host.drafts(wanting, num_running)
            if not drafts and self._hold(requests, room, looking_s=self._clock() - started_s):
                return self.granted
        own = tuple(self.limits.facts(one, drafts.get(one.id, {})) for one in requests)
        facts = replace(room, requests=own)
        decision = self.control.decide(facts)
        if decision.shadows:
            self._cast_shadows(requests, decision, drafts)
        self.decided, self.granted = _shown(decision), self._choices(facts, decision, drafts)
        deciding_s = self._clock() - started_s
        self._running = _DecidedStep(facts, decision, self.granted, deciding_s)
        self._newest = self._running
        return self.granted

    def _hold(
        self,
        requests: Sequence[Request],
        room: StepFacts,
        *,
        may_offer: bool = False,
        looking_s: float = 0.0,
    ) -> bool:
        """Use an earlier decision if it holds for the step. `looking_s`: the host found nothing."""
        decision = self.control.hold(len(requests), room.prompt_rows, may_offer=may_offer)
        if decision is None:
            return False
        self.decided = _shown(decision, is_held=True)
        newest = self._newest
        if newest is not None and newest.decision is decision:
            # A text may have become too long for the network, or may no longer get as many tokens.
            choices, fits = newest.choices, self.limits.fits
            asked = [
                (one, choices[one.id].num_model_drafts) for one in requests if one.id in choices
            ]
            unfit = {one.id for one, number in asked if not fits(one, number)}
            self.granted = {id_: one for id_, one in choices.items() if id_ not in unfit}
            self._running = replace(newest, deciding_s=looking_s, is_held=True)
        return True

    def may_follow(self, num_running: int) -> bool:
        """The network should be able to draft in one of the next steps, for those requests that it
        may draft for."""
        if self._drafter is None or self._is_disabled(num_running):
            return False
        return self.control.network_due_in() <= WARM_UP_STEPS

    def reads_prompts(self) -> bool:
        """A network that reads states should read prompts in the step that computes them.

        That takes as long as several steps. Else it begins with the states of the newest tokens.
        """
        return self.control.network_due_in() == 0

    def observe(self, booked: Booked, stats: StepStats) -> None:
        """Learn from the step that `choose` was asked about, before its requests are finished."""
        step, self._running = self._running, None
        started_s = self._clock()
        shadows = self._shadows.observe(one.request for one in booked)
        ran = {one.request.id: one for one in booked}
        if step is None or stats.times.is_first:
            return  # it took longer for once, which says nothing of others
        if not all(request.request_id in ran for request in step.facts.requests):
            return  # some were preempted, so that the decision was for another batch
        self.control.observe(self._outcome(step, ran, stats, shadows))
        self._learning_s = self._clock() - started_s

    def finish(self, request: Request) -> None:
        """Drop the state of a request that ended; the proposers learn from its text if it is
        whole."""
        self._host.finish(request)
        self._shadows.forget(request.id)
        self.control.forget(request.id)

    def _is_disabled(self, num_running: int) -> bool:
        limit = self.config.disable_by_batch_size
        return limit is not None and num_running > limit

    def _choices(
        self, facts: StepFacts, decision: Decision, drafts: dict[str, Drafts]
    ) -> dict[str, DraftChoice]:
        """The drafts that each request verifies; `drafts`: the host's, by request.

        Where a network draws for many requests at once, each has fewer drafts, and past
        `most_drawn` requests the last ones have none: their probabilities fit into memory.
        """
        choices = {
            one.request_id: self._choice(one, drafts.get(one.request_id, {}))
            for one in decision.grants
        }
        most = None if self._drafter is None else self._drafter.most_drawn
        drafted = [id_ for id_, choice in choices.items() if choice.num_model_drafts]
        rules = {one.request_id: one.rule for one in facts.requests}
        if most is None or not any(self.limits.draws(rules[id_]) for id_ in drafted):
            return choices
        counts = dict.fromkeys(drafted, 0)
        counts |= dict.fromkeys(drafted[:most], max(1, most // len(drafted)))
        fitting = {
            id_: choice.truncated(counts.get(id_, len(choice))) for id_, choice in choices.items()
        }
        return {id_: choice for id_, choice in fitting.items() if choice is not None}

    def _choice(self, grant: Grant, drafts: Drafts) -> DraftChoice:
        source = DraftSource(grant.source)
        if source in drafts:
            return DraftChoice(source, drafts[source].first_levels(grant.levels))
        return DraftChoice(source, num_model_drafts=grant.rows, levels=grant.shape, stop=grant.stop)

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

    def _outcome(
        self,
        step: _DecidedStep,
        ran: dict[str, BookedWork],
        stats: StepStats,
        shadows: tuple[ShadowOutcome, ...],
    ) -> StepOutcome:
        facts, drafts = step.facts, list[DraftOutcome]()
        prompt_rows = sum(one.work.num_new for one in ran.values()) - len(facts.requests)
        num_tokens, drafts_network = 0, False
        for one in facts.requests:
            _, work, result, added = ran[one.request_id]
            num_tokens += len(added)
            if work.drafts is not None and result.is_finite:
                drafts_network |= work.drafts.num_model_drafts > 0
                levels, accepted = drafted_levels(work.drafts, result), len(result.accepted_rows)
                drafts.append(DraftOutcome(one.request_id, levels, accepted, result.margins or ()))
        if prompt_rows != facts.prompt_rows:
            facts = replace(facts, prompt_rows=prompt_rows)
        times = stats.times
        # Drafts of the host are sent to the device in the phase of drafting. To decide is no part
        # of the host's time.
        draft_s, sending_s = (times.draft_s, 0.0) if drafts_network else (0.0, times.draft_s)
        # To keep states for a network is a cost of its drafts, which go on after a plain step.
        keep_s = times.keep_s if drafts_network else 0.0
        return StepOutcome(
            facts,
            step.decision,
            tuple(drafts),
            stats.num_rows,
            num_tokens,
            draft_s,
            times.plain_target_s + keep_s,
            max(0.0, stats.host_s - step.deciding_s) + sending_s,
            shadows,
            step.deciding_s + self._learning_s,
            step.is_held,
        )


def _shown(decision: Decision, *, is_held: bool = False) -> Decision:
    """The part of a decision that metrics show. is_held: it was made for an earlier step."""
    draft_s = decision.draft_s - (decision.catch_up_s if is_held else 0.0)
    return replace(decision, grants=(), shadows=(), draft_s=draft_s, catch_up_s=0.0)
