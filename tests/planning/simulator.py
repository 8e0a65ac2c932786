"""A discrete-event simulator of the engine's steps: the controller's own code decides in it.

Costs are curves, measured or made up; so is acceptance. All noise belongs to a request and a place
of its text, so that two policies meet the same luck at the same place. A step's tokens are also
counted as expected before its coins fall, which tells two policies apart in fewer steps.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outdraft.control.costs import CostTable
from outdraft.control.facts import (
    DraftOutcome,
    HostOffer,
    RequestFacts,
    ShadowOutcome,
    StepFacts,
    StepOutcome,
)
from outdraft.control.policy import LengthPolicy
from outdraft.core.decision import CHAIN, Decision, Grant
from tests.planning.worlds import NETWORK, Acceptance, HostTruth, Scenario, World

MAX_MARGIN = 10.0
MAX_ROWS = 16384  # of a pass


@dataclass(slots=True)
class Steps:
    """What came of a simulation, by step.

    Attributes:
        expected: tokens before the coins of the step fell.
        drafted: rows of drafts.
    """

    seconds: list[float] = field(default_factory=list[float])
    tokens: list[int] = field(default_factory=list[int])
    expected: list[float] = field(default_factory=list[float])
    drafted: list[int] = field(default_factory=list[int])
    decisions: list[Decision] = field(default_factory=list[Decision])

    def rate(self, first: int = 0, last: int | None = None) -> float:
        """Expected tokens a second in steps [first, last)."""
        return sum(self.expected[first:last]) / sum(self.seconds[first:last])


class _Request:
    """One simulated request and its noise, by place of its text."""

    def __init__(self, index: int, scenario: Scenario) -> None:
        load = scenario.load
        self.index = index
        self.id = f"r{index}"
        self.prompt_left = load.prompt_tokens
        self.max_tokens = load.output_tokens[index % len(load.output_tokens)]
        self.num_tokens = 0
        self.lag = 0
        self.shadows: deque[tuple[int, ShadowOutcome]] = deque()
        self._rng = np.random.default_rng([scenario.seed, index])
        self._noise: list[list[float]] = []

    def noise(self, place: int) -> list[float]:
        """[network's coin, host's coin, margin, match found, its length] of a place."""
        while place >= len(self._noise):
            block = self._rng.random((256, 5))
            block[:, 2] = np.minimum(MAX_MARGIN, -3 * np.log(1 - block[:, 2]))
            self._noise.extend(block.tolist())
        return self._noise[place]

    @property
    def left(self) -> int:
        return self.max_tokens - self.num_tokens


class _Times:
    """A table's seconds by number of rows, at hand."""

    def __init__(self, table: CostTable) -> None:
        rows = np.arange(MAX_ROWS)
        self.target: list[float] = table.target.at(rows).tolist()
        cost = table.drafters.get(NETWORK)
        self.passes: list[float] = cost.passes.at(rows).tolist() if cost is not None else []
        self.catch_up: list[float] = cost.catch_up.at(rows).tolist() if cost is not None else []
        self.max_passes = cost.max_passes if cost is not None else 0
        self.start_s = cost.start_s if cost is not None else 0.0


