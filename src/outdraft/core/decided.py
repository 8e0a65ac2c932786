"""What was decided about a step, and why: numbers for those who look on. Plain data."""

from dataclasses import dataclass
from enum import StrEnum

from outdraft.core.record import record


@record
class Prediction:
    """What was expected of a step. Times are seconds.

    Attributes:
        draft_s, target_s, host_s: by phase; the target's contains sampling.
        plain_s: of the step without drafts.
        tokens: expected number of tokens, those of plain decoding included.
        gain: expected tokens a second against plain decoding, minus 1.
    """

    draft_s: float
    target_s: float
    host_s: float
    plain_s: float
    tokens: float
    gain: float

    @property
    def step_s(self) -> float:
        return self.draft_s + self.target_s + self.host_s


@record
class StepDecision:
    """Why a step drafted as it did.

    Attributes:
        reason: a word, as in docs/serving.md.
        price: accepted tokens that a row had to promise; None: no request was to draft, or lengths
            are fixed.
        prediction: None: lengths are fixed.
    """

    reason: str
    price: float | None = None
    prediction: Prediction | None = None


class AlarmKind(StrEnum):
    """What may be wrong with a source of drafts."""

    ACCEPTANCE_FELL = "acceptance_fell"
    NEVER_DRAFTS = "never_drafts"
    NONE_ACCEPTED = "none_accepted"


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm begins, or ends.

    Attributes:
        is_on: whether it begins.
        evidence: what it rests on, as a sentence.
    """

    kind: AlarmKind
    source: str
    is_on: bool
    evidence: str
