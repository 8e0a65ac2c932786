"""Engines whose runner gets nothing but bytes, and answers with bytes."""

from outdraft.core.grammar import AllowedTokens, GrammarDrafts
from outdraft.core.plan import StepPlan, StepResult
from outdraft.engine.llm import LLM
from outdraft.runner.model_runner import LaunchedStep
from outdraft.runner.results import PendingStep
from tests.reference.plain_data import Message, as_bytes, check_plain, from_bytes


def copied(message: Message) -> Message:
    """What another process would read."""
    check_plain(message)
    return from_bytes(type(message), as_bytes(message))


class ThroughBytes:
    """Copies all that crosses to the runner and back.

    Attributes:
        plans, results: of all steps, as bytes.
        num_readmitted: requests that came back with tokens that they had made.
        num_drafted: drafts that the network made, as the grammars were told.
    """

    def __init__(self, llm: LLM) -> None:
        self.plans: list[bytes] = []
        self.results: list[bytes] = []
        self.num_readmitted = self.num_drafted = 0
        self._newest: StepPlan | None = None
        runner = llm.engine.runner
        self._launch, self._drafted = runner.launch, runner.drafted
        self._verify, self._collect = runner.verify, runner.collect
        runner.launch, runner.drafted = self.launch, self.drafted
        runner.verify, runner.collect = self.verify, self.collect

    def launch(self, plan: StepPlan) -> PendingStep | LaunchedStep:
        check_plain(plan)
        if self._newest is not None:  # booked by now, and requests ended or gave up their slots
            assert as_bytes(self._newest) == self.plans[-1]
        self._newest = plan
        self.plans.append(as_bytes(plan))
        self.num_readmitted += sum(len(one.token_ids) > one.num_prompt for one in plan.admissions)
        return self._launch(from_bytes(StepPlan, self.plans[-1]))

    def drafted(self, step: LaunchedStep) -> GrammarDrafts:
        drafted = copied(self._drafted(step))
        if drafted.drafts_2BN is not None:
            self.num_drafted += int((drafted.drafts_2BN[0] >= 0).sum())
        return drafted

    def verify(self, step: LaunchedStep, allowed: AllowedTokens) -> PendingStep:
        return self._verify(step, copied(allowed))

    def collect(self, pending: PendingStep) -> StepResult:
        result = self._collect(pending)
        check_plain(result)
        self.results.append(as_bytes(result))
        return from_bytes(StepResult, self.results[-1])
