"""A plain decision that stands: the steps that follow need no facts while it does.

Plain decoding must cost what an engine without a drafter costs. So a decision for it is not made
again in every step, and the engine need not even gather what it would be made from.
"""

from dataclasses import dataclass, field

from outdraft.control.facts import Decision, Reason

MAX_STEPS = 32  # that a plain decision stands for
SPREAD = 8  # it stands for batches that differ by less than one request in so many


@dataclass(slots=True)
class Standing:
    """One plain decision.

    Attributes:
        left: steps that it still stands for.
    """

    decision: Decision
    num_requests: int
    left: int

    def fits(self, num_requests: int) -> bool:
        return self.left > 0 and abs(num_requests - self.num_requests) * SPREAD <= self.num_requests


@dataclass(slots=True)
class StandingDecisions:
    """At most one plain decision for about as many prompt rows."""

    _known: dict[int, Standing] = field(default_factory=dict[int, Standing])

    @property
    def is_experiment(self) -> bool:
        """Whether plain decoding is being tried while drafts pay."""
        return any(
            one.left > 0 and one.decision.reason is Reason.PLAIN_PROBE
            for one in self._known.values()
        )

    def find(self, num_requests: int, prompt_rows: int) -> Decision | None:
        """What stands for such a step, which is counted; None: it has to be decided."""
        standing = self._known.get(prompt_rows.bit_length())
        if standing is None or not standing.fits(num_requests):
            return None
        standing.left -= 1
        return standing.decision

    def put(self, decision: Decision, num_requests: int, prompt_rows: int, left: int) -> None:
        """A decision without drafts; `left`: steps that it may stand for."""
        self._known[prompt_rows.bit_length()] = Standing(decision, num_requests, left)

    def clear(self) -> None:
        self._known.clear()

    def leave(self) -> None:
        """A request ended, and another may come: nothing stands when all may have changed."""
        for standing in self._known.values():
            standing.left -= MAX_STEPS // max(1, standing.num_requests)
