"""Lengths that never change: to compare the controller with, and for tests."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outdraft.control.facts import (
    Decision,
    Fate,
    Grant,
    Reason,
    RequestFacts,
    ShadowOutcome,
    StepFacts,
    StepOutcome,
)

NEVER = 1 << 30  # steps
STANDING_STEPS = 31  # that a decision holds for beside its own


@dataclass(slots=True)
class FixedLength:
    """Every request drafts the same number of levels in every step; 0 is plain decoding.

    Where a source of the host has a draft, the first one that does is preferred if `prefers_host`;
    else the network drafts where there is one. Nobody drafts more than there is to offer.
    """

    num_drafts: int
    prefers_host: bool = True
    standing: Decision | None = field(default=None, init=False)
    wants_outcome: bool = field(default=True, init=False)
    _left: int = field(default=0, init=False)  # steps that it stands for
    _num_requests: int = field(default=0, init=False)

    @property
    def wants_offers(self) -> bool:
        return self.num_drafts > 0

    def try_hold(self, num_requests: int, prompt_rows: int = 0) -> bool:
        """Whether the step drafts as the last one did."""
        if self._left == 0 or prompt_rows or num_requests != self._num_requests:
            return False
        self._left -= 1
        self.wants_outcome = False
        return True

    def quiet_steps(self, *, may_find: bool) -> int:
        """A fixed policy is asked in every step."""
        return 0

    def rest(self) -> None:
        """It never does."""

    def standing_for(self, request_ids: Sequence[str]) -> Decision:
        """As LengthPolicy; it stands for one batch only."""
        assert self.standing is not None
        return self.standing

    def observe_keeping(self, seconds: float) -> None:
        """A fixed policy learns nothing."""

    def network_due_in(self, num_running: int, *, has_prompts: bool = False) -> int:
        return 0 if self.num_drafts else NEVER

    @property
    def wants_plain_time(self) -> bool:
        return False

    def observe_plain(
        self, num_requests: int, context_tokens: int, target_s: float, host_s: float
    ) -> None:
        """A fixed policy learns nothing."""

    @property
    def is_passing(self) -> bool:
        return False

    def pass_by(
        self,
        num_tokens: int,
        draft_s: float,
        host_s: float,
        step_s: float,
        fates: Iterable[Fate] = (),
    ) -> None:
        """A fixed policy learns nothing."""

    def looked(self, step_s: float, prompt_rows: int) -> None:
        """A fixed policy learns nothing."""

    def observe_shadows(self, shadows: Sequence[ShadowOutcome]) -> None:
        """A fixed policy learns nothing."""

    @property
    def wants_margins(self) -> bool:
        return False

    @property
    def has_wrong_costs(self) -> bool:
        return False

    def decide(self, facts: StepFacts) -> Decision:
        grants = tuple(
            grant for request in facts.requests if (grant := self._grant(request)) is not None
        )
        rows = sum(grant.rows for grant in grants)
        reason = Reason.GAIN if grants else Reason.NOTHING_OFFERED
        self.standing = Decision(grants, 0.0, rows, reason, 0, 0, 0, 0, 0, 0)
        is_lasting = not facts.prompt_rows and not facts.has_offers
        self._left = STANDING_STEPS if is_lasting else 0
        self._num_requests = len(facts.requests)
        self.wants_outcome = True
        return self.standing

    def observe(self, outcome: StepOutcome) -> None:
        """A fixed policy learns nothing."""

    def forget(self, request_id: str) -> None:
        """Another batch comes."""
        self._left = 0

    def _grant(self, request: RequestFacts) -> Grant | None:
        if request.max_drafts == 0:
            return None
        offer, match_length = request.offers[0] if request.offers else None, 0
        if offer is not None and (self.prefers_host or request.network is None):
            levels = min(self.num_drafts, offer.length)
            source, rows, shape = offer.source, offer.num_rows(levels), offer.shape
            match_length = offer.match_length
        elif request.network is not None:
            shape = request.shapes[0]
            levels = min(self.num_drafts, request.most_levels(shape))
            source, rows = request.network, sum(shape[:levels]) if shape else levels
        else:
            return None
        if levels <= 0:
            return None
        return Grant(
            request.request_id, source, levels, rows, 0.0, match_length, request.rule, shape
        )
