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
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from outdraft.core.decision import Alarm, AlarmKind, Decision, Reason
from outdraft.core.draft import MAX_DRAFTS
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
IDLE_STEPS = 10_000  # without a draft, probes aside, before the alarm that a source never drafts
FRUITLESS_STEPS = 500  # in a row with drafts of a source, none of which brought a token
_logger = logging.getLogger(__name__)


class FallWatch:
    """Watches one source.

    The drafts of a request, or of several, count as float64 [4]: levels that the target has judged
    (accepted ones, and the first rejected one of each draft), those of them with a history, and of
    these the accepted ones and the number that was expected.

    Attributes:
        is_on: acceptance is below its history.
        evidence: why `is_on` changed, as a sentence; "" before it first does.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.evidence = ""
        self._requests: dict[str, np.ndarray] = {}
        self._forget_history()

    def observe(self, request_id: str, levels: int, accepted: int) -> None:
        """Count a verified draft of a request: its levels, and those that were accepted."""
        reached = min(levels, accepted + 1)
        self._outcomes[reached, accepted] += 1
        share = self._requests.setdefault(request_id, np.zeros(4))
        num_levels = len(self._expected) - 1  # with a history
        trials = min(reached, num_levels)
        share += reached, trials, min(accepted, num_levels), self._expected[trials]
        if share[0] >= LONG_REQUEST:
            self.finish(request_id)

    def finish(self, request_id: str) -> None:
        """Count the end of a request; unknown ids are ignored."""
        share = self._requests.pop(request_id, None)
        if share is None:
            return
        self._block += share
        self._block_requests += 1
        if self._block_requests >= BLOCK_REQUESTS and self._block[0] >= BLOCK_TRIALS:
            self._end_block()

    def _end_block(self) -> None:
        block, outcomes = self._block, self._outcomes
        self._begin_block()
        self._num_blocks += 1
        if self._num_blocks > FIRST_BLOCKS:
            self._judge(block)
        if self.is_on:
            self._num_on += 1
            if self._num_on >= RENEWAL:
                self._forget_history()
                self._switch(is_on=False, evidence="what was new has become usual")
            return
        if self._num_blocks > ROUGH_BLOCKS:
            count = min(self._num_blocks - ROUGH_BLOCKS, MEMORY)
            self._variance += (_excess(block) ** 2 - self._variance) / count
        self._learn(outcomes)

    def _judge(self, block: np.ndarray) -> None:
        """Add a block to the sum."""
        _, trials, _, expected = block
        rate = expected / max(1, trials)
        binomial = rate * (1 - rate) / max(1, trials)  # variance if tokens were independent
        deviation = math.sqrt(max(self._variance, binomial, 1e-12))
        self._sum = max(0.0, self._sum - _excess(block) / deviation - SLACK)
        if self._sum == 0.0:
            self._recent = np.zeros(4)
            self._switch(is_on=False, evidence="acceptance is back where it used to be")
            return
        self._recent += block
        if self._sum >= LIMIT:
            self._sum = LIMIT
            _, trials, accepted, expected = self._recent
            self._switch(
                is_on=True,
                evidence=f"{accepted / max(1, trials):.0%} of {trials:.0f} tokens were accepted "
                f"lately, {expected / max(1, trials):.0%} were before",
            )

    def _switch(self, *, is_on: bool, evidence: str) -> None:
        if is_on != self.is_on:
            self.is_on, self.evidence, self._num_on = is_on, evidence, 0

    def _learn(self, outcomes: Counter[tuple[int, int]]) -> None:
        """Make the drafts of a block part of the history: levels reached, levels accepted."""
        self._levels_2L *= 1 - 1 / MEMORY
        for (reached, accepted), count in outcomes.items():
            self._levels_2L[0, :reached] += count
            self._levels_2L[1, :accepted] += count
        reached_L, accepted_L = self._levels_2L[:, self._levels_2L[0] >= LEVEL_TRIALS]
        self._expected = [0.0, *np.cumsum(accepted_L / reached_L).tolist()]

    def _forget_history(self) -> None:
        self._levels_2L = np.zeros((2, MAX_DRAFTS))  # by level: drafts that reached it, accepted it
        self._expected = [0.0]  # accepted levels, by levels that were reached
        self._variance = self._sum = 0.0  # the variance is that of blocks' excess per trial
        self._num_blocks = self._num_on = 0
        self._recent = np.zeros(4)
        self._requests.clear()
        self._begin_block()

    def _begin_block(self) -> None:
        self._block, self._block_requests = np.zeros(4), 0
        self._outcomes = Counter[tuple[int, int]]()  # levels reached, accepted


def _excess(block: np.ndarray) -> float:
    """Accepted tokens beyond the expected ones, per trial."""
    _, trials, accepted, expected = block
    return (accepted - expected) / max(1, trials)


# Source, request, levels that were verified (at least 1), and levels that were accepted.
VerifiedDraft = tuple[str, str, int, int]


class SourceAlarms:
    """Watches sources. Each alarm is reported once when it begins and once when it ends.

    sources: those that should draft.
    """

    def __init__(self, sources: Iterable[str]) -> None:
        self._falls = {source: FallWatch() for source in sources}
        self._idle = Counter[str]()  # steps since a source drafted, probes aside
        self._fruitless = Counter[str]()  # steps with its drafts since one was accepted
        self._on = set[tuple[AlarmKind, str]]()  # alarms that have begun and not ended

    def step(
        self, drafts: Iterable[VerifiedDraft] = (), *, is_probe: bool = False
    ) -> tuple[Alarm, ...]:
        """Count a step in which sources could have drafted; return alarms that began or ended.

        is_probe: the drafts are an experiment. Drafts of unknown sources are ignored.
        """
        accepted = Counter[str]()
        for name, request_id, levels, num_accepted in drafts:
            if name in self._falls:
                accepted[name] += num_accepted
                self._falls[name].observe(request_id, levels, num_accepted)
        self._idle.update(self._falls.keys())
        for name, num_accepted in accepted.items():
            self._idle[name] = self._idle[name] if is_probe else 0
            self._fruitless[name] = 0 if num_accepted else self._fruitless[name] + 1
        return tuple(alarm for name in self._falls for alarm in self._changed(name))

    def _changed(self, name: str) -> Iterator[Alarm]:
        """Yield the alarms of a source that begin or end now."""
        idle = f"it has not drafted in {IDLE_STEPS} steps, but for probes"
        fruitless = f"it drafted in {FRUITLESS_STEPS} steps, and none was accepted"
        is_idle = self._idle[name] >= IDLE_STEPS
        is_fruitless = self._fruitless[name] >= FRUITLESS_STEPS
        fall = self._falls[name]
        for kind, is_on, begins, ends in (
            (AlarmKind.NEVER_DRAFTS, is_idle, idle, "it drafts again"),
            (AlarmKind.NONE_ACCEPTED, is_fruitless, fruitless, "a draft was accepted"),
            (AlarmKind.ACCEPTANCE_FELL, fall.is_on, fall.evidence, fall.evidence),
        ):
            if is_on != ((kind, name) in self._on):
                self._on ^= {(kind, name)}
                yield Alarm(kind, name, is_on, begins if is_on else ends)

    def watch(self, booked: Sequence[BookedWork], decision: Decision | None) -> tuple[Alarm, ...]:
        """Count a step; log and return the alarms that begin or end.

        Args:
            decision: about the step; None: there was nothing to decide.
        """
        if decision is None or decision.reason in (Reason.DISABLED, Reason.NOT_WANTED):
            return ()
        drafts = [
            (str(work.drafts.source), request.id, levels, len(outcome.accepted_rows))
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
        for fall in self._falls.values():
            fall.finish(request_id)
