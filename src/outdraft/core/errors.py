"""Everything outdraft raises on purpose.

OutdraftError
  ConfigError(ValueError)     wrong or contradictory options: nothing was started
  RequestError(ValueError)    this request can never run; `field` names what is wrong with it
  CapacityError               the request could run later (a full waiting queue)
  GenerationError             this request failed while it ran; others go on
  EngineDeadError             the step loop ended; `__cause__` says why
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outdraft.core.outputs import RequestOutput


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


class GenerationError(OutdraftError):
    """A request failed while it ran, for a reason of its own: the others go on.

    Attributes:
        outputs: of `LLM.generate`, all that was asked for, in order; those that failed have
            `error` set.
    """

    def __init__(self, message: str, outputs: "Sequence[RequestOutput]" = ()) -> None:
        super().__init__(message)
        self.outputs = outputs


class EngineDeadError(OutdraftError):
    """The step loop has ended; its cause is chained.

    `ended_by` says how the engine's process ended, if it did: its signal or its exit code.
    """

    def __init__(self, message: str, ended_by: str | None = None) -> None:
        super().__init__(message)
        self.ended_by = ended_by


def check_names(kind: type, values: Iterable[str], unknown: str, field: str | None = None) -> None:
    """Raise RequestError at the first of `values` that is no field of the dataclass `kind`.

    Args:
        unknown: the message's beginning, with {} where the name is to stand.
        field: of the error; None: the name itself.
    """
    known = {one.name for one in fields(kind)}
    for name in values:
        if name not in known:
            hint = did_you_mean(name, known)
            raise RequestError(f"{unknown.format(repr(name))}: {hint}", field or name)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint to append to an "unknown name" message, with the closest known name first."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(names)}"
