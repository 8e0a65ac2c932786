"""Which draft group drafts for which request, where a target's ranks form several draft groups.

A request stays with its group, where the drafter's keys and values of its text are. Groups draft at
the same time, so a step waits for the one with the most requests.
"""

from collections.abc import Sequence

from outdraft.core.request import Request


def freest_groups(running: Sequence[Request], num_groups: int) -> list[int]:
    """The groups that own the fewest requests."""
    counts = _counts(running, num_groups)
    return [group for group, count in enumerate(counts) if count == min(counts)]


def overdue_move(running: Sequence[Request], num_groups: int) -> tuple[Request, int] | None:
    """A request that should change to another group, so that no group has two more than another.

    The new owner reads its text again, so the shortest one goes. None: the load is balanced.
    """
    counts = _counts(running, num_groups)
    if max(counts) - min(counts) < 2:
        return None
    fullest = counts.index(max(counts))
    owned = [request for request in running if request.owner == fullest]
    return min(owned, key=lambda request: request.num_tokens), counts.index(min(counts))


def _counts(running: Sequence[Request], num_groups: int) -> list[int]:
    counts = [0] * num_groups
    for request in running:
        counts[request.owner] += 1
    return counts
