"""Drafts that were not verified, compared with the text that came: their acceptance if verified.

They cost no rows. Each draft waits until the text has left it or has reached its end.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from outdraft.control.facts import ShadowOutcome
from outdraft.core.draft import Draft, DraftSource
from outdraft.core.request import Request


@dataclass(slots=True)
class _Shadow:
    """A draft and how far the text has followed it.

    Attributes:
        num_read: tokens of the text that are accounted for.
        row: of the draft that the text has reached; 0: none yet.
        accepted: levels.
    """

    source: DraftSource
    draft: Draft
    num_levels: int
    num_read: int
    row: int = 0
    accepted: int = 0

    def follow(self, request: Request) -> bool:
        """Read the new tokens; true if later ones cannot change the outcome."""
        for token_id in request.token_ids[self.num_read :].tolist():
            self.num_read += 1
            row = _child(self.draft, self.row, token_id)
            if row is None:
                return True
            self.row = row
            self.accepted += 1
            if self.accepted == self.num_levels:
                return True
        return False

    @property
    def outcome(self) -> ShadowOutcome:
        return ShadowOutcome(self.source, self.draft.match_length, self.num_levels, self.accepted)


class Shadows:
    """Owns the drafts that wait for their text."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[_Shadow]] = {}

    @property
    def are_waiting(self) -> bool:
        return bool(self._waiting)

    def cast(self, request: Request, source: DraftSource, draft: Draft) -> None:
        """Remember a draft for the text as it is now."""
        num_levels = len(draft) if draft.is_chain else len(draft.level_sizes())
        shadow = _Shadow(source, draft, num_levels, request.num_tokens)
        self._waiting.setdefault(request.id, []).append(shadow)

    def observe(self, requests: Iterable[Request]) -> tuple[ShadowOutcome, ...]:
        """Outcomes of the drafts whose texts have come."""
        outcomes: list[ShadowOutcome] = []
        for request in requests:
            left: list[_Shadow] = []
            for shadow in self._waiting.pop(request.id, ()):
                if shadow.follow(request):
                    outcomes.append(shadow.outcome)
                else:
                    left.append(shadow)
            if left:
                self._waiting[request.id] = left
        return tuple(outcomes)

    def forget(self, request_id: str) -> None:
        """The request ended: nothing more comes."""
        self._waiting.pop(request_id, None)


def _child(draft: Draft, row: int, token_id: int) -> int | None:
    """The row below `row` that holds a token."""
    for below, (parent, guess) in enumerate(zip(draft.parents, draft.token_ids, strict=True), 1):
        if parent == row and guess == token_id:
            return below
    return None
