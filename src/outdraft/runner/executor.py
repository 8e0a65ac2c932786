"""Where steps run: the seam behind which parallelism hides."""

from typing import Protocol

from outdraft.core.plan import StepPlan, StepResult
from outdraft.runner.model_runner import ModelRunner, PendingStep


class Executor(Protocol):
    """Runs the steps of one engine, in order."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step; waits for nothing."""
        ...

    def collect(self, pending: PendingStep) -> StepResult:
        """Wait for a launched step."""
        ...


class LocalExecutor:
    """One process, one device."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def launch(self, plan: StepPlan) -> PendingStep:
        return self.runner.launch(plan)

    def collect(self, pending: PendingStep) -> StepResult:
        return self.runner.collect(pending)
