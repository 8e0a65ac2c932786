"""The scheduler's side of a step: whose works they are. Only the plan crosses to the runner."""

from typing import NamedTuple

from outdraft.core.plan import StepPlan, Work, WorkResult
from outdraft.core.request import Request


class ScheduledStep(NamedTuple):
    """A plan, and the requests of its works in the same order."""

    plan: StepPlan
    requests: tuple[Request, ...]

    @property
    def works(self) -> tuple[Work, ...]:
        return self.plan.works


class BookedWork(NamedTuple):
    """What came of one request's part of a step.

    Attributes:
        added: the tokens that were really added to the request's output.
    """

    request: Request
    work: Work
    outcome: WorkResult
    added: tuple[int, ...]