class Simulator:
    """Runs a policy through a scenario, step by step.

    deciding_s: what it takes to decide and to learn, in each step that is not held.
    """

    def __init__(self, scenario: Scenario, policy: LengthPolicy, deciding_s: float = 0.0) -> None:
        self.scenario = scenario
        self.policy = policy
        self.deciding_s = deciding_s
        self.steps = Steps()
        self._num_started = 0
        self._decided: tuple[StepFacts, Decision] | None = None  # the last ones
        self._rng = np.random.default_rng([scenario.seed, 1 << 20])
        self._times: list[tuple[CostTable, _Times]] = []
        self._running = [self._start() for _ in range(scenario.load.concurrency)]

    def run(self, num_steps: int) -> Steps:
        for _ in range(num_steps):
            self._step(self.scenario.world(len(self.steps.seconds)))
        return self.steps

    def _start(self) -> _Request:
        request = _Request(self._num_started, self.scenario)
        self._num_started += 1
        return request

    def _step(self, world: World) -> None:
        rows_left, prompt_rows = self.scenario.load.chunk_rows, 0
        decoding = list[_Request]()
        for request in self._running:
            if request.prompt_left:
                rows = min(request.prompt_left, rows_left)
                request.prompt_left -= rows
                rows_left, prompt_rows = rows_left - rows, prompt_rows + rows
            else:
                decoding.append(request)
        count = len(decoding)
        decision = self.policy.hold(count, prompt_rows, may_offer=world.host is not None)
        facts = None
        if decision is None:
            offers = [_offers(one, world.host, self.scenario.max_drafts) for one in decoding]
            if world.host is not None and not any(offers):
                decision = self.policy.hold(count, prompt_rows)
        if decision is None:
            pairs = zip(decoding, offers, strict=True)
            facts = StepFacts(tuple(self._facts(*one, world) for one in pairs), prompt_rows)
            decision = self.policy.decide(facts)
            self._decided = facts, decision
        host_s = world.table.booking_s(count, drafts=bool(decision.grants))
        self._execute(world, decoding, prompt_rows, host_s, facts, decision)

    def _facts(
        self, request: _Request, offers: tuple[HostOffer, ...], world: World
    ) -> RequestFacts:
        return RequestFacts(
            request.id,
            request.left,
            min(self.scenario.max_drafts, request.left - 1),
            self._context(request),
            offers,
            NETWORK if world.network is not None else None,
            shapes=(self.scenario.tree, CHAIN) if self.scenario.tree else (CHAIN,),
            unread_tokens=min(request.lag, self.scenario.window),
        )

    def _context(self, request: _Request) -> int:
        return self.scenario.load.prompt_tokens + request.num_tokens

    def _execute(
        self,
        world: World,
        decoding: Sequence[_Request],
        prompt_rows: int,
        host_s: float,
        facts: StepFacts | None,
        decision: Decision,
    ) -> None:
        """`facts`: None if the step is held."""
        times = self._times_of(world.table)
        drafts = _Drafts(world, times, self.scenario, decoding, decision)
        context = sum(self._context(request) for request in decoding)
        outcomes = list[DraftOutcome]()
        shadows = list[ShadowOutcome]()
        num_tokens, expected = len(decoding), float(len(decoding))
        for fact in facts.requests if facts is not None else ():
            if fact.request_id in decision.shadows:
                request, grant = (
                    drafts.requests[fact.request_id],
                    drafts.grants.get(fact.request_id),
                )
                _cast_shadows(request, fact, world, grant)
        for request in decoding:
            grant = drafts.grants.get(request.id)
            accepted = 0
            if grant is not None:
                outcome, mean = drafts.outcome(request, grant)
                outcomes.append(outcome)
                accepted, expected = outcome.accepted, expected + mean
            num_tokens += accepted
            uses_network = grant is not None and grant.source == NETWORK
            request.lag = 0 if uses_network else request.lag + 1 + accepted
            request.num_tokens += 1 + accepted
            while request.shadows and request.shadows[0][0] <= request.num_tokens:
                shadows.append(request.shadows.popleft()[1])
        num_rows = len(decoding) + prompt_rows + drafts.num_rows
        draft_s = drafts.seconds * self._jitter()
        table = world.table
        target_s = times.target[num_rows] + table.context_s * context
        target_s += table.request_s * max(0, len(decoding) - 1)
        target_s *= world.target_factor * self._jitter()
        deciding_s = 0.0 if facts is None else self.deciding_s
        if self._decided is not None and self._decided[1] is decision:
            self.policy.observe(
                StepOutcome(
                    self._decided[0], decision, tuple(outcomes), num_rows, num_tokens,
                    draft_s, target_s, host_s, tuple(shadows), deciding_s, facts is None,
                )
            )  # fmt: skip
        self.steps.seconds.append(draft_s + target_s + host_s + deciding_s)
        self.steps.tokens.append(num_tokens)
        self.steps.expected.append(expected)
        self.steps.drafted.append(drafts.num_rows)
        self.steps.decisions.append(decision)
        self._replace_finished()

    def _replace_finished(self) -> None:
        for index, request in enumerate(self._running):
            if request.left <= 0:
                self.policy.forget(request.id)
                self._running[index] = self._start()

    def _times_of(self, table: CostTable) -> _Times:
        for known, times in self._times:
            if known is table:
                return times
        self._times.append((table, _Times(table)))
        return self._times[-1][1]

    def _jitter(self) -> float:
        return math.exp(self.scenario.noise * self._rng.standard_normal())


