"""Raises alarms: a source of drafts does worse than before, or is of no use.

Pure, and cheap: a step without drafts costs one comparison, a draft costs a few additions.

A fall is found by a CUSUM over blocks of requests (Page, Biometrika 1954). A draft's levels are
compared with the history of its source at each level, so that longer or shorter drafts make no
difference. Tokens of one request are alike, so evidence is counted in requests: a block is the
drafts of at least BLOCK_REQUESTS of them that have ended. The standard deviation of blocks is
measured, too: where requests differ much, more of them have to be poor. The sum says how far blocks
fell short, in deviations, beyond SLACK a block.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outdraft.core.decision import Alarm, AlarmKind, Decision, Reason
from outdraft.core.plan import drafted_levels
from outdraft.core.request import BookedWork

LEVEL_TRIALS = 64  # of a level, before its history counts
BLOCK_REQUESTS, BLOCK_TRIALS = 4, 128  # at least, of a block
LONG_REQUEST = 512  # trials, after which a request counts as a new one
ROUGH_BLOCKS = 8  # the first ones, whose deviations are left out: the history is too short
FIRST_BLOCKS = 32  # of a history, before an alarm can begin
MEMORY = 200  # blocks
SLACK, LIMIT = 0.5, 12.0  # in standard deviations of a block
RENEWAL = 100  # blocks of an alarm, after which the history begins anew


class FallWatch:
    """Watches one source.

    Attributes:
        is_on: acceptance is below its history.
        evidence: why `is_on` changed, as a sentence; "" before it first does.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.evidence = ""
        self._requests: dict[str, _Share] = {}
        self._forget_history()

    def observe(self, request_id: str, levels: int, accepted: int) -> None:
        """Count a verified draft of a request: its levels, and those that were accepted."""
        reached = min(levels, accepted + 1)
        self._outcomes[reached, accepted] += 1
        share = self._requests.get(request_id)
        if share is None:
            share = self._requests[request_id] = _Share()
        num_levels = len(self._expected) - 1  # with a history
        share.reached += reached
        share.accepted += accepted if accepted < num_levels else num_levels
        share.expected += self._expected[reached if reached < num_levels else num_levels]
        share.trials += reached if reached < num_levels else num_levels
        if share.reached >= LONG_REQUEST:
            self.finish(request_id)

    def finish(self, request_id: str) -> None:
        """Count the end of a request; unknown ids are ignored."""
        share = self._requests.pop(request_id, None)
        if share is None:
            return
        self._block.add(share)
        self._block_requests += 1
        if self._block_requests >= BLOCK_REQUESTS and self._block.reached >= BLOCK_TRIALS:
            self._end_block()

    def _end_block(self) -> None:
        block, self._block, self._block_requests = self._block, _Share(), 0
        outcomes, self._outcomes = self._outcomes, Counter[tuple[int, int]]()
        self._num_blocks += 1
        excess, is_rough = block.excess, self._num_blocks <= ROUGH_BLOCKS
        if self._num_blocks > FIRST_BLOCKS:
            self._judge(block)
        if self.is_on:
            self._num_on += 1
            if self._num_on >= RENEWAL:
                self._forget_history()
                self._switch(is_on=False, evidence="what was new has become usual")
            return
        if not is_rough:
            count = min(self._num_blocks - ROUGH_BLOCKS, MEMORY)
            self._variance += (excess**2 - self._variance) / count
        self._learn(outcomes)

    def _judge(self, block: "_Share") -> None:
        """Add a block to the sum."""
        rate = block.expected / max(1, block.trials)
        binomial = rate * (1 - rate) / max(1, block.trials)  # variance if tokens were independent
        deviation = math.sqrt(max(self._variance, binomial, 1e-12))
        self._sum = max(0.0, self._sum - block.excess / deviation - SLACK)
        if self._sum == 0.0:
            self._recent = _Share()
            self._switch(is_on=False, evidence="acceptance is back where it used to be")
            return
        self._recent.add(block)
        if self._sum >= LIMIT:
            self._sum = LIMIT
            recent, trials = self._recent, max(1, self._recent.trials)
            self._switch(
                is_on=True,
                evidence=f"{recent.accepted / trials:.0%} of {recent.trials} tokens were accepted "
                f"lately, {recent.expected / trials:.0%} were before",
            )

    def _switch(self, *, is_on: bool, evidence: str) -> None:
        if is_on != self.is_on:
            self.is_on, self.evidence, self._num_on = is_on, evidence, 0

    def _learn(self, outcomes: Counter[tuple[int, int]]) -> None:
        """Make the drafts of a block part of the history: levels reached, levels accepted."""
        keep = 1 - 1 / MEMORY
        self._reached = [keep * count for count in self._reached]
        self._accepted = [keep * count for count in self._accepted]
        for (reached, accepted), count in outcomes.items():
            missing = reached - len(self._reached)
            self._reached += [0.0] * missing
            self._accepted += [0.0] * missing
            for level in range(reached):
                self._reached[level] += count
                self._accepted[level] += count if level < accepted else 0
        self._expected = [0.0]
        for right, trials in zip(self._accepted, self._reached, strict=True):
            if trials < LEVEL_TRIALS:
                break
            self._expected.append(self._expected[-1] + right / trials)

    def _forget_history(self) -> None:
        self._reached: list[float] = []  # drafts by level, from 0
        self._accepted: list[float] = []
        self._expected = [0.0]  # accepted levels, by levels that were reached
        self._variance = 0.0  # of blocks' excess per trial
        self._num_blocks = self._num_on = self._block_requests = 0
        self._sum = 0.0
        self._block, self._recent = _Share(), _Share()
        self._outcomes = Counter[tuple[int, int]]()  # of the block: levels reached, accepted
        self._requests.clear()


