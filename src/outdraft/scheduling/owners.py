"""Which draft group drafts for which request, where a target's ranks form several draft groups.

A request stays with its group, where the drafter's keys and values of its text are. Groups draft
and verify at the same time, so a step waits for the one with the most requests, and for the one
with the most that want drafts.
"""

from collections.abc import Sequence
from typing import NamedTuple

from outdraft.core.request import Request


class Move(NamedTuple):
    """A request that changes to another group."""

    request: Request
    group: int


def freest_groups(running: Sequence[Request], num_groups: int, request: Request) -> list[int]:
    """Where a request may go: of the groups that own the fewest requests those that own the fewest
    of its kind, those that want drafts or those that want none."""
    alike = [one for one in running if one.wants_drafts == request.wants_drafts]
    counts = _counts(running, num_groups), _counts(alike, num_groups)
    loads = list(zip(*counts, strict=True))
    return [group for group, load in enumerate(loads) if load == min(loads)]


def overdue_moves(running: Sequence[Request], num_groups: int) -> list[Move]:
    """Requests that should change to another group, so that no group has two more than another,
    nor two more that want drafts. Empty: the load is balanced.

    At most one of them wants drafts. Its new owner reads its text again, so the shortest one goes.
    """
    counts = _counts(running, num_groups)
    drafting = _counts([one for one in running if one.wants_drafts], num_groups)
    source, target = counts.index(max(counts)), counts.index(min(counts))
    if counts[source] - counts[target] >= 2:
        wants_drafts = drafting[source] - drafting[target] >= 2
        return [Move(_shortest(running, source, wants_drafts), target)]
    source, target = drafting.index(max(drafting)), drafting.index(min(drafting))
    if drafting[source] - drafting[target] < 2:
        return []
    moves = [Move(_shortest(running, source, wants_drafts=True), target)]
    if counts[target] >= counts[source]:  # one that wants no drafts comes back for it
        moves.append(Move(_shortest(running, target, wants_drafts=False), source))
    return moves


def _shortest(running: Sequence[Request], group: int, wants_drafts: bool) -> Request:
    """The shortest text of a group; one of the other kind if there is none of this."""
    owned = [request for request in running if request.owner == group]
    return min(owned, key=lambda one: (one.wants_drafts != wants_drafts, one.num_tokens))


def _counts(running: Sequence[Request], num_groups: int) -> list[int]:
    counts = [0] * num_groups
    for request in running:
        counts[request.owner] += 1
    return counts
