"""Adds up the engine's steps."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from outdraft.core.decided import StepDecision
from outdraft.core.draft import DraftSource
from outdraft.core.plan import (
    DraftChoice,
    PhaseTimes,
    StepPlan,
    StepStats,
    drafted_levels,
)
from outdraft.core.scheduled import BookedWork


def step_stats(
    plan: StepPlan,
    booked: Sequence[BookedWork],
    *,
    num_rows: int,
    times: PhaseTimes,
    step_s: float,
    num_waiting: int,
    kv_usage: float,
    granted: Mapping[str, DraftChoice] = MappingProxyType({}),
    decision: StepDecision | None = None,
) -> StepStats:
    """One step in numbers.

    Args:
        num_rows: that the target read.
        granted: the drafts that were wanted before the step was planned, by request.
    """
    verified = [
        (
            work.drafts.source,
            len(outcome.drafted_ids),
            len(outcome.accepted_rows),
            drafted_levels(work.drafts, outcome),
        )
        for _, work, outcome, _ in booked
        if work.drafts is not None and outcome.drafted_ids  # a live rule may leave none
    ]
    drafted = _sum([(source, num_drafted) for source, num_drafted, _, _ in verified])
    accepted = _sum([(source, num_accepted) for source, _, num_accepted, _ in verified])
    depths = [num_accepted for _, _, num_accepted, _ in verified]
    return StepStats(
        num_requests=len(plan.works),
        num_waiting=num_waiting,
        num_rows=num_rows,
        num_emitted=sum([len(added) for _, _, _, added in booked]),
        num_drafts=len(verified),
        num_draft_tokens=sum(drafted.values()),
        num_accepted_tokens=sum(accepted.values()),
        accepted_at=tuple(
            [sum([most > depth for most in depths]) for depth in range(max(depths, default=0))]
        ),
        drafted_by_source=drafted,
        accepted_by_source=accepted,
        drafts_by_source=_sum([(source, 1) for source, _, _, _ in verified]),
        kv_usage=kv_usage,
        times=times,
        host_s=max(0.0, step_s - times.draft_s - times.verify_s - times.sample_s),
        draft_lengths=tuple(
            [len(outcome.drafted_ids) for _, work, outcome, _ in booked if work.samples]
        ),
        granted_lengths=tuple(
            [len(granted.get(request.id, ())) for request, work, _, _ in booked if work.samples]
        ),
        draft_levels=tuple(
            [(source, levels, num_accepted) for source, _, num_accepted, levels in verified]
        ),
        decision=decision,
    )


def _sum(counts: list[tuple[DraftSource, int]]) -> dict[DraftSource, int]:
    total: dict[DraftSource, int] = {}
    for source, count in counts:
        total[source] = total.get(source, 0) + count
    return total


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
        self.num_emitted += step.num_emitted
        self.num_rows += step.num_rows
        self.num_drafts += step.num_drafts
        self.num_draft_tokens += step.num_draft_tokens
        self.num_accepted_tokens += step.num_accepted_tokens
        self.draft_s += step.times.draft_s
        self.verify_s += step.times.verify_s
        self.sample_s += step.times.sample_s
        self.host_s += step.host_s
        if step.num_drafts == 0:
            return
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
        """Tokens a verified draft brought, the bonus or recovered token included."""
        return 1 + self.num_accepted_tokens / max(1, self.num_drafts)

    @property
    def acceptance_length_by_source(self) -> dict[DraftSource, float]:
        """Tokens that a verified draft brought."""
        return {
            source: 1 + self.accepted_by_source[source] / drafts
            for source, drafts in self.drafts_by_source.items()
        }