class _Share:
    """Drafts of a request, or of several.

    Attributes:
        reached: levels that the target has judged: accepted ones, and the first rejected one.
        trials: those of them that have a history; the other two count these only.
    """

    __slots__ = ("accepted", "expected", "reached", "trials")

    def __init__(self) -> None:
        self.reached = self.trials = self.accepted = 0
        self.expected = 0.0

    def add(self, other: "_Share") -> None:
        self.reached += other.reached
        self.trials += other.trials
        self.accepted += other.accepted
        self.expected += other.expected

    @property
    def excess(self) -> float:
        """Accepted tokens beyond the expected ones, per trial."""
        return (self.accepted - self.expected) / max(1, self.trials)


_logger = logging.getLogger(__name__)

IDLE_STEPS = 10_000  # without a draft, probes aside, before the alarm that a source never drafts
FRUITLESS_STEPS = 500  # in a row with drafts of a source, none of which brought a token


@dataclass(frozen=True, slots=True)
class VerifiedDraft:
    """One request's draft: levels that were verified, at least 1, and levels that were accepted."""

    source: str
    request_id: str
    levels: int
    accepted: int


@dataclass(slots=True)
class _Source:
    """The state of one source.

    Attributes:
        used: the newest step in which it drafted, probes aside.
        fruitless: steps with its drafts since one was accepted.
        on: alarms that have begun and not ended.
    """

    used: int = 0
    fruitless: int = 0
    fall: FallWatch = field(default_factory=FallWatch)
    on: set[AlarmKind] = field(default_factory=set[AlarmKind])


