"""Probes: short trials of a network that does not draft, on a few requests."""

import math
from collections.abc import Callable, Sequence

from outdraft.control.facts import StepFacts
from outdraft.control.search import DraftPlan, Option, Pick, Prices

PROBE_SHARE = 0.01  # of the time, the most that probes take
FIRST_INTERVAL, MIN_INTERVAL = 8, 64  # plain steps before the first probe, and between others
BURST, MAX_BURST = 4, 16  # steps of a probe
FIRST_DRAFTS = 50  # of the first probe at least, as far as its steps allow
MIN_EXCESS = 0.2  # tokens a step and request beyond the expected, for a probe to go on
DEPTH = 2  # levels
MAX_PROBED = 4  # requests at most; all of them in the first probe
PROBE_LABELS = 6.0  # labels that count of those from OLD_STEPS steps ago; of younger ones more
OLD_STEPS = 512  # steps


class Probe:
    """Counts steps without the network's drafts, and plans those that try them.

    Attributes:
        idle_steps: since the network drafted.
        interval: plain steps between probes, by the newest plan; None: none was planned.
        request_ids: the requests that it drafts for just now.
    """

    def __init__(self) -> None:
        self.idle_steps = 0
        self.interval: int | None = None
        self.request_ids: tuple[str, ...] = ()
        self._num_steps = 0  # of the probe that goes on, or went on last,
        self._num_drafts = 0
        self._excess = 0.0  # tokens for each request beyond those expected,
        self._lost_s = 0.0  # and the time that it lost
        self._depth = DEPTH
        self._is_first = True

    @property
    def due_in(self) -> int:
        """Steps until the next probe may begin, with the newest interval."""
        return max(0, (self.interval or FIRST_INTERVAL) - self.idle_steps)

    def next_plan(
        self, facts: StepFacts, options: Sequence[Sequence[Option]], prices: Prices
    ) -> DraftPlan | None:
        """Drafts of the probe that goes on; None: none does, or its requests ended."""
        if not self.request_ids:
            return None
        chosen = [i for i, r in enumerate(facts.requests) if r.request_id in self.request_ids]
        plan = _plan(options, chosen, self._depth, prices)
        if plan is None:
            self.end()
        return plan

    def new_plan(
        self,
        facts: StepFacts,
        options: Sequence[Sequence[Option]],
        prices: Prices,
        catch_up_s: Callable[[int], float],
        *,
        is_first: bool,
        deciding_s: float,
    ) -> DraftPlan | None:
        """Drafts of a probe that begins; None: it is not due, or there is no room for it.

        Args:
            catch_up_s: seconds by the number of tokens that the network has not read.
            is_first: the network has not drafted yet.
            deciding_s: time to decide and to learn.
        """
        if self.due_in and not is_first:
            return None
        self._is_first = is_first
        count = len(facts.requests)
        ways = ((count, DEPTH),) if is_first else ((MAX_PROBED, DEPTH), (count, 1))
        plans = [
            plan
            for most, depth in ways
            if (found := _candidates(facts, most, catch_up_s, prices.pass_s(1)))
            and (plan := _plan(options, found, depth, prices)) is not None
        ]
        if not plans:
            return None
        plan = min(plans, key=lambda one: _lost_s(one, prices) / len(one.picks))
        unread = sum(facts.requests[pick.request].unread_tokens for pick in plan.picks)
        lost_s = BURST * (_lost_s(plan, prices) + deciding_s) + catch_up_s(unread)
        lost_s = max(self._lost_s, lost_s)
        share_steps = math.ceil(lost_s / (PROBE_SHARE * prices.plain_s))
        self.interval = FIRST_INTERVAL if is_first else max(MIN_INTERVAL, share_steps)
        if self.due_in:
            return None
        self.request_ids = tuple(facts.requests[pick.request].request_id for pick in plan.picks)
        self._num_steps = self._num_drafts = 0
        self._excess, self._lost_s, self._depth = 0.0, 0.0, plan.depth
        return plan

    @property
    def num_labels(self) -> float:
        """Labels of earlier drafts that count in the probe that begins."""
        return PROBE_LABELS * max(1.0, OLD_STEPS / max(1, self.idle_steps))

    def observe(self, excess: float, lost_s: float) -> None:
        """Count a probe's step: `excess` tokens above the prediction, `lost_s` seconds lost."""
        if not self.request_ids:
            return
        self._num_steps += 1
        self._num_drafts += len(self.request_ids)
        self._excess += excess / len(self.request_ids)
        self._lost_s += lost_s
        goes_on = self._num_steps < BURST or (self._is_first and self._num_drafts < FIRST_DRAFTS)
        goes_on |= self._excess > MIN_EXCESS * self._num_steps
        if not goes_on or self._num_steps >= MAX_BURST:
            self.end()

    def end(self) -> None:
        """End the probe: it is over, or the network drafts for gain."""
        self.request_ids, self.idle_steps = (), 0


def _candidates(
    facts: StepFacts, most: int, catch_up_s: Callable[[int], float], least_s: float
) -> list[int]:
    """Requests for a probe: the one with the least to catch up that has some tokens to come, and
    others for which that takes no longer than `least_s`."""
    able = sorted(
        (request.unread_tokens, index)
        for index, request in enumerate(facts.requests)
        if request.network is not None and request.max_drafts > 0 and request.max_tokens > 2 * BURST
    )
    return [
        index
        for rank, (unread, index) in enumerate(able[:most])
        if rank == 0 or catch_up_s(unread) <= least_s
    ]


def _plan(
    options: Sequence[Sequence[Option]], chosen: Sequence[int], depth: int, prices: Prices
) -> DraftPlan | None:
    """A plan of these requests' network drafts, whatever they bring; None: there are none, or
    there is no room for them."""
    picks = list[Pick]()
    for index in chosen:
        network = next((option for option in options[index] if option.is_network), None)
        if network is not None and (not picks or network.shape == picks[0].option.shape):
            picks.append(Pick(index, network, min(depth, len(network.survivals))))
    rows = sum(pick.option.num_rows(pick.levels) for pick in picks)
    if not picks or rows > prices.max_rows:
        return None
    deepest = max(pick.levels for pick in picks)
    draft_s = prices.start_s
    for level in range(min(deepest, prices.max_passes)):
        live = [pick.option for pick in picks if level < pick.levels]
        draft_s += prices.pass_s(sum(one.rows_at(level - 1) if level else 1 for one in live))
    added_s = draft_s + prices.drafting_s + prices.target_N[rows] - prices.target_N[0]
    fixed_s = sum(pick.option.fixed_s for pick in picks)
    tokens = sum(pick.tokens for pick in picks)
    return DraftPlan(tuple(picks), deepest, rows, tokens, draft_s, added_s + fixed_s)


def _lost_s(plan: DraftPlan, prices: Prices) -> float:
    """Seconds that the plan adds to a step beyond the worth of its tokens."""
    return max(0.0, plan.added_s - plan.tokens / prices.plain_rate)
