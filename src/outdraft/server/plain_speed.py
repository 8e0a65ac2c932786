"""What the engine would have done without speculation, estimated from what its steps cost."""

from dataclasses import dataclass

from outdraft.core.plan import StepStats

WINDOW_STEPS = 200  # older steps count for less and less


class PlainSpeed:
    """Estimated tokens per second of step time, had nothing been drafted.

    A step in which b requests sampled emitted e tokens, at least b. Without drafts the same step
    would have emitted b tokens, and the other e - b would have taken (e - b) / b more steps of b
    rows. The estimate is the emitted tokens over the seconds of all these steps, recent ones
    weighing most (`WINDOW_STEPS`).

    The seconds of a step of b rows are, in this order:

    1. the running average of steps of exactly b rows without a draft, where there were any;
    2. the measured step without its draft phase, its verify time lowered by the rows that would
       not have been there. A row costs the slope of verify time over rows that decoding steps
       showed, and never more than its proportional share.

    Limits. As long as all steps have the same number of rows the slope is unknown and taken as 0:
    the estimate is then low by what the drafted rows cost (little where reading the weights
    dominates, much in a batch that is bound by arithmetic). Time in which the host drafts counts as
    the host's and is not taken out under 2. Averages do not know how long the contexts were.
    Time between steps counts for neither side.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._plain: dict[int, _Trend] = {}
        self._verify = _Trend()

    @property
    def tokens_per_s(self) -> float:
        """NaN before the first token."""
        return self._tokens / self._seconds if self._tokens and self._seconds else float("nan")

    def add(self, step: StepStats) -> None:
        """Learn from a step, and count what it would have been without drafts."""
        sampled = len(step.draft_lengths)
        rows = step.num_rows - step.num_draft_tokens
        if rows == sampled:
            self._verify.add(step.num_rows, step.times.verify_s)
            if not step.num_draft_tokens:
                self._plain.setdefault(rows, _Trend()).add(rows, _undrafted_s(step))
        seconds = self._decoding_s(step, rows) if rows == sampled else self._reduced_s(step, rows)
        if sampled:
            more_steps = (step.num_emitted - sampled) / sampled
            seconds += more_steps * self._decoding_s(step, sampled)
        kept = 1 - 1 / WINDOW_STEPS
        self._tokens = kept * self._tokens + step.num_emitted
        self._seconds = kept * self._seconds + seconds

    def _decoding_s(self, step: StepStats, rows: int) -> float:
        plain = self._plain.get(rows)
        return plain.mean_y if plain is not None else self._reduced_s(step, rows)

    def _reduced_s(self, step: StepStats, rows: int) -> float:
        """What the step would have taken with fewer rows."""
        removed = step.num_rows - rows
        share = step.times.verify_s * removed / max(1, step.num_rows)
        return _undrafted_s(step) - min(share, removed * self._verify.slope)


def _undrafted_s(step: StepStats) -> float:
    return step.times.plain_target_s + step.host_s


@dataclass(slots=True)
class _Trend:
    """Mean and least-squares slope of y over x; as if plain sums at first, then fading."""

    count: int = 0
    mean_x: float = 0.0
    mean_y: float = 0.0
    _var_x: float = 0.0
    _cov: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.count = min(self.count + 1, WINDOW_STEPS)
        weight = 1 / self.count
        dx, dy = x - self.mean_x, y - self.mean_y
        self.mean_x += weight * dx
        self.mean_y += weight * dy
        self._var_x = (1 - weight) * (self._var_x + weight * dx * dx)
        self._cov = (1 - weight) * (self._cov + weight * dx * dy)

    @property
    def slope(self) -> float:
        """At least 0; 0 while x never varied."""
        return max(0.0, self._cov / self._var_x) if self._var_x > 0 else 0.0
