"""Which request comes first."""

from collections.abc import Callable

from outdraft.core.request import Request

OrderKey = Callable[[Request], tuple[float, ...]]


def first_come(request: Request) -> tuple[float, ...]:
    """Arrival time."""
    return (request.arrival_s,)


def by_priority(request: Request) -> tuple[float, ...]:
    """Lower numbers first, then arrival time (as in vLLM)."""
    return (request.priority, request.arrival_s)


POLICIES: dict[str, OrderKey] = {"fcfs": first_come, "priority": by_priority}
