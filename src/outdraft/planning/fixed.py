"""Policies that never learn, to compare the controller with."""

from collections.abc import Sequence
from dataclasses import dataclass

from outdraft.control.facts import (
    Decision,
    Grant,
    Reason,
    ShadowOutcome,
    StepFacts,
    StepOutcome,
)


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Every request drafts the same number of tokens in every step; 0 is plain decoding.

    What the host offers is preferred if `prefers_host`; else the network drafts where there is one.
    """

    num_drafts: int
    prefers_host: bool = True

    @property
    def wants_offers(self) -> bool:
        return self.num_drafts > 0

    @property
    def standing(self) -> None:
        """It decides every step."""

    def holds(self, num_requests: int, prompt_rows: int = 0) -> bool:
        """Never: a fixed policy decides every step."""
        return False

    def decide(self, facts: StepFacts) -> Decision:
        grants = list[Grant]()
        for request in facts.requests:
            levels = min(self.num_drafts, request.max_drafts)
            if levels <= 0:
                continue
            offer = request.offers[0] if request.offers else None
            if offer is not None and (self.prefers_host or request.network is None):
                levels = min(levels, offer.length)
                grants.append(
                    Grant(request.request_id, offer.source, levels, levels, 0, offer.match_length)
                )
            elif request.network is not None:
                grants.append(Grant(request.request_id, request.network, levels, levels, 0))
        rows = sum(grant.rows for grant in grants)
        return Decision(tuple(grants), 0.0, rows, Reason.GAIN, 0, 0, 0, 0, 0, 0)

    def observe(self, outcome: StepOutcome) -> None:
        """A fixed policy learns nothing."""

    def observe_shadows(self, shadows: Sequence[ShadowOutcome]) -> None:
        """A fixed policy learns nothing."""

    def forget(self, request_id: str) -> None:
        """A fixed policy knows no request."""
