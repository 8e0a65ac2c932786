"""Decides before each step which sources draft and how far; learns from each finished step.

    costs (a measured table, corrected) x chances (faded counts) -> the plan with the most tokens a
    second; hold the decision for some steps; probe what is off.

Pure: no clock, no random numbers, no device. Decisions follow from finished steps alone, and from
what the host offers, whose drafts are one-hot: so no length depends on a token that was drawn or on
a coin that was tossed in the same step (docs/design/0012-lengths-from-the-past.md). While a chain
is drafted, the engine itself compares its live survival with the decision's price.
"""

from collections.abc import Callable, Sequence

from outdraft.control.chances import Chances, Curve
from outdraft.control.corrections import Costs
from outdraft.control.costs import CostTable
from outdraft.control.facts import StepFacts, StepOutcome
from outdraft.control.probe import Probe
from outdraft.control.search import PLAIN, DraftPlan, Option, Pick, Prices, best_plan
from outdraft.core.decision import Decision, Grant, LiveStop, Reason

MARGIN = 0.01  # gain over plain decoding that is needed to leave it
HOPE = 0.5  # share of the doubt about chances that drafts begin with
HOLD_SHARE = 0.01  # of the time, the most that deciding may take
MAX_HOLD = 32  # steps
OFF_STEPS = 8  # steps without the network's drafts after which it counts as off
# Steps that draft between bursts of plain ones: the first time, and at most; and a burst's length.
FIRST_PLAIN, PLAIN_EVERY, PLAIN_BURST = 32, 256, 2
MAX_REFUSALS = 8  # decisions in a row that refused all offers, after which one holds without a look
SHADOWS = 8  # requests of a step whose unused offers are compared with the text
LONG_RUN = 1 / 32  # of the latest step in the long run's averages


