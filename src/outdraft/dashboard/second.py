"""One second of the engine, added up."""

from dataclasses import dataclass, field
from typing import Any

from outdraft.core.plan import StepStats
from outdraft.dashboard.latency import Latencies
from outdraft.engine.stats import StatsTotal

DIGITS = 6  # of a time or a ratio: microseconds


@dataclass(slots=True)
class Second:
    """What all steps that were reported within one second came to.

    Attributes:
        second: of the feed's clock, rounded down.
        num_running, num_waiting, kv_usage: the newest that are known.
        plain_tokens_per_s: the newest estimate without speculation; None before the first token.
        ttft, itl: times to first token, and times between arrivals of a request's later tokens.
    """

    second: int
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    plain_tokens_per_s: float | None = None
    total: StatsTotal = field(default_factory=StatsTotal)
    ttft: Latencies = field(default_factory=Latencies)
    itl: Latencies = field(default_factory=Latencies)

    def add(self, step: StepStats) -> None:
        """Count a step."""
        self.total.add(step)

    def followed_by(self, second: int) -> "Second":
        """A later second in which nothing happened yet."""
        return Second(
            second, self.num_running, self.num_waiting, self.kv_usage, self.plain_tokens_per_s
        )

    @property
    def mean_draft_length(self) -> float | None:
        """Tokens a draft; None without a draft."""
        total = self.total
        return total.num_draft_tokens / total.num_drafts if total.num_drafts else None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a draft brought, the bonus or recovered token included; None without one."""
        return self.total.acceptance_length if self.total.num_drafts else None

    @property
    def step_tokens_per_s(self) -> float | None:
        """Tokens per second of step time, to compare with the estimate; None without a step."""
        total = self.total
        seconds = total.draft_s + total.verify_s + total.sample_s + total.host_s
        return total.num_emitted / seconds if seconds > 0 else None

    def to_json(self) -> dict[str, Any]:
        """What the page reads; accepted are tokens by source, lengths are by who drafted first."""
        total = self.total
        lengths = total.acceptance_length_by_source
        return {
            "second": self.second,
            "tokens_per_s": total.num_emitted,
            "step_tokens_per_s": _rounded(self.step_tokens_per_s),
            "plain_tokens_per_s": _rounded(self.plain_tokens_per_s),
            "ttft_p50_s": _rounded(self.ttft.quantile(0.5)),
            "ttft_p95_s": _rounded(self.ttft.quantile(0.95)),
            "itl_p50_s": _rounded(self.itl.quantile(0.5)),
            "itl_p95_s": _rounded(self.itl.quantile(0.95)),
            "steps": total.num_steps,
            "drafts": total.num_drafts,
            "acceptance_length": _rounded(self.acceptance_length),
            "acceptance_length_by_source": {str(s): round(n, DIGITS) for s, n in lengths.items()},
            "mean_draft_length": _rounded(self.mean_draft_length),
            "accepted": {str(source): n for source, n in total.accepted_by_source.items()},
            "draft_s": round(total.draft_s, DIGITS),
            "verify_s": round(total.verify_s, DIGITS),
            "sample_s": round(total.sample_s, DIGITS),
            "host_s": round(total.host_s, DIGITS),
            "kv_usage": round(self.kv_usage, DIGITS),
            "running": self.num_running,
            "waiting": self.num_waiting,
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)
