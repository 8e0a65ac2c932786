"""Everything outdraft raises on purpose.

OutdraftError
  ConfigError(ValueError)     wrong or contradictory options: nothing was started
  RequestError(ValueError)    this request can never run; `field` names what is wrong with it
  CapacityError               the request could run later (a full waiting queue)
  EngineDeadError             the step loop ended; `__cause__` says why
"""

from collections.abc import Iterable
from difflib import get_close_matches


class OutdraftError(Exception):
    """Base of all errors that outdraft raises on purpose."""


class ConfigError(OutdraftError, ValueError):
    """An option is wrong, unknown, or contradicts another one."""


class RequestError(OutdraftError, ValueError):
    """A request that can never run; `field` is the parameter to change."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class CapacityError(OutdraftError):
    """There is no room now; the same request may succeed later."""


class EngineDeadError(OutdraftError):
    """The step loop has ended; its cause is chained.

    `ended_by` says how the engine's process ended, if it did: its signal or its exit code.
    """

    def __init__(self, message: str, ended_by: str | None = None) -> None:
        super().__init__(message)
        self.ended_by = ended_by


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint to append to an "unknown name" message, with the closest known name first."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(names)}"