class SourceAlarms:
    """Watches sources. Each alarm is reported once when it begins and once when it ends.

    sources: those that should draft.
    """

    def __init__(self, sources: Iterable[str]) -> None:
        self._sources = {source: _Source() for source in sources}
        self._num_steps = 0
        self._next_look = IDLE_STEPS
        self._changes: list[Alarm] = []

    def step(
        self, drafts: Iterable[VerifiedDraft] = (), *, is_probe: bool = False
    ) -> tuple[Alarm, ...]:
        """Count a step in which sources could have drafted; return alarms that began or ended.

        is_probe: the drafts are an experiment. Drafts of unknown sources are ignored.
        """
        self._num_steps += 1
        used: dict[str, bool] = {}  # by source: a draft was accepted
        for draft in drafts:
            if draft.source in self._sources:
                used[draft.source] = used.get(draft.source, False) or draft.accepted > 0
                fall = self._sources[draft.source].fall
                fall.observe(draft.request_id, draft.levels, draft.accepted)
                self._report_fall(draft.source)
        for name, has_accepted in used.items():
            self._draft(name, has_accepted=has_accepted, is_probe=is_probe)
        if self._num_steps >= self._next_look:
            self._look_for_idle()
        changes, self._changes = tuple(self._changes), []
        return changes

    def watch(self, booked: Sequence[BookedWork], decision: Decision | None) -> tuple[Alarm, ...]:
        """Count a step; log and return the alarms that begin or end.

        Args:
            decision: about the step; None: there was nothing to decide.
        """
        if decision is None or decision.reason in (Reason.DISABLED, Reason.NOT_WANTED):
            return ()
        drafts = [
            VerifiedDraft(str(work.drafts.source), request.id, levels, len(outcome.accepted_rows))
            for request, work, outcome, _ in booked
            if work.drafts is not None
            and outcome.is_finite
            and (levels := drafted_levels(work.drafts, outcome))
        ]
        alarms = self.step(drafts, is_probe=decision.reason is Reason.NETWORK_PROBE)
        for alarm in alarms:
            what, state = alarm.kind.replace("_", " "), "begins" if alarm.is_on else "ends"
            level = logging.WARNING if alarm.is_on else logging.INFO
            _logger.log(level, "alarm %s: %s of %s: %s", state, what, alarm.source, alarm.evidence)
        return alarms

    def finish(self, request_id: str) -> None:
        """Count the end of a request; the next `step` returns the alarms that follow from it."""
        for name, source in self._sources.items():
            source.fall.finish(request_id)
            self._report_fall(name)

    def _draft(self, name: str, *, has_accepted: bool, is_probe: bool) -> None:
        source = self._sources[name]
        if not is_probe:
            source.used = self._num_steps
            self._switch(name, AlarmKind.NEVER_DRAFTS, "it drafts again", is_on=False)
        source.fruitless = 0 if has_accepted else source.fruitless + 1
        if has_accepted:
            self._switch(name, AlarmKind.NONE_ACCEPTED, "a draft was accepted", is_on=False)
        elif source.fruitless >= FRUITLESS_STEPS:
            evidence = f"it drafted in {FRUITLESS_STEPS} steps, and none was accepted"
            self._switch(name, AlarmKind.NONE_ACCEPTED, evidence, is_on=True)

    def _look_for_idle(self) -> None:
        for name, source in self._sources.items():
            if self._num_steps - source.used >= IDLE_STEPS:
                evidence = f"it has not drafted in {IDLE_STEPS} steps, but for probes"
                self._switch(name, AlarmKind.NEVER_DRAFTS, evidence, is_on=True)
        waiting = [
            source.used + IDLE_STEPS
            for source in self._sources.values()
            if AlarmKind.NEVER_DRAFTS not in source.on
        ]
        self._next_look = min(waiting, default=self._num_steps + IDLE_STEPS)

    def _report_fall(self, name: str) -> None:
        fall = self._sources[name].fall
        if fall.is_on != (AlarmKind.ACCEPTANCE_FELL in self._sources[name].on):
            self._switch(name, AlarmKind.ACCEPTANCE_FELL, fall.evidence, is_on=fall.is_on)

    def _switch(self, name: str, kind: AlarmKind, evidence: str, *, is_on: bool) -> None:
        on = self._sources[name].on
        if is_on == (kind in on):
            return
        if is_on:
            on.add(kind)
        else:
            on.remove(kind)
            self._next_look = min(self._next_look, self._num_steps + IDLE_STEPS)
        self._changes.append(Alarm(kind, name, is_on, evidence))