class _Drafts:
    """A step's drafts as the engine makes them: pass by pass, in batch order within a pass.

    A decision may be some steps old, so that a request ended, or has fewer tokens left than it
    was granted.
    """

    def __init__(
        self,
        world: World,
        times: _Times,
        scenario: Scenario,
        decoding: Sequence[_Request],
        decision: Decision,
    ) -> None:
        self._world, self._times, self._scenario = world, times, scenario
        self.requests = {request.id: request for request in decoding}
        self.most = {
            grant.request_id: min(grant.levels, self.requests[grant.request_id].left - 1)
            for grant in decision.grants
            if grant.request_id in self.requests
        }
        grants = [grant for grant in decision.grants if self.most.get(grant.request_id)]
        self.grants: dict[str, Grant] = {grant.request_id: grant for grant in grants}
        self.levels = {
            grant.request_id: 0 if grant.source == NETWORK else grant.levels for grant in grants
        }
        self.num_rows = sum(self.levels.values())
        self.seconds = 0.0
        self._margins: dict[str, list[float]] = {}
        live = [grant for grant in grants if grant.source == NETWORK]
        assert len({grant.shape for grant in live}) <= 1, "a network drafts one shape in a step"
        lag = sum(min(self.requests[g.request_id].lag, scenario.window) for g in live)
        if live:
            self.seconds = times.start_s + times.catch_up[min(lag, MAX_ROWS - 1)]
            self._draft(live)
            self.seconds *= world.draft_factor

    def _draft(self, live: list[Grant]) -> None:
        survival = {grant.request_id: 1.0 for grant in live}
        level = 0
        while live:
            if level < self._times.max_passes:
                rows = sum(_rows_at(grant, level - 1) if level else 1 for grant in live)
                self.seconds += self._times.passes[rows]
            going_on = list[Grant]()
            for grant in live:
                request = self.requests[grant.request_id]
                margin = request.noise(request.num_tokens + level)[2]
                if not grant.shape:
                    self._margins.setdefault(request.id, []).append(margin)
                stop = grant.stop
                if stop is not None and stop.may_end:
                    score = stop.weights[level] * margin + stop.biases[level]
                    survival[request.id] /= 1 + math.exp(-score)
                    if survival[request.id] < stop.price or self.num_rows >= stop.row_cap:
                        continue
                self.levels[request.id] += 1
                self.num_rows += _rows_at(grant, level)
                if self.levels[request.id] < self.most[request.id]:
                    going_on.append(grant)
            live, level = going_on, level + 1

    def outcome(self, request: _Request, grant: Grant) -> tuple[DraftOutcome, float]:
        """How the draft fares, and how many tokens were to be expected of it."""
        drafted, accepted, survival, expected = self.levels[request.id], 0, 1.0, 0.0
        is_network = grant.source == NETWORK
        truth = self._world.tree if grant.shape else self._world.network
        for level in range(drafted):
            noise = request.noise(request.num_tokens + level)
            if is_network:
                chance = _network_chance(truth, request, level, noise[2])
            else:
                assert self._world.host is not None
                chance = self._world.host.chance(grant.match_length)
            survival *= chance
            expected += survival
            if accepted == level and noise[0 if is_network else 1] < chance:
                accepted += 1
        margins = tuple(self._margins.get(request.id, ()))
        return DraftOutcome(request.id, drafted, accepted, margins), expected


def _rows_at(grant: Grant, level: int) -> int:
    return grant.shape[level] if grant.shape else 1


def _network_chance(
    truth: Acceptance | None, request: _Request, level: int, margin: float
) -> float:
    assert truth is not None
    score = truth.logit(level, request.index)
    score += truth.margin_weight * (margin - 2.0)
    return 1 / (1 + math.exp(-score))


def _offers(request: _Request, host: HostTruth | None, max_drafts: int) -> tuple[HostOffer, ...]:
    if host is None:
        return ()
    noise = request.noise(request.num_tokens)
    length = min(max_drafts, request.left - 1)
    if noise[3] >= host.rate or length < 1:
        return ()
    matches = host.match_lengths
    return (HostOffer(host.source, length, matches[int(noise[4] * len(matches))]),)


def _cast_shadows(
    request: _Request, facts: RequestFacts, world: World, grant: Grant | None
) -> None:
    """Remember how unused offers will turn out; it is told once the text is there."""
    assert world.host is not None
    for offer in facts.offers:
        if grant is not None and grant.source == offer.source:
            continue
        chance, accepted = world.host.chance(offer.match_length), 0
        while accepted < offer.length and request.noise(request.num_tokens + accepted)[1] < chance:
            accepted += 1
        ready = request.num_tokens + min(accepted + 1, offer.length)
        outcome = ShadowOutcome(offer.source, offer.match_length, offer.length, accepted)
        request.shadows.append((ready, outcome))
