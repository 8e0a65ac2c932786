"""Small experiments that keep estimates fresh: the network while it is off, plain while it is on.

A network that does not draft shows nothing about itself. So it drafts for a few requests in a
while: some steps, more while they go much better than expected, or if it has never drafted before.
What they lose, their accepted drafts set off, and what it takes to keep the target's states for
them, is at most 1 % of the time until the next probe: this is the longest interval there is. So a
network that nearly pays is tried often, and on all requests.
Plain steps do not happen while drafts pay, so that nobody would notice if they got faster: one in a
while is plain.
"""

import math
from collections.abc import Sequence

from outdraft.control.drift import Costs
from outdraft.control.estimates import Estimates
from outdraft.control.facts import StepFacts
from outdraft.control.outlook import Outlook
from outdraft.control.plans import Option, Pick, Plan, Prices

SHARE = 0.01  # most of the time that network probes take
PLAIN_SHARE = 0.005  # most of the tokens that plain probes cost
MIN_INTERVAL = 64  # steps
FIRST_INTERVAL = 8  # for a network that has never drafted
BURST, LONGEST_BURST = 4, 16  # steps
PROMISING = 0.2  # tokens a step beyond what was expected, for a probe to go on
DEPTH = 2  # levels
PROBED = 4  # requests at most; all of them in the first probe
FIRST_DRAFTS = 50  # of the first probe at least, as far as its steps allow
PROBE_INFORMATION = 2.0  # what counts of labels that are OLD: about 10; more of younger ones
OLD = 512  # steps
PLAIN_INTERVALS = 48, 1024


class NetworkProbe:
    """When a network that does not draft is tried, and on which requests."""

    def __init__(self) -> None:
        self.request_ids: tuple[str, ...] = ()  # for whom it drafts just now
        self.interval: int | None = None  # steps from one probe to the next, as things stand
        self._idle = 0  # steps without drafts of the network
        self._known_until = 0  # steps without drafts until `interval` is looked at again
        self._burst = 0
        self._num_drafts = 0  # of the last probe,
        self._excess = 0.0  # what they brought beyond what was expected,
        self._lost_s = 0.0  # and the time that they lost
        self._kept_s = 0.0  # what plain steps took to keep states for the next probe,
        self._last_kept_s = 0.0  # and for the last one
        self._token_s = 0.0  # seconds that plain decoding takes for a token
        self._depth = DEPTH
        self._is_first = False

    @property
    def idle_steps(self) -> int:
        """Steps since the network drafted."""
        return self._idle

    @property
    def due_in(self) -> int:
        """Steps until the next probe may begin, as far as is known."""
        return max(0, (self.interval or FIRST_INTERVAL) - self._idle)

    def plan(
        self,
        facts: StepFacts,
        options: Sequence[Sequence[Option]],
        outlook: Outlook,
        prices: Prices,
        estimates: Estimates,
        costs: Costs,
        deciding_s: float,
    ) -> Plan | None:
        """Drafts of a probe, if one goes on or is due; None: the step is plain.

        options: of each request. deciding_s: what it takes to decide and to learn.
        """
        token_s = outlook.alone_s / max(1, outlook.num_requests)
        if self.request_ids:
            chosen = [i for i, r in enumerate(facts.requests) if r.request_id in self.request_ids]
            plan = _priced(_picks(options, chosen, self._depth), prices)
            if plan is None:
                self.end()
            else:
                self._lost_s += _lost_s(plan, prices, token_s) + deciding_s
                self._token_s = token_s
            return plan
        self._is_first = not any(estimates.has_drafted(request) for request in facts.requests)
        if self._idle < min(self._known_until, MIN_INTERVAL) and not self._is_first:
            return None
        plans = [
            plan
            for most, depth in self._ways(len(facts.requests))
            if (plan := _plan(facts, options, most, depth, prices, costs)) is not None
        ]
        if not plans:
            return None
        plan = min(plans, key=lambda plan: _lost_s(plan, prices, token_s) / len(plan.picks))
        lag = sum(facts.requests[pick.request].lag_tokens for pick in plan.picks)
        catch_up_s = costs.catch_up_s(plan.picks[0].option.source, lag)
        first = facts.requests[plan.picks[0].request]
        lost_s = _lost_s(plan, prices, token_s) + deciding_s
        probe_s = max(self._lost_s, BURST * lost_s + catch_up_s) + self._last_kept_s
        self.interval = network_interval(probe_s, outlook.alone_s, is_new=self._is_first)
        if self._idle < self.interval:
            self._known_until = self.interval
            return None
        self.request_ids = tuple(facts.requests[pick.request].request_id for pick in plan.picks)
        self._depth = plan.depth
        self._burst, self._num_drafts, self._excess = 0, 0, 0.0
        self._lost_s, self._token_s = catch_up_s + lost_s, token_s
        estimates.doubt_network(first, PROBE_INFORMATION * max(1.0, OLD / max(1, self._idle)))
        return plan

    def _ways(self, num_requests: int) -> tuple[tuple[int, int], ...]:
        """Numbers of requests and depths of a probe; few rows, or all requests in one pass."""
        if self._is_first:
            return ((num_requests, DEPTH),)
        return (PROBED, DEPTH), (num_requests, 1)

    def pass_by(self) -> None:
        """A step went by without drafts of the network."""
        self._idle += 1

    def observe_keeping(self, seconds: float) -> None:
        """So long it took to keep the target's states in a plain step."""
        self._kept_s += seconds

    def observe(self, excess: float, excess_s: float) -> None:
        """A probe's step brought so many tokens more than predicted, and took so much longer."""
        self._burst += 1
        self._lost_s += excess_s - excess * self._token_s
        self._excess += excess / max(1, len(self.request_ids))
        self._num_drafts += len(self.request_ids)
        goes_on = self._burst < BURST or (self._is_first and self._num_drafts < FIRST_DRAFTS)
        goes_on |= self._excess > PROMISING * self._burst
        if not goes_on or self._burst >= LONGEST_BURST:
            self.end()

    def end(self) -> None:
        self.request_ids, self._idle, self._known_until = (), 0, 0
        if self._kept_s:  # else no state was kept since, and the network goes on drafting
            self._last_kept_s, self._kept_s = self._kept_s, 0.0


