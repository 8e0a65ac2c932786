"""The controller's interface, and lengths that never change."""

from dataclasses import dataclass
from typing import Protocol

from outdraft.control.facts import RequestFacts, StepFacts, StepOutcome
from outdraft.core.decision import Decision, Grant, Reason, rows_of


class LengthPolicy(Protocol):
    """Gets facts before a step and its outcome after it."""

    def hold(
        self, num_requests: int, prompt_rows: int = 0, *, may_offer: bool = False
    ) -> Decision | None:
        """An earlier decision that holds for the step that begins now; None: decide again.

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
        """Drop the state of a request that ended; unknown ids are fine."""
        ...

    def network_due_in(self) -> int:
        """Count the steps until a network may draft again, as far as is known; 0 while it drafts
        for gain, and reads prompts in the step that computes them."""
        ...


NEVER = 1 << 30  # steps


@dataclass(slots=True)
class FixedLength:
    """Every request drafts the same number of levels in every step; 0 is plain decoding.

    Where a source of the host has a draft, the first one that does is preferred if `prefers_host`;
    else the network drafts where there is one. A request drafts no more than there is to offer.
    """

    num_drafts: int
    prefers_host: bool = True

    def hold(
        self, num_requests: int, prompt_rows: int = 0, *, may_offer: bool = False
    ) -> Decision | None:
        """Plain decoding always holds; drafts are decided again in each step."""
        return None if self.num_drafts else PLAIN

    def decide(self, facts: StepFacts) -> Decision:
        """Grant the same number of levels to each request that may draft."""
        found = [self._grant(request) for request in facts.requests]
        grants = tuple(grant for grant in found if grant is not None)
        return Decision(Reason.GAIN, grants) if grants else PLAIN

    def observe(self, outcome: StepOutcome) -> None:
        """Learn nothing."""

    def forget(self, request_id: str) -> None:
        """Know no request."""

    def network_due_in(self) -> int:
        """Draft in each step or never."""
        return 0 if self.num_drafts else NEVER

    def _grant(self, request: RequestFacts) -> Grant | None:
        offer, match_length = request.offers[0] if request.offers else None, 0
        if offer is not None and (self.prefers_host or request.network is None):
            source, shape, most = offer.source, offer.shape, offer.length
            match_length = offer.match_length
        elif request.network is not None:
            source, shape = request.network, request.shapes[0]
            most = request.most_levels(shape)
        else:
            return None
        levels = min(self.num_drafts, most)
        if levels <= 0 or request.max_drafts == 0:
            return None
        rows = rows_of(shape, levels)
        return Grant(request.request_id, source, levels, rows, match_length, request.rule, shape)


PLAIN = Decision(Reason.NOTHING_OFFERED)
