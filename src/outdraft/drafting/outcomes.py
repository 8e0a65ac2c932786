"""How drafts fared, as control is told."""

from collections.abc import Sequence

from outdraft.control.facts import DraftOutcome, Fate
from outdraft.core.plan import DraftChoice, WorkResult, drafted_levels
from outdraft.core.scheduled import BookedWork


def fates(booked: Sequence[BookedWork]) -> list[Fate]:
    """How each draft of a step fared that is no lesson."""
    return [
        (one.request.id, drafted_levels(draft, one.outcome), len(one.outcome.accepted_rows))
        for one in booked
        if (draft := one.work.drafts) is not None and one.outcome.is_finite
    ]


def draft_outcome(choice: DraftChoice, request_id: str, result: WorkResult) -> DraftOutcome:
    """How a draft of a lesson fared."""
    drafted = drafted_levels(choice, result)
    margins = () if result.margins is None else tuple(result.margins.tolist())
    return DraftOutcome(request_id, drafted, len(result.accepted_rows), margins, *result.taught)
