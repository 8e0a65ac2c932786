"""Statistics of made-up steps, and facts of a made-up engine."""

from typing import Any

from outdraft.core.draft import DraftSource
from outdraft.core.plan import PhaseTimes, StepStats


def stats(
    *,
    emitted: int = 1,
    drafts: int = 0,
    drafted: dict[DraftSource, int] | None = None,
    accepted: dict[DraftSource, int] | None = None,
    begun: dict[DraftSource, int] | None = None,
    times: PhaseTimes | None = None,
    host_s: float = 0.0,
) -> StepStats:
    drafted, accepted = drafted or {}, accepted or {}
    return StepStats(
        num_requests=1,
        num_waiting=0,
        num_rows=emitted,
        num_emitted=emitted,
        num_drafts=drafts,
        num_draft_tokens=sum(drafted.values()),
        num_accepted_tokens=sum(accepted.values()),
        accepted_at=(),
        drafted_by_source=drafted,
        accepted_by_source=accepted,
        drafts_by_source=begun or {},
        kv_usage=0.0,
        times=times or PhaseTimes(),
        host_s=host_s,
    )


def facts(*methods: str, num_speculative_tokens: int = 8) -> dict[str, Any]:
    """Facts of an engine that has these sources of drafts."""
    return {
        "model": "tiny",
        "dtype": "float32",
        "device": "cpu",
        "speculation_methods": methods,
        "num_speculative_tokens": num_speculative_tokens,
        "lossless": True,
    }
