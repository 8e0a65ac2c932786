"""Decides before each step who drafts and how far; learns from the step when it is over.

Pure: no clock, no random numbers, no device. Decisions follow from finished steps alone, and from
what the host offers, whose drafts are one-hot: so no length depends on a token that was drawn or on
a coin that was tossed in the same step (docs/design/0012-lengths-from-the-past.md). While a chain
is drafted, the engine itself compares its live survival with the decision's price.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from outdraft.control.answers import Answers, KnownDecisions, Question, question
from outdraft.control.choosing import MOST_ALIKE, chosen_plan, gain_of, pays_anew
from outdraft.control.costs import CostTable
from outdraft.control.drift import Costs
from outdraft.control.estimates import Estimates
from outdraft.control.facts import Decision, Fate, Reason, ShadowOutcome, StepFacts, StepOutcome
from outdraft.control.granting import decision_of
from outdraft.control.lessons import DISTURBED, FIRST_STEPS, Disturbance
from outdraft.control.looks import Looks
from outdraft.control.outlook import Outlook, Regime
from outdraft.control.plain_steps import PlainSteps
from outdraft.control.plans import Option, Plan, Prices
from outdraft.control.probes import FIRST_INTERVAL, NetworkProbe
from outdraft.control.revising import fares_otherwise, is_like, revised
from outdraft.control.standing import MAX_STEPS, Standing, StandingDecisions

PLAIN_SHARE = 0.005  # of the time that decisions against drafts may take
LONGEST_PLAIN = 256  # steps that one holds for where it takes long beside a step
RELEASE = 0.05  # gain beyond what was predicted at an alarm that ends the patience
REUSED = 8  # steps that a decision to draft holds for if nothing else changes
SETTLED = 4  # decisions that nothing is offered before one stands for steps to come
HOPE = 0.5  # share of the doubt about chances that drafts begin with
LINGERING = 8  # steps without the network's drafts before it counts as off
ROUTINE = 8  # steps that are held of which one is timed
EXPERIMENTS = (Reason.NETWORK_PROBE, Reason.PLAIN_PROBE)
LASTING = (Reason.NO_GAIN, Reason.PATIENCE)


class Controller:
    """Composes costs, estimates, decision, guard and probes.

    A step is either held, or decided and observed:

        if not any_offers and controller.try_hold(num_requests, prompt_rows):
            decision = controller.standing
        else:
            decision = controller.decide(facts)
        ...
        if controller.wants_outcome:
            controller.observe(outcome)
        if controller.is_passing:
            controller.pass_by(...)

    table: what passes take. max_levels: most levels of any draft.
    """

    def __init__(self, table: CostTable, max_levels: int) -> None:
        self.costs = Costs(table)
        self.estimates = Estimates(max_levels)
        self.probe = NetworkProbe()
        self._regimes: dict[int, Regime] = {}
        self._is_drafting = False
        self._welcomes = False  # drafts would pay for requests like these that were new
        self._num_steps = 0
        self._plain_steps = PlainSteps()
        self._looks = Looks()
        self._num_lessons = 0
        self._next_timed = 0  # the number of the step that tells what drafts take, if it is held
        self._last_lesson = 0  # the number of its step
        self._answers = Answers()
        self._is_answered = False  # the step that was decided last, by one of them
        self._deciding_s = 0.0  # on average, and to learn
        self._disturbance = Disturbance()
        self._terms: tuple[Outlook, Prices] | None = None  # of the last decision to draft
        self._known = KnownDecisions()
        self._reused = 0  # steps since the last one that was thought over,
        self._age = 0  # and since that which decides the step was
        self._num_poor = 0  # decisions against drafts since the last one for them
        self._standing = StandingDecisions()
        self._held: Standing | None = None  # the last one that a step was held by
        self.wants_outcome = True
        self.is_passing = False

    @property
    def standing(self) -> Decision | None:
        """What decided the step if `try_hold` was just true."""
        return self._held.decision if self._held is not None else None

    def standing_for(self, request_ids: Sequence[str]) -> Decision:
        """`standing`, which drafts: requests that came since have the places of ended ones."""
        assert self._held is not None
        if self._held.num_gone:
            self._held.replace_ended(request_ids)
            if not self._held.decision.grants:  # whoever drafted has ended
                self._held.left, self.is_passing = 0, False
        return self._held.decision

    @property
    def wants_offers(self) -> bool:
        """Whether the sources of the host should look for drafts before the next decision."""
        if self._standing.is_experiment:
            return False
        return self._looks.are_due(self._num_steps)

    def observe_keeping(self, seconds: float) -> None:
        """As LengthPolicy."""
        self.probe.observe_keeping(seconds)

    def network_due_in(self, num_running: int, *, has_prompts: bool = False) -> int:
        """Steps until the network may draft again; 0 while drafts pay and it makes them, or did a
        few steps ago, or where a prompt is read behind which they would pay. A probe alone is no
        reason for it to read whole prompts; nor is what was said of a few requests where more run
        now."""
        welcomes = has_prompts and self._welcomes and num_running <= MOST_ALIKE
        if welcomes or (self._is_drafting and self.probe.idle_steps < LINGERING):
            return 0
        return max(1, self.probe.due_in)

    def try_hold(self, num_requests: int, prompt_rows: int = 0) -> bool:
        """Whether a decision made lately, `standing`, is good for the step that begins now, which
        is counted then.

        It takes microseconds and needs no facts. If it is true, `decide` is not called for the
        step. A plain decision holds for 32 steps at most, or as many as make deciding take half a
        hundredth of the time, for fewer when requests end (tell `forget`), and no longer than until
        the network's next probe or the end of the patience. One to draft holds so long that
        deciding and learning take a hundredth of the time: not at all where a step takes long
        beside them, and not longer than until all of its requests have ended. Where its drafts fare
        otherwise than predicted it is looked at again, which may change its lengths or end it.

        Ask once a step at most, and only if no source of the host has an offer for it: there is no
        such source, `wants_offers` is false, or all of them looked in vain.

        num_requests: those that sample in this step. prompt_rows: as in StepFacts.
        """
        held = None
        if not self.probe.request_ids:
            held = self._standing.take(num_requests, prompt_rows)
        if held is None or (held.drafts and fares_otherwise(held) and not self._revise(held)):
            return False
        if self._held is not None and self._held is not held:
            self._watch(self._held)
        self._held = held
        # A prompt that began since would be counted as time of the drafts.
        is_usual = held.has_prompts or not prompt_rows
        self.is_passing = held.drafts and is_usual
        self.wants_outcome = held.left == held.lesson_at and is_usual
        self._hold(held)
        return True

    def quiet_steps(self, *, may_find: bool) -> int:
        """As LengthPolicy."""
        assert self._held is not None
        steps = min(self._held.left, self._plain_steps.num_untimed(self._routine))
        return min(steps, self._looks.due_in(self._num_steps)) if may_find else steps

    def rest(self) -> None:
        """As LengthPolicy."""
        assert self._held is not None
        self._held.left -= 1
        self._hold(self._held)

    def _revise(self, held: Standing) -> bool:
        """Whether a decision to draft still stands, with other lengths if those are better now."""
        self._watch(held)
        if not self._is_drafting:
            return False
        plan = revised(held, self.estimates, self.costs)
        if not plan.picks:
            held.left = 0
            return False
        assert held.facts is not None
        assert held.outlook is not None
        if not is_like(plan, held.decision, held.facts):
            held.decision = self._decision(held.facts, held.outlook, Reason.GAIN, plan)
            self._known.clear()
        return True

    def _hold(self, held: Standing) -> None:
        """Count a step that a decision holds for."""
        self._num_steps += 1
        self._reused += 1
        if held.drafts:
            self._plain_steps.draft()
            return
        self._plain_steps.pass_by()
        self.probe.pass_by()
        if held.decision.reason is Reason.PATIENCE:
            self._regime(held.num_requests).guard.pass_by()

    def pass_by(
        self,
        num_tokens: int,
        draft_s: float,
        host_s: float,
        step_s: float,
        fates: Iterable[Fate] = (),
    ) -> None:
        """A step of a decision that holds for several brought so many tokens and took so long.

        fates: of its drafts, if the step is no lesson; looked at later.
        """
        held = self._held
        assert held is not None
        held.passed.append((num_tokens, step_s, fates))
        if self._num_steps % ROUTINE == 0 and self._num_steps % self._routine == 0:
            self.costs.observe_host(held.num_requests, host_s, drafts=True)
        is_settled = held.most - held.left > FIRST_STEPS // 2
        if is_settled and held.facts is not None and self._num_steps >= self._next_timed:
            self._next_timed = self._num_steps + self._routine
            target_s = step_s - draft_s - host_s
            self.costs.observe_passing(held.facts, held.decision, draft_s, target_s)

    def looked(self, step_s: float, prompt_rows: int) -> None:
        """As LengthPolicy."""
        held = self._held
        assert held is not None, "nothing was decided"
        decision, num_requests = held.decision, held.num_requests
        looking_s = num_requests * self.costs.table.offer_s
        self._looks.cost(looking_s / decision.plain_s, self._deciding_s / decision.plain_s)
        if prompt_rows or held.has_prompts or decision.reason in EXPERIMENTS:
            self._looks.pass_over()
            return
        plain_steps = decision.counted_s(step_s) / decision.plain_s
        networks = self.costs.table.drafters
        is_taken = any(grant.source not in networks for grant in decision.grants)
        tokens = decision.tokens / num_requests
        self._looks.judge(tokens, plain_steps, decision.gain, is_taken=is_taken)

    @property
    def wants_plain_time(self) -> bool:
        """Whether the step that is plain now should be told to `observe_plain`: not each is."""
        return self._plain_steps.wants_time(self._routine)

    @property
    def _routine(self) -> int:
        """Steps that are held of which one is timed."""
        is_dear = self._held is not None and self._is_dear(self._held.decision)
        return MAX_STEPS if is_dear else ROUTINE

    def observe_plain(
        self, num_requests: int, context_tokens: int, target_s: float, host_s: float
    ) -> None:
        """Learn what plain decoding takes when it goes on: no prompts, no drafts just before.

        A lone plain step among others that draft takes longer, as it finds the caches full of the
        network, and somebody has to decide on it.
        """
        regime = self._regime(num_requests)
        regime.num_plain_bursts = max(1, regime.num_plain_bursts)
        self.costs.observe_target(num_requests, context_tokens, target_s, num_requests)
        self.costs.observe_host(num_requests, host_s, drafts=False)

    def observe_shadows(self, shadows: Sequence[ShadowOutcome]) -> None:
        """Learn from unused offers whose text has come; those of held steps have no outcome."""
        self.estimates.observe_shadows(shadows)

    @property
    def wants_margins(self) -> bool:
        """Chances of acceptance are learned from them, also where no chain is ended by them: in
        steps that are observed. To tell them takes a twentieth of a short step."""
        return self.wants_outcome

    @property
    def has_wrong_costs(self) -> bool:
        """As LengthPolicy."""
        return self.costs.are_wrong

    def decide(self, facts: StepFacts) -> Decision:
        """How the step that begins now speculates.

        Raises:
            KeyError: a request names a network that the table of costs does not know.
        """
        self._num_steps += 1
        self.wants_outcome, self.is_passing = True, False
        if self._held is not None:
            self._watch(self._held)
        key = question(facts, self.estimates.is_known)
        answer = self._answers.find(key, facts, self._num_steps)
        if answer is not None and answer.decision.reason is Reason.NO_GAIN and self._tries(facts):
            answer = None
        self._is_answered = answer is not None
        if answer is not None:
            self._held = answer
            self._reused += 1
            self._age = self._reused
            return self._settle_again(facts, answer.decision)
        decision = self._reusable(facts, key)
        if decision is None:
            decision = self._decide(facts)
            self._held = Standing(decision, len(facts.requests), facts.prompt_rows > 0)
            self._reused = self._age = 0
            if facts.has_offers or decision.reason in EXPERIMENTS:
                self._known.clear()
            else:
                self._known.put(key, self._held, self._num_steps)
            is_common = facts.has_offers and decision.reason in (Reason.GAIN, Reason.NO_GAIN)
            is_common |= decision.reason is Reason.NOTHING_OFFERED
            if is_common and self._is_dear(decision):
                self._answers.put(key, self._held, facts, self._num_steps)
        return self._settle(facts, decision)

    def _tries(self, facts: StepFacts) -> bool:
        """Whether a probe of the network goes on or is due: then no older answer refuses it."""
        if self.probe.request_ids:
            return True
        return self.probe.due_in == 0 and any(one.network is not None for one in facts.requests)

    def _settle(self, facts: StepFacts, decision: Decision) -> Decision:
        """What a decision means for the steps to come, and whether this one is a lesson."""
        if decision.reason is Reason.GAIN:
            self._num_poor = 0
            if not (facts.has_offers and self._looks.are_rare):
                self._standing.clear(drafts=False)
            self._go_on(facts, decision)
        elif decision.reason not in EXPERIMENTS:
            self._stand(facts, decision)
        return decision

    def _settle_again(self, facts: StepFacts, decision: Decision) -> Decision:
        """The same for an answer. To refuse once more teaches nothing: what the text says of unused
        offers is learned in any case."""
        if decision.reason is not Reason.NO_GAIN:
            self._settle(facts, decision)
        if decision.reason is not Reason.GAIN:
            self.wants_outcome = False
            self._count(facts, decision)
        return decision

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step that is over."""
        facts, decision = outcome.facts, outcome.decision
        if not facts.requests:
            return
        self._num_lessons += 1
        self._deciding_s += (outcome.deciding_s - self._deciding_s) / min(self._num_lessons, 16)
        if not outcome.is_held:
            self._count(facts, decision)
        if decision.reason is Reason.PATIENCE:
            self._regime(len(facts.requests)).guard.pass_by()
        excess = self.estimates.observe(outcome, self._num_lessons)
        actual_s = outcome.draft_s + outcome.target_s + outcome.host_s
        regime = self._regime(len(facts.requests))
        if self._is_usual(outcome) or not self._is_dear(decision):
            self.costs.observe(outcome)
        elif outcome.drafts or facts.prompt_rows:
            self.costs.observe(self._disturbance.removed(outcome), is_lone=True)
        else:
            self._disturbance.observe(outcome.target_s, decision.target_s, outcome.deciding_s)
        if decision.reason is Reason.NETWORK_PROBE:
            self.probe.observe(excess, outcome.excess_s)
            self._known.clear()
        if decision.reason is Reason.GAIN:
            regime.lessons.observe(outcome.deciding_s)
            self._last_lesson = self._num_steps
        if decision.reason is Reason.GAIN and not outcome.is_held:
            if facts.has_offers:
                actual_s += outcome.deciding_s
            outlook = Outlook.of(facts, self.costs)
            plain_tokens = outlook.plain_tokens(decision.counted_s(actual_s))
            gained = outcome.num_tokens - plain_tokens
            if regime.guard.watch(gained, plain_tokens, decision.gain):
                self._lost(regime)

    def forget(self, request_id: str) -> None:
        """The request ended."""
        if self._held is not None:
            self._watch(self._held)
        self.estimates.forget(request_id)
        self._standing.leave(ends_plain=self._welcomes)

    def _lost(self, regime: Regime) -> None:
        """The guard says that drafts lose time."""
        self._is_drafting, self._welcomes = False, False
        self._known.clear()
        self._standing.clear(drafts=True)
        self._answers.clear()
        regime.lessons.renew()

    def _watch(self, held: Standing) -> None:
        """Learn from the held steps that drafted, and compare them with plain decoding."""
        passed, decision = held.take_passed(), held.decision
        if passed.fates:
            self.estimates.observe_held(decision.grants, passed.fates)
        if passed.num_steps and not held.has_prompts:
            regime = self._regime(held.num_requests)
            plain_tokens = held.num_requests * passed.seconds / decision.plain_s
            gained = passed.tokens - plain_tokens
            if regime.guard.watch(
                gained, plain_tokens, decision.gain, passed.num_steps, passed.squares
            ):
                self._lost(regime)

    def _reusable(self, facts: StepFacts, key: Question) -> Decision | None:
        """What was decided for the same question, if it is not old."""
        known = self._known.find(key, facts)
        if known is None:
            return None
        held, decided_at = known
        age = self._num_steps - decided_at
        if age > (REUSED if held.drafts else self._most_plain(facts, held.decision)):
            return None
        self._held, self._age = held, age
        self._reused += 1
        return held.decision

    def _stand(self, facts: StepFacts, decision: Decision) -> None:
        """Let a decision against drafts stand for the steps to come.

        That nothing is offered says little if it is said once: a request that may not draft in its
        last step can be the reason. Where looks are rare, nobody was asked.
        """
        self._num_poor += 1
        is_lasting = decision.reason in LASTING and self._is_dear(decision)
        is_lasting |= decision.reason is Reason.NOTHING_OFFERED and self._looks.are_rare
        if is_lasting or self._num_poor >= SETTLED:
            left = self._most_plain(facts, decision) - self._age
            plain_one = replace(decision, shadows=()) if decision.shadows else decision
            standing = self._standing.put(plain_one, len(facts.requests), facts.prompt_rows, left)
            standing.is_proven = is_lasting and self._num_poor > SETTLED

    def _is_usual(self, outcome: StepOutcome) -> bool:
        """Whether the step was neither decided nor one of the first behind a decision."""
        if outcome.is_held:
            return self._held is not None and self._held.most >= FIRST_STEPS // 2
        return self._is_answered

    def _is_dear(self, decision: Decision) -> bool:
        """Whether to decide takes so long beside a step that the step takes longer, too."""
        return self._deciding_s > DISTURBED * decision.plain_s

    def _go_on(self, facts: StepFacts, decision: Decision) -> None:
        """Let a decision to draft hold, or leave out the lesson of one about offers."""
        count = len(facts.requests)
        regime = self._regime(count)
        steps = regime.lessons.steps(decision.plain_s)
        if facts.has_offers:
            if self._num_steps - self._last_lesson < steps:
                self.wants_outcome, self.is_passing = False, True
                self._count(facts, decision)
        elif steps > 1:
            place = regime.lessons.place()
            lesson_at = max(0, steps - 1 - place) if place else -1
            self._held = self._standing.put(
                decision, count, facts.prompt_rows, steps - 1, lesson_at
            )
            self._held.facts = facts
            if self._terms is not None:
                self._held.outlook, self._held.prices = self._terms
            if count > 1:
                self._held.newcomer = self.estimates.newcomer(decision)
            if place:
                self.wants_outcome, self.is_passing = False, True
                self._count(facts, decision)

    def _most_plain(self, facts: StepFacts, decision: Decision) -> int:
        """Steps that a decision without drafts may be kept for."""
        dear = self._deciding_s / (PLAIN_SHARE * decision.plain_s)
        most = max(MAX_STEPS, min(LONGEST_PLAIN, int(dear)))
        if any(request.network is not None for request in facts.requests):
            # If a probe is due, this step had no room for it.
            most = min(most, self.probe.due_in or FIRST_INTERVAL)
        if decision.reason is Reason.PATIENCE:
            most = min(most, self._regime(len(facts.requests)).guard.waiting)
        return most

    def _decide(self, facts: StepFacts) -> Decision:
        has_source = any(r.max_drafts > 0 and (r.offers or r.network) for r in facts.requests)
        regime = self._regime(len(facts.requests))
        outlook = Outlook.of(facts, self.costs, regime.lessons, self._answers.new_share)
        if not has_source or facts.max_rows == 0:
            reason = Reason.NO_ROOM if has_source else Reason.NOTHING_OFFERED
            return self._decision(facts, outlook, reason)
        self._plain_steps.warm_up(outlook.alone_s)
        network = next((r.network for r in facts.requests if r.network is not None), None)
        prices = outlook.prices(facts, network, self.costs)
        options = self.estimates.options(facts.requests, self.costs)
        known = regime.speedup if facts.has_offers and regime.num_steps else None
        plan = chosen_plan(options, prices, outlook, known, is_drafting=self._is_drafting)
        if not plan.picks and network is not None and not regime.guard.waiting:
            # A few unlucky labels do not end it: without drafts there would be hardly any more.
            # Nor do they keep it from beginning again where it nearly pays.
            optimism = 1.0 if self._is_drafting else HOPE
            hopeful = self.estimates.options(facts.requests, self.costs, optimism=optimism)
            plan = chosen_plan(hopeful, prices, outlook, known, is_drafting=self._is_drafting)
        gain = gain_of(plan, outlook)
        if regime.guard.waiting and plan.picks:
            if gain <= regime.guard.gain_at_alarm + RELEASE:
                return self._off(facts, outlook, prices, options, Reason.PATIENCE)
            regime.guard.release()
        self._is_drafting = bool(plan.picks)
        if not facts.prompt_rows:
            tokens = outlook.num_requests + plan.tokens
            plain_tokens = outlook.plain_tokens(outlook.step_s(plan))
            regime.observe(tokens, plain_tokens, 1 + self._reused)
        if not plan.picks:
            return self._off(facts, outlook, prices, options, Reason.NO_GAIN)
        # Prompts would hide what it takes.
        if not facts.prompt_rows and self._plain_steps.is_due(gain, regime):
            self._plain_steps.begin_burst()
            regime.num_plain_bursts += 1
            decision = self._decision(facts, outlook, Reason.PLAIN_PROBE)
            left = self._plain_steps.burst - 1
            self._standing.put(decision, len(facts.requests), facts.prompt_rows, left)
            return decision
        self._terms = outlook, prices
        return self._decision(facts, outlook, Reason.GAIN, plan)

    def _off(
        self,
        facts: StepFacts,
        outlook: Outlook,
        prices: Prices,
        options: Sequence[Sequence[Option]],
        reason: Reason,
    ) -> Decision:
        """No drafts, except those of a probe."""
        self._welcomes = reason is Reason.NO_GAIN and pays_anew(
            facts, outlook, prices, self.estimates, self.costs
        )
        plan = self.probe.plan(
            facts, options, outlook, prices, self.estimates, self.costs, self._deciding_s
        )
        if plan is not None:
            return self._decision(facts, outlook, Reason.NETWORK_PROBE, plan)
        return self._decision(facts, outlook, reason)

    def _decision(
        self, facts: StepFacts, outlook: Outlook, reason: Reason, plan: Plan | None = None
    ) -> Decision:
        turn = self._num_steps
        return decision_of(facts, outlook, reason, plan, self.estimates, self.costs, turn)

    def _count(self, facts: StepFacts, decision: Decision) -> None:
        """Steps since plain ones, since offers were taken, since the network drafted."""
        if not decision.grants:
            self._plain_steps.pass_by()
            self.probe.pass_by()
            if facts.has_offers:
                self._looks.refuse()
            return
        self._plain_steps.draft()
        self._looks.take()
        networks = {r.request_id: r.network for r in facts.requests}
        if all(grant.source != networks[grant.request_id] for grant in decision.grants):
            self.probe.pass_by()
        elif decision.reason is Reason.GAIN:
            self.probe.end()

    def _regime(self, num_requests: int) -> Regime:
        return self._regimes.setdefault(num_requests.bit_length(), Regime())
