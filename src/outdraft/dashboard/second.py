"""One second of the engine, added up."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from outdraft.core.plan import StepStats

DIGITS = 6  # of a time or a ratio: microseconds


@dataclass(slots=True)
class Second:
    """What all steps that were reported within one second came to.

    Attributes:
        second: of the feed's clock, rounded down.
        num_drafts: drafts that were verified; a step has at most one per request.
        drafted, accepted: tokens, by source.
        num_running, num_waiting, kv_usage: the newest that are known.
    """

    second: int
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    num_drafts: int = 0
    drafted: Counter[str] = field(default_factory=Counter[str])
    accepted: Counter[str] = field(default_factory=Counter[str])
    draft_s: float = 0.0
    verify_s: float = 0.0
    sample_s: float = 0.0
    host_s: float = 0.0

    def add(self, step: StepStats) -> None:
        """Count a step."""
        self.num_steps += 1
        self.num_tokens += step.num_emitted
        self.num_drafts += step.num_drafts
        self.drafted.update({str(source): n for source, n in step.drafted_by_source.items()})
        self.accepted.update({str(source): n for source, n in step.accepted_by_source.items()})
        self.draft_s += step.times.draft_s
        self.verify_s += step.times.verify_s
        self.sample_s += step.times.sample_s
        self.host_s += step.host_s

    def followed_by(self, second: int) -> "Second":
        """A later second in which nothing happened yet."""
        return Second(second, self.num_running, self.num_waiting, self.kv_usage)

    @property
    def mean_draft_length(self) -> float | None:
        """Tokens a draft; None without a draft."""
        return self.drafted.total() / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a draft brought, the bonus or recovered token included; None without one."""
        return 1 + self.accepted.total() / self.num_drafts if self.num_drafts else None

    def to_json(self) -> dict[str, Any]:
        """What the page reads."""
        return {
            "second": self.second,
            "tokens_per_s": self.num_tokens,
            "steps": self.num_steps,
            "drafts": self.num_drafts,
            "acceptance_length": _rounded(self.acceptance_length),
            "mean_draft_length": _rounded(self.mean_draft_length),
            "drafted": dict(self.drafted),
            "accepted": dict(self.accepted),
            "draft_s": round(self.draft_s, DIGITS),
            "verify_s": round(self.verify_s, DIGITS),
            "sample_s": round(self.sample_s, DIGITS),
            "host_s": round(self.host_s, DIGITS),
            "kv_usage": round(self.kv_usage, DIGITS),
            "running": self.num_running,
            "waiting": self.num_waiting,
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)
