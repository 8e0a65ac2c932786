"""How drafts fared, as control is told."""

from collections.abc import Iterator, Sequence

from outdraft.control.facts import DraftOutcome, Fate
from outdraft.core.plan import DraftChoice, WorkResult, drafted_levels
from outdraft.core.scheduled import BookedWork


def fates(booked: Sequence[BookedWork]) -> Iterator[Fate]:
    """How each draft of a step fared that is no lesson: found when it is asked for."""
    for one in booked:
        draft, outcome = one.work.drafts, one.outcome
        if draft is not None and outcome.is_finite:
            yield one.request.id, drafted_levels(draft, outcome), len(outcome.accepted_rows)


def draft_outcome(choice: DraftChoice, request_id: str, result: WorkResult) -> DraftOutcome:
    """How a draft of a lesson fared."""
    drafted = drafted_levels(choice, result)
    margins = () if result.margins is None else tuple(result.margins.tolist())
    return DraftOutcome(request_id, drafted, len(result.accepted_rows), margins, *result.taught)
