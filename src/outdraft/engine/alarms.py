"""Alarms: a source of drafts does worse than it used to, or is of no use.

Pure, and cheap: a step without drafts costs one comparison, a draft costs a few additions.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outdraft.core.decision import Alarm, AlarmKind, Decision, Reason
from outdraft.core.plan import drafted_levels
from outdraft.core.scheduled import BookedWork
from outdraft.engine.fall import FallWatch

_logger = logging.getLogger(__name__)

IDLE_STEPS = 10_000  # without a draft, probes aside, before a source is said never to draft
FRUITLESS_STEPS = 500  # in a row with drafts of a source, none of which brought a token


@dataclass(frozen=True, slots=True)
class Drafted:
    """How one request's draft fared: levels that were verified, at least 1, and accepted."""

    source: str
    request_id: str
    levels: int
    accepted: int


@dataclass(slots=True)
class _Source:
    """What is known of one source.

    Attributes:
        used: the newest step in which it drafted, probes aside.
        fruitless: steps with its drafts since a draft was accepted.
        on: alarms that have begun and not ended.
    """

    used: int = 0
    fruitless: int = 0
    fall: FallWatch = field(default_factory=FallWatch)
    on: set[AlarmKind] = field(default_factory=set[AlarmKind])


class SourceAlarms:
    """Watches sources. Each alarm is told once when it begins and once when it ends.

    sources: those that should draft.
    """

    def __init__(self, sources: Iterable[str]) -> None:
        self._sources = {source: _Source() for source in sources}
        self._num_steps = 0
        self._next_look = IDLE_STEPS
        self._news: list[Alarm] = []

    def step(self, drafts: Iterable[Drafted] = (), *, is_probe: bool = False) -> tuple[Alarm, ...]:
        """Count a step in which sources could have drafted; alarms that began or ended.

        is_probe: the drafts are an experiment. Drafts of unknown sources are ignored.
        """
        self._num_steps += 1
        used: dict[str, bool] = {}  # whether any draft was accepted
        for draft in drafts:
            if draft.source in self._sources:
                used[draft.source] = used.get(draft.source, False) or draft.accepted > 0
                fall = self._sources[draft.source].fall
                fall.observe(draft.request_id, draft.levels, draft.accepted)
                self._tell_fall(draft.source)
        for name, has_accepted in used.items():
            self._draft(name, has_accepted=has_accepted, is_probe=is_probe)
        if self._num_steps >= self._next_look:
            self._look_for_idle()
        if not self._news:
            return ()
        news, self._news = tuple(self._news), []
        return news

    def watch(self, booked: Sequence[BookedWork], decision: Decision | None) -> tuple[Alarm, ...]:
        """Count a step, and log the alarms that begin or end, which are returned.

        Args:
            decision: about the step; None: nothing was to decide.
        """
        if decision is None or decision.reason in (Reason.DISABLED, Reason.NOT_WANTED):
            return ()
        drafts = [
            Drafted(str(work.drafts.source), request.id, levels, len(outcome.accepted_rows))
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
        """A request ended; what follows from it is told by the next step."""
        for name, source in self._sources.items():
            source.fall.finish(request_id)
            self._tell_fall(name)

    def _draft(self, name: str, *, has_accepted: bool, is_probe: bool) -> None:
        source = self._sources[name]
        if not is_probe:
            source.used = self._num_steps
            self._tell(name, AlarmKind.NEVER_DRAFTS, "it drafts again", is_on=False)
        source.fruitless = 0 if has_accepted else source.fruitless + 1
        if has_accepted:
            self._tell(name, AlarmKind.NONE_ACCEPTED, "a draft was accepted", is_on=False)
        elif source.fruitless >= FRUITLESS_STEPS:
            evidence = f"it drafted in {FRUITLESS_STEPS} steps, and none was accepted"
            self._tell(name, AlarmKind.NONE_ACCEPTED, evidence, is_on=True)

    def _look_for_idle(self) -> None:
        for name, source in self._sources.items():
            if self._num_steps - source.used >= IDLE_STEPS:
                evidence = f"it has not drafted in {IDLE_STEPS} steps, but for probes"
                self._tell(name, AlarmKind.NEVER_DRAFTS, evidence, is_on=True)
        waiting = [
            source.used + IDLE_STEPS
            for source in self._sources.values()
            if AlarmKind.NEVER_DRAFTS not in source.on
        ]
        self._next_look = min(waiting, default=self._num_steps + IDLE_STEPS)

    def _tell_fall(self, name: str) -> None:
        fall = self._sources[name].fall
        if fall.is_on != (AlarmKind.ACCEPTANCE_FELL in self._sources[name].on):
            self._tell(name, AlarmKind.ACCEPTANCE_FELL, fall.evidence, is_on=fall.is_on)

    def _tell(self, name: str, kind: AlarmKind, evidence: str, *, is_on: bool) -> None:
        on = self._sources[name].on
        if is_on == (kind in on):
            return
        if is_on:
            on.add(kind)
        else:
            on.remove(kind)
            self._next_look = min(self._next_look, self._num_steps + IDLE_STEPS)
        self._news.append(Alarm(kind, name, is_on, evidence))
