"""What was decided within a second, added up for the page."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from outdraft.core.plan import StepStats

DIGITS = 6


@dataclass(slots=True)
class DecisionTotal:
    """Sums over steps.

    Attributes:
        reasons: steps by reason.
        num_granted, granted: requests that were granted drafts, and their tokens.
        num_predicted, predicted_s, measured_s: steps with a prediction, and their time.
        num_priced, price: steps with a price, and the sum of the prices.
        reached, accepted: drafts so deep, and accepted so deep, by position from 0.
    """

    reasons: Counter[str] = field(default_factory=Counter[str])
    num_granted: int = 0
    granted: int = 0
    num_predicted: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    num_priced: int = 0
    price: float = 0.0
    reached: Counter[int] = field(default_factory=Counter[int])
    accepted: Counter[int] = field(default_factory=Counter[int])

    def add(self, step: StepStats) -> None:
        """Count a step."""
        self.num_granted += sum(length > 0 for length in step.granted_lengths)
        self.granted += sum(step.granted_lengths)
        for _, levels, accepted in step.draft_levels:
            self.reached.update(range(levels))
            self.accepted.update(range(accepted))
        decision = step.decision
        if decision is None:
            return
        self.reasons[decision.reason] += 1
        if decision.price is not None:
            self.num_priced += 1
            self.price += decision.price
        if decision.prediction is not None:
            self.num_predicted += 1
            self.predicted_s += decision.prediction.step_s
            self.measured_s += step.step_s

    def to_json(self) -> dict[str, Any]:
        """Means are None where there was nothing."""
        return {
            "reasons": dict(self.reasons),
            "mean_granted_length": _mean(self.granted, self.num_granted),
            "predicted_step_s": _mean(self.predicted_s, self.num_predicted),
            "measured_step_s": _mean(self.measured_s, self.num_predicted),
            "price": _mean(self.price, self.num_priced),
            "acceptance_by_position": [
                _mean(self.accepted[position], self.reached[position])
                for position in range(max(self.reached, default=-1) + 1)
            ],
        }


def _mean(total: float, count: int) -> float | None:
    return round(total / count, DIGITS) if count else None