def _candidates(facts: StepFacts, prices: Prices, costs: Costs, most: int) -> list[int]:
    """Requests for a probe: those with the least to catch up, if that is less than a pass takes."""
    able = sorted(
        (request.lag_tokens, index)
        for index, request in enumerate(facts.requests)
        if request.network is not None and request.max_drafts > 0 and request.max_tokens > 2 * BURST
    )
    return [
        index
        for rank, (lag, index) in enumerate(able[:most])
        if rank == 0
        or costs.catch_up_s(facts.requests[index].network or "", lag) <= prices.pass_N[1]
    ]


def _plan(
    facts: StepFacts,
    options: Sequence[Sequence[Option]],
    most: int,
    depth: int,
    prices: Prices,
    costs: Costs,
) -> Plan | None:
    """A probe on so many requests."""
    chosen = _candidates(facts, prices, costs, most)
    return _priced(_picks(options, chosen, depth), prices)


def _picks(options: Sequence[Sequence[Option]], chosen: Sequence[int], depth: int) -> list[Pick]:
    picks = list[Pick]()
    for index in chosen:
        network = next((option for option in options[index] if option.is_network), None)
        if network is not None and (not picks or network.shape == picks[0].option.shape):
            picks.append(Pick(index, network, min(depth, len(network.survivals))))
    return picks


def _priced(picks: Sequence[Pick], prices: Prices) -> Plan | None:
    """A plan of these picks, whatever it brings; None if there are none, or no room for them."""
    rows = sum(pick.option.num_rows(pick.levels) for pick in picks)
    if not picks or rows > prices.max_rows:
        return None
    depth = max(pick.levels for pick in picks)
    pass_rows = [
        sum(pick.option.pass_rows(level) for pick in picks if level < pick.levels)
        for level in range(min(depth, prices.max_passes))
    ]
    draft_s = (
        prices.drafting_s + prices.start_s + float(sum(prices.pass_N[count] for count in pass_rows))
    )
    tokens = sum(pick.tokens for pick in picks)
    target_s = float(prices.target_N[rows])
    return Plan(tuple(picks), depth, rows, 0.0, tokens, 0.0, draft_s, target_s, 0.0)


def _lost_s(plan: Plan, prices: Prices, token_s: float) -> float:
    """What the plan adds to a step beyond what its tokens are worth, catching up aside."""
    added_s = plan.draft_s + plan.target_s - float(prices.target_N[0])
    return max(0.0, added_s - plan.tokens * token_s)


def network_interval(lost_s: float, plain_s: float, *, is_new: bool) -> int:
    """Steps from one probe to the next, so that probes take at most their share of the time.

    lost_s: time that a probe loses. plain_s: a step without drafts. is_new: the network has
    never drafted.
    """
    if is_new:
        return FIRST_INTERVAL
    return max(MIN_INTERVAL, math.ceil(lost_s / (SHARE * plain_s)))


def plain_interval(gain: float, burst: int) -> int:
    """Steps from one burst of so many plain steps to the next while drafts gain so much."""
    low, high = PLAIN_INTERVALS
    lost = max(0.0, 1 - 1 / (1 + max(0.0, gain)))
    return max(low, min(high, math.ceil(burst * lost / PLAIN_SHARE)))
