"""What decides lengths: the controller, or a rule that never learns."""

from typing import Protocol

from outdraft.control.facts import StepFacts, StepOutcome
from outdraft.core.decision import Decision


class LengthPolicy(Protocol):
    """Is told facts before a step and the outcome after it."""

    def hold(
        self, num_requests: int, prompt_rows: int = 0, *, may_offer: bool = False
    ) -> Decision | None:
        """An earlier decision that is good for the step that begins now; None: decide anew.

        Args:
            num_requests: those that sample in this step.
            prompt_rows: as in StepFacts.
            may_offer: sources of the host may find drafts, and have not looked yet.
        """
        ...

    def decide(self, facts: StepFacts) -> Decision:
        """Decide how the step that begins now speculates. A grant's host draft is one of the
        offers."""
        ...

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step that is over. Not every decision is followed by this: steps may
        fail."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request that ended; unknown ids are fine."""
        ...

    def network_due_in(self) -> int:
        """Count the steps until a network may draft again, as far as is known; 0 while it does in
        earnest, and reads prompts as they pass by."""
        ...
