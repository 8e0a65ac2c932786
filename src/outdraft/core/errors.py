"""Everything outdraft raises on purpose."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from outdraft.core.outputs import RequestOutput

Parsed = TypeVar("Parsed", bound="DataclassInstance")


class OutdraftError(Exception):
    """Base of all errors that outdraft raises on purpose."""


class ConfigError(OutdraftError, ValueError):
    """An option is wrong, unknown, or contradicts another one: nothing was started."""


class RequestError(OutdraftError, ValueError):
    """A request that can never run; `field` is the parameter to change."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class ContextLengthError(RequestError):
    """A prompt that is longer than the model reads, alone or with the tokens that are asked for."""


class CapacityError(OutdraftError):
    """There is no room now (a full waiting queue); the same request may succeed later."""


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

    `ended_by` says how the engine's process ended, if it did: its signal or its exit code; or the
    rank that it lost, and how.
    """

    def __init__(self, message: str, ended_by: str | None = None) -> None:
        super().__init__(message)
        self.ended_by = ended_by


class ReplicaLostError(EngineDeadError):
    """A replica ended while it computed a request. Others may live: a new attempt may succeed."""


class RanksError(OutdraftError):
    """A rank died, hangs, or has parted from the others: their engine cannot go on."""


class PartedError(RanksError):
    """Ranks that must do the same have not done the same: a fault of this program."""


def from_mapping(kind: type[Parsed], values: Mapping[str, Any], where: str) -> Parsed:
    """A dataclass made of JSON-like values.

    Args:
        where: the parameter that the values came as; "": they are parameters themselves.

    Raises:
        RequestError: an unknown name, one that is missing, or a wrong value.
    """
    known = {one.name: one for one in fields(kind)}
    for name in values:
        if name not in known:
            place = f"name {name!r} in {where}" if where else f"parameter {name!r}"
            raise RequestError(f"unknown {place}: {did_you_mean(name, known)}", where or name)
    for name, one in known.items():
        if name not in values and one.default is MISSING and one.default_factory is MISSING:
            raise RequestError(f"{where} needs a {name}", where or name)
    return kind(**values)


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one is meant to be; None: it is close to none.

    Names may differ by a letter or two, or by a short word: `prot` is `port`, and `max_new_tokens`
    is `max_tokens`, but `cache_prompt` is not `cache_salt`.
    """
    return next(iter(get_close_matches(name, sorted(known), n=1, cutoff=0.75)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint to append to an "unknown name" message, with the closest known name first."""
    names = sorted(map(str, known))  # the repr of an enum's member is no name
    close = closest_name(name, names)
    hint = f"did you mean {close!r}? " if close is not None else ""
    return f"{hint}known: {', '.join(names)}"
