"""Adds up the engine's steps."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from outdraft.core.decision import Decision
from outdraft.core.draft import DraftSource
from outdraft.core.plan import DraftChoice, StepResult, StepStats, drafted_levels
from outdraft.core.request import BookedWork


def step_stats(
    booked: Sequence[BookedWork],
    result: StepResult,
    *,
    step_s: float,
    num_waiting: int,
    kv_usage: float,
    granted: Mapping[str, DraftChoice] = MappingProxyType({}),
    decision: Decision | None = None,
) -> StepStats:
    """Count one step.

    Args:
        granted: the drafts that were wanted before the step was planned, by request.
    """
    times = result.times
    lengths: list[int] = []
    wanted: list[int] = []
    levels: list[tuple[DraftSource, int, int]] = []
    drafted: dict[DraftSource, int] = {}
    accepted: dict[DraftSource, int] = {}
    drafts: dict[DraftSource, int] = {}
    for request, work, outcome, _ in booked:
        if not work.samples:
            continue
        num_drafted, choice = len(outcome.drafted_ids), granted.get(request.id)
        lengths.append(num_drafted)
        wanted.append(len(choice) if choice is not None else 0)
        if work.drafts is None or not num_drafted:  # a live rule may leave none
            continue
        source, num_accepted = work.drafts.source, len(outcome.accepted_rows)
        drafted[source] = drafted.get(source, 0) + num_drafted
        accepted[source] = accepted.get(source, 0) + num_accepted
        drafts[source] = drafts.get(source, 0) + 1
        levels.append((source, drafted_levels(work.drafts, outcome), num_accepted))
    depths = [num_accepted for _, _, num_accepted in levels]
    return StepStats(
        num_requests=len(result.works),
        num_waiting=num_waiting,
        num_rows=result.num_rows,
        num_emitted=sum(len(one.added) for one in booked),
        num_drafts=len(levels),
        num_draft_tokens=sum(drafted.values()),
        num_accepted_tokens=sum(depths),
        accepted_at=tuple(
            [sum([most > depth for most in depths]) for depth in range(max(depths, default=0))]
        ),
        drafted_by_source=drafted,
        accepted_by_source=accepted,
        drafts_by_source=drafts,
        kv_usage=kv_usage,
        times=times,
        host_s=max(0.0, step_s - times.draft_s - times.verify_s - times.sample_s),
        draft_lengths=tuple(lengths),
        granted_lengths=tuple(wanted),
        draft_levels=tuple(levels),
        decision=decision,
    )


_SUMMED = (
    *("num_emitted", "num_rows", "num_drafts", "num_draft_tokens", "num_accepted_tokens"),
    "host_s",
)


@dataclass(slots=True)
class StatsTotal:
    """Sums over steps; formulas as in vLLM."""

    num_steps: int = 0
    num_emitted: int = 0
    num_rows: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    sample_s: float = 0.0
    host_s: float = 0.0
    accepted_at: Counter[int] = field(default_factory=Counter[int])
    drafted_by_source: Counter[DraftSource] = field(default_factory=Counter[DraftSource])
    accepted_by_source: Counter[DraftSource] = field(default_factory=Counter[DraftSource])
    drafts_by_source: Counter[DraftSource] = field(default_factory=Counter[DraftSource])

    def add(self, step: StepStats) -> None:
        self.num_steps += 1
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(step, name))
        self.draft_s += step.times.draft_s
        self.verify_s += step.times.verify_s
        self.sample_s += step.times.sample_s
        self.accepted_at.update(dict(enumerate(step.accepted_at)))
        self.drafted_by_source.update(step.drafted_by_source)
        self.accepted_by_source.update(step.accepted_by_source)
        self.drafts_by_source.update(step.drafts_by_source)

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token."""
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)

    @property
    def acceptance_length(self) -> float:
        """Tokens per verified draft, the bonus or recovered token included."""
        return 1 + self.num_accepted_tokens / max(1, self.num_drafts)

    @property
    def acceptance_length_by_source(self) -> dict[DraftSource, float]:
        """`acceptance_length` of each source."""
        return {
            source: 1 + self.accepted_by_source[source] / drafts
            for source, drafts in self.drafts_by_source.items()
        }