class Controller:
    """Chooses lengths by costs and chances.

    Args:
        table: the times of passes.
        max_levels: most levels of any draft.
        on_wrong_costs: called once if the table turns out to be wrong.
    """

    def __init__(
        self,
        table: CostTable,
        max_levels: int,
        on_wrong_costs: Callable[[], None] | None = None,
    ) -> None:
        self.costs = Costs(table)
        self.chances = Chances(max_levels)
        self._on_wrong_costs = on_wrong_costs
        self.probe = Probe()
        self._is_drafting = False
        self._num_steps = 0
        self._deciding_s = 0.0  # on average, and to learn
        self._since_plain = 0  # steps that drafted since a plain one
        self._plain_every = FIRST_PLAIN
        self._plain_left = 0  # steps of a burst of plain ones
        self._long_run: dict[int, tuple[float, float]] = {}  # tokens, plain tokens, by batch
        self._standing: Decision | None = None
        self._num_requests = 0  # of the step that it was made for
        self._hold = 0  # steps that it still holds for
        self._num_refused = 0  # decisions in a row that refused all offers

    def hold(
        self, num_requests: int, prompt_rows: int = 0, *, may_offer: bool = False
    ) -> Decision | None:
        """The latest decision, if it holds for the step that begins now; the step is then counted.

        It holds for as many steps as make deciding take 1 % of the time, for the same requests.
        Sources of the host that may find drafts look first, but not after many offers in a row that
        were all refused.
        """
        if self._hold <= 0 or num_requests != self._num_requests or prompt_rows:
            return None
        if may_offer and self._num_refused < MAX_REFUSALS:
            return None
        self._hold -= 1
        assert self._standing is not None
        self._count(self._standing)
        return self._standing

    def decide(self, facts: StepFacts) -> Decision:
        """Decide how the step that begins now speculates.

        Raises:
            KeyError: a request names a network that the table of costs does not know.
        """
        decision = self._decide(facts)
        self._count(decision)
        self._standing, self._num_requests = decision, len(facts.requests)
        self._hold = 0
        if decision.reason is Reason.GAIN:
            self._num_refused = 0
        elif facts.has_offers:
            self._num_refused += 1
        is_open = facts.has_offers and self._num_refused < MAX_REFUSALS
        if not (is_open or facts.prompt_rows or self.probe.request_ids):
            most = self._deciding_s / (HOLD_SHARE * max(decision.step_s, 1e-9))
            self._hold = max(0, min(MAX_HOLD, int(most)) - 1)
            if not decision.grants and any(one.network for one in facts.requests):
                self._hold = min(self._hold, max(0, self.probe.due_in - 1))
            if self._plain_left:  # the rest of a burst of plain steps
                self._hold, self._plain_left = self._plain_left, 0
        return decision

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step that is over."""
        facts, decision = outcome.facts, outcome.decision
        if not facts.requests:
            return
        if not outcome.is_held:
            self._deciding_s += (outcome.deciding_s - self._deciding_s) / 8
        excess = self.chances.observe(outcome)
        self.costs.observe(outcome)
        if decision.reason is Reason.NETWORK_PROBE:
            actual_s = outcome.draft_s + outcome.target_s + outcome.host_s
            plain_s = outcome.num_tokens * decision.plain_s / len(facts.requests)
            lost_s = 0.0 if facts.prompt_rows else actual_s - plain_s
            self.probe.observe(excess, lost_s + outcome.deciding_s)
        if self._on_wrong_costs is not None and self.costs.are_wrong:
            self._on_wrong_costs()
            self._on_wrong_costs = None

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that ended."""
        self.chances.forget(request_id)
        self._hold = 0

    def network_due_in(self) -> int:
        """Count the steps until the network may draft again; 0 while drafts pay and it makes them,
        or made them less than OFF_STEPS steps ago."""
        if self._is_drafting and self.probe.idle_steps < OFF_STEPS:
            return 0
        return max(1, self.probe.due_in)

    def _decide(self, facts: StepFacts) -> Decision:
        self._num_steps += 1
        prices = self._prices(facts)
        has_source = any(r.max_drafts > 0 and (r.offers or r.network) for r in facts.requests)
        if not has_source or facts.max_rows == 0:
            reason = Reason.NO_ROOM if has_source else Reason.NOTHING_OFFERED
            return self._decision(facts, prices, reason)
        options = [self.chances.options(one, self.costs, 0.0) for one in facts.requests]
        if plan := self.probe.next_plan(facts, options, prices):
            return self._decision(facts, prices, Reason.NETWORK_PROBE, plan)
        plan = self._best(facts, options, prices)
        if not plan.picks and self.chances.are_doubted(facts):
            # A few unlucky labels do not end drafting, as there would be few new labels without
            # drafts. They also do not keep it from beginning again where it nearly pays.
            hope = 1.0 if self._is_drafting else HOPE
            hopeful = [self.chances.options(one, self.costs, hope) for one in facts.requests]
            plan = self._best(facts, hopeful, prices)
        self._is_drafting = bool(plan.picks)
        if not facts.prompt_rows:
            self._remember(prices, plan)
        if plan.picks:
            if self._since_plain >= self._plain_every and not facts.prompt_rows:
                self._plain_left = PLAIN_BURST
                self._plain_every = min(PLAIN_EVERY, 2 * self._plain_every)
            if self._plain_left > 0:
                self._plain_left -= 1
                return self._decision(facts, prices, Reason.PLAIN_PROBE)
            return self._decision(facts, prices, Reason.GAIN, plan)
        if plan := self._probed(facts, options, prices):
            return self._decision(facts, prices, Reason.NETWORK_PROBE, plan)
        return self._decision(facts, prices, Reason.NO_GAIN)

    def _best(
        self, facts: StepFacts, options: Sequence[Sequence[Option]], prices: Prices
    ) -> DraftPlan:
        """The best plan; PLAIN if it hardly gains and nothing was drafted before."""
        long_run = None
        if facts.has_offers:
            tokens, plain = self._long_run.get(prices.num_requests.bit_length(), (1.0, 1.0))
            long_run = prices.plain_rate * max(1.0, tokens / plain)
        plan = best_plan(options, prices, long_run)
        if not self._is_drafting and plan.rate(prices) <= (1 + MARGIN) * prices.plain_rate:
            return PLAIN
        return plan

    def _probed(
        self, facts: StepFacts, options: Sequence[Sequence[Option]], prices: Prices
    ) -> DraftPlan | None:
        network = next((one.network for one in facts.requests if one.network is not None), None)
        if network is None:
            return None
        is_first = not any(self.chances.has_drafted(one) for one in facts.requests)
        plan = self.probe.new_plan(
            facts,
            options,
            prices,
            lambda num_tokens: self.costs.catch_up_s(network, num_tokens),
            is_first=is_first,
            deciding_s=self._deciding_s,
        )
        if plan is not None:
            first = facts.requests[plan.picks[0].request]
            for shape in first.shapes:
                curve = self.chances.network(first.network or "", first.rule, shape)
                curve.doubt_all(self.probe.num_labels)
        return plan

    def _prices(self, facts: StepFacts) -> Prices:
        costs, count = self.costs, len(facts.requests)
        lengths = [request.context_tokens for request in facts.requests]
        most = min(facts.max_rows, sum([request.most_rows for request in facts.requests]))
        target_N = costs.target_N(count + facts.prompt_rows, 1 + most, sum(lengths), count)
        plain_s = target_N[0]
        if facts.prompt_rows:
            [plain_s] = costs.target_N(count, 1, sum(lengths), count)
        network = next((r.network for r in facts.requests if r.network is not None), None)
        pass_N, max_passes, start_s = [0.0, 0.0], 0, 0.0
        if network is not None:
            pass_N = costs.pass_N(network, 1 + count + most, lengths)
            max_passes = costs.table.drafters[network].max_passes
            start_s = costs.start_s(network, lengths)
        plain_s += costs.host_s(count)
        drafting_s = costs.drafting_s(count)
        return Prices(count, plain_s, target_N, pass_N, max_passes, start_s, drafting_s)

    def _remember(self, prices: Prices, plan: DraftPlan) -> None:
        """Add a step to the long run: its tokens, and those of plain decoding in the same time."""
        key = prices.num_requests.bit_length()
        step_s = prices.plain_s + plan.added_s
        new = prices.num_requests + plan.tokens, prices.plain_rate * step_s
        old = self._long_run.get(key, new)
        self._long_run[key] = (
            old[0] + LONG_RUN * (new[0] - old[0]),
            old[1] + LONG_RUN * (new[1] - old[1]),
        )

    def _count(self, decision: Decision) -> None:
        """Count steps since the network drafted for gain, and since plain steps."""
        networks = self.costs.table.drafters
        if not any(grant.source in networks for grant in decision.grants):
            self.probe.idle_steps += 1
        elif decision.reason is Reason.GAIN:
            self.probe.end()
        self._since_plain = self._since_plain + 1 if decision.grants else 0

    def _decision(
        self, facts: StepFacts, prices: Prices, reason: Reason, plan: DraftPlan = PLAIN
    ) -> Decision:
        """The decision that the engine acts on, made of a plan."""
        count, costs = prices.num_requests, self.costs
        host_s, target_s = costs.host_s(count), prices.target_N[plan.rows]
        plain_s = host_s + prices.target_N[0]
        if not plan.picks:
            shadows = _shadows(facts, frozenset(), self._num_steps)
            return Decision(reason, (), None, 0.0, target_s, host_s, plain_s, count, 0.0, shadows)
        price = plan.row_price(prices, plan.rate(prices)) if reason is Reason.GAIN else 0.0
        network = next((one.option.source for one in plan.picks if one.option.is_network), "")
        unread = sum(
            facts.requests[one.request].unread_tokens for one in plan.picks if one.option.is_network
        )
        catch_up_s = costs.catch_up_s(network, unread) if unread else 0.0
        served = frozenset(one.request for one in plan.picks if not one.option.is_network)
        return Decision(
            reason,
            self._grants(facts, plan, price),
            price,
            plan.draft_s + catch_up_s,
            target_s,
            host_s + prices.drafting_s,
            plain_s,
            count + plan.tokens,
            plan.rate(prices) / prices.plain_rate - 1,
            _shadows(facts, served, self._num_steps),
            catch_up_s,
        )

    def _grants(self, facts: StepFacts, plan: DraftPlan, price: float) -> tuple[Grant, ...]:
        has_room = len(plan.picks) * max(one.levels for one in plan.picks) <= facts.max_rows
        # With the curve that reads margins, and the levels.
        found = list[tuple[Pick, Curve | None, int]]()
        for pick in plan.picks:
            request, option, levels = facts.requests[pick.request], pick.option, pick.levels
            curve = None
            if option.is_network and not option.shape and request.can_stop:
                curve = self.chances.network(option.source, request.rule, option.shape)
                if has_room and price > 0 and curve.knows_margins:
                    # A chain that goes well may become longer than planned.
                    levels = min(plan.depth, 1 + 2 * levels, len(option.survivals))
            found.append((pick, curve, levels))
        rows = sum([pick.option.num_rows(levels) for pick, _, levels in found])
        first_row = len(facts.requests) + facts.prompt_rows
        edge = self.costs.table.target.edge(first_row + plan.rows)
        row_cap = min(rows, facts.max_rows, rows if edge is None else edge - first_row)
        grants = list[Grant]()
        for pick, curve, levels in found:
            request, option, stop = facts.requests[pick.request], pick.option, None
            if curve is not None and price > 0 and curve.knows_margins:
                stop = curve.live_stop(request.request_id, levels, price, row_cap)
            elif curve is not None:  # margins are reported, to learn from
                stop = LiveStop((0.0,) * levels, (0.0,) * levels, price=0.0)
            grants.append(
                Grant(
                    request.request_id,
                    option.source,
                    levels,
                    option.num_rows(levels),
                    option.match_length,
                    request.rule,
                    option.shape,
                    stop,
                )
            )
        return tuple(grants)


def _shadows(facts: StepFacts, served: frozenset[int], turn: int) -> tuple[str, ...]:
    """Ids of requests whose unused offers are compared with the text; other ids follow later.

    served: places of the requests that take an offer.
    """
    if not facts.has_offers:
        return ()
    unused = [
        request.request_id
        for index, request in enumerate(facts.requests)
        if len(request.offers) > (index in served)
    ]
    start = turn * SHADOWS % len(unused) if len(unused) > SHADOWS else 0
    return tuple((unused + unused)[start : start + min(SHADOWS, len(unused))])
